"""Reads chats and preference pairs of all common formats into one form: messages with a role and a content.

| format | a record has |
|---|---|
| messages | `messages`: a list of {role, content} |
| prompt | `prompt` and `response` (or `completion`); Alpaca's wrapper around a prompt is taken off |
| sharegpt | `conversations`: a list of {from, value} |
| alpaca | `instruction`, perhaps `input` (Dolly: `context`), and `output` (Dolly: `response`) |
| hh | `chosen`, perhaps `rejected`: transcripts, "\\n\\nHuman: ... \\n\\nAssistant: ..." |
| pairs | `chosen` and `rejected`, as texts or as messages, perhaps `prompt` and `margin` |

A file is .jsonl, .json (either perhaps .gz or .zst) or .parquet.
"""

import dataclasses
import re
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence

from jaxlm.config import ConfigError
from jaxlm.data.chats import records
from jaxlm.data.chats.records import ASSISTANT, Messages, Place, Row, Unfit, message_of, messages_of, text_of
from jaxlm.host.files import is_number


@dataclasses.dataclass(frozen=True)
class Chat:
    """A conversation, which ends with what the assistant says."""

    messages: Messages  # those with `weight` 0 are given, not learnt
    place: Place
    given: int = 0  # the number of first messages that are not learnt
    tools: Sequence[typing.Any] | None = None  # that the assistant may call, as JSON schemas
    last: bool = False  # only the last answer is learnt

    def trained(self) -> frozenset[int]:
        """Returns the indices of the messages that are learnt: the assistant's, without given ones."""
        learnt = [one["role"] == ASSISTANT and one.get("weight") != 0 for one in self.messages]
        said = [i for i, counts in enumerate(learnt) if counts and i >= self.given]
        return frozenset(said[-1:] if self.last else said)

    def up_to(self, number: int) -> "Chat":
        """Returns the conversation up to a message, which is the only one that is learnt."""
        return dataclasses.replace(self, messages=self.messages[: number + 1], last=True)

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys and roles in the chat that only some models' templates write."""
        keys = {key for message in self.messages if len(message) > 2 for key in message}
        keys |= {message["role"] for message in self.messages} | ({"tools"} if self.tools else set())
        return tuple(key for key in records.TEMPLATED if key in keys)


def without(messages: Messages, key: str) -> Messages:
    """Returns messages without a key, and without the messages whose role has that name."""
    return tuple({name: one[name] for name in one if name != key} for one in messages if one["role"] != key)


@dataclasses.dataclass(frozen=True)
class Pair:
    """A conversation with two continuations, of which `chosen` is preferred."""

    prompt: Messages  # the messages that both sides share; perhaps none
    chosen: Messages
    rejected: Messages
    margin: float  # by how much the chosen side is better, by the data
    place: Place
    tools: Sequence[typing.Any] | None = None

    def sides(self) -> tuple[Chat, Chat]:
        given = (self.place, len(self.prompt), self.tools)
        return Chat(self.prompt + self.chosen, *given), Chat(self.prompt + self.rejected, *given)


Example = Chat | Pair
Ask = Callable[[Row], tuple[Messages, dict[str, typing.Any]]]


class Asked(typing.NamedTuple):
    """A prompt to be answered."""

    messages: Messages  # the last one is to be answered
    columns: dict[str, typing.Any]  # the record's other keys
    place: Place
    tools: Sequence[typing.Any] | None = None


def read(
    path: str, form: str, pairs: bool, key: str = "data.path", notes: records.Notes | None = None
) -> Iterator[Example]:
    """Yields the examples of a file, a folder or a glob; `form` is a format, or "auto": by the keys of each record.

    Raises ConfigError if there is no such file, no record can be trained on, or records have keys that can't be read.
    """
    if not path:
        raise ConfigError(f"{key} is empty: name a .jsonl, .json or .parquet file of examples, or a folder of them")

    def example(row: Row) -> Example:
        if row.get("label") is not None:
            row.note("refused", "label", "it may mark a disliked answer")
        for name in records.WEIGHTS:  # of a whole row; other numbers than 0 mean something else
            if row.columns.get(name) in (0, False):
                row.note("read", name)
                raise Unfit(f"its {name} is {row[name]}")
        return _example(row, form, pairs)

    return records.rows(path, key, notes or records.Notes(), example)


def read_prompts(
    path: str, key: str = "data.path", notes: records.Notes | None = None, ask: Ask | None = None
) -> Iterator[Asked]:
    """Yields each record's prompt. Raises ConfigError as `read` does.

    A record has `prompt` (a text or messages), or `messages` or `conversations`, whose last answer is left off. Pairs
    and chats of other formats give the prompt that they answer.
    """

    def asked(row: Row) -> Asked:
        row.learns = False
        messages, columns = ask(row) if ask else (_asked(row), {k: v for k, v in row.columns.items() if k != "prompt"})
        messages = records.led_by(messages, records.system_of(row))
        return Asked(messages, columns, row.place, _tools(row))

    return records.rows(path, key, notes or records.Notes(), asked)


def _tools(row: Row) -> list[records.Message] | None:
    return row.listed("tools", row.get("tools"), lambda tool: isinstance(tool, Mapping))


def _asked(row: Row) -> Messages:
    chats = ("messages",) if "chosen" in row else ("messages", "conversations")
    name = next((name for name in ("prompt", *chats) if name in row), None)
    if not name and {"chosen", "instruction"} & row.keys():
        one = _example(row, "auto", "rejected" in row)
        return one.prompt if isinstance(one, Pair) else one.messages[:-1]
    if not name:
        raise Unfit(f"it has no prompt and no messages, only {', '.join(sorted(row)) or '(nothing)'}")
    messages = _prompt(row[name], row) if name == "prompt" else messages_of(row[name], row)
    asks = next((i for i in range(len(messages), 0, -1) if messages[i - 1]["role"] != ASSISTANT), 0)
    if not asks:
        raise Unfit(f"all messages of {name} are the assistant's, so there is nothing to answer: leave the record out")
    if asks < len(messages):
        row.note("answered")
    return messages[:asks]


def _example(row: Row, form: str, pairs: bool) -> Example:
    said = _FORMATS[form if form != "auto" else _form(row)](row)
    system, tools = records.system_of(row), _tools(row)
    if said.rejected is None:
        if pairs:
            raise Unfit("this is no pair: it needs chosen and rejected")
        messages = records.led_by(said.prompt + said.chosen, system)
        given = said.given and said.given + len(messages) - len(said.prompt + said.chosen)
        return Chat(_ended(messages), row.place, given, tools)
    if not pairs:
        return Chat(_ended(said.prompt + said.chosen), row.place, len(said.prompt), tools)
    for name, side in (("chosen", said.chosen), ("rejected", said.rejected)):
        if not side or side[-1]["role"] != ASSISTANT:
            raise Unfit(f"{name} does not end with what the assistant says, so there is nothing to prefer")
    return Pair(said.prompt, said.chosen, said.rejected, said.margin, row.place, tools)


def _ended(messages: Messages) -> Messages:
    """Returns the messages up to the assistant's last one: nothing is learnt from those after it."""
    last = max((i for i, message in enumerate(messages) if message["role"] == ASSISTANT), default=None)
    if last is None:
        raise Unfit("the assistant says nothing here, so there is nothing to learn: leave the record out")
    return messages[: last + 1]


class _Said(typing.NamedTuple):
    """A record as prompt, continuation and rejected continuation; its first `given` messages are not learnt."""

    prompt: Messages
    chosen: Messages
    rejected: Messages | None = None
    margin: float = 0.0
    given: int = 0


def _form(record: Mapping[str, typing.Any]) -> str:
    """Returns the format of a record, by its keys."""
    if "chosen" in record:
        transcript = isinstance(record["chosen"], str) and "prompt" not in record
        return "hh" if transcript and _TURN.search(record["chosen"]) else "pairs"
    for form, needs in _NEEDS.items():
        if all(any(name in record for name in names) for names in needs):
            return form
    known = "messages; prompt, response; conversations; instruction, output; chosen, rejected (examples.format)"
    raise Unfit(f"no known format has the keys {', '.join(sorted(record)) or '(none)'}: known are {known}")


def _from_messages(row: Row, name: str = "messages") -> _Said:
    return _Said((), messages_of(_field(row, name), row))


def _from_prompt(row: Row) -> _Said:
    prompt, answer = _prompt(_field(row, "prompt"), row), _answer(_field(row, "response", "completion"), row)
    return _Said(prompt, answer, given=len(prompt))


def _from_alpaca(row: Row) -> _Said:
    more = "input" if "input" in row else "context"
    asked = (text_of(_field(row, "instruction"), "instruction"), text_of(row.get(more, ""), more))
    prompt = (*_history(row), message_of("user", "\n\n".join(filter(None, asked))))
    return _Said(prompt, _answer(_field(row, "output", "response"), row))


def _is_turn(turn: typing.Any) -> bool:
    return isinstance(turn, list) and [*map(type, turn)] == [str, str]


def _history(row: Row) -> Messages:
    """Returns the earlier turns of an Alpaca record, in LLaMA-Factory's form: a list of [question, answer]."""
    turns = row.listed("history", row.get("history"), _is_turn) or []
    return tuple(message_of(*said) for turn in turns for said in zip(("user", ASSISTANT), turn, strict=True))


def _from_hh(row: Row) -> _Said:
    chosen = _transcript(text_of(_field(row, "chosen"), "chosen"))
    if "rejected" not in row:
        return _Said((), chosen)
    return _parted(chosen, _transcript(text_of(row["rejected"], "rejected")), row)


def _from_pairs(row: Row) -> _Said:
    prompt = _prompt(row["prompt"], row) if "prompt" in row else ()
    heads, rests = zip(*(_side(_field(row, name), prompt, row) for name in ("chosen", "rejected")), strict=True)
    # Messages before the question on one side count for the other side too.
    longest = max(heads, key=len)
    leads = [longest if longest[: len(head)] == head else head for head in heads]
    return _parted(*(lead + rest for lead, rest in zip(leads, rests, strict=True)), row)


def _side(value: typing.Any, prompt: Messages, row: Row) -> tuple[Messages, Messages]:
    """Splits a side of a pair, perhaps a whole conversation, into (messages before the question, the question and the rest)."""
    if isinstance(value, str) and not prompt:
        raise Unfit("a pair of texts needs a prompt")
    answer = _answer(value, row)
    side = _transcript(value) if isinstance(value, str) and _is_transcript(value) else answer
    lead = next((i for i, message in enumerate(prompt) if message["role"] != "system"), len(prompt))
    system, question = prompt[:lead], prompt[lead:]
    told = system[0]["content"] if system else ""
    if not question:
        return (), records.led_by(answer, told)
    starts = range(len(side) if side[0]["role"] != ASSISTANT else 1)
    at = next((i for i in starts if _same(side[i : i + len(question)], question)), None)
    if at is None:
        return system, question + answer
    return records.led_by(side[:at], told), question + side[at + len(question) :]


def _same(first: Messages, second: Messages) -> bool:
    """Returns True if two conversations are the same, except for spaces at the end of messages and Alpaca's wrapper."""
    told = [[(one["role"], unwrapped(one["content"]).rstrip()) for one in messages] for messages in (first, second)]
    return told[0] == told[1]


def _parted(chosen: Messages, rejected: Messages, row: Row) -> _Said:
    """Returns a pair of whole conversations: the prompt is their common first messages, never a side's last message."""
    chosen, rejected = (records.led_by(side, records.system_of(row)) for side in (chosen, rejected))
    most, common = min(len(chosen), len(rejected)) - 1, 0
    while common < most and chosen[common] == rejected[common]:
        common += 1
    margin = row.get("margin", 0.0)
    if not is_number(margin):
        raise Unfit(f"the margin {str(margin)[:40]!r} is no number")
    for names in _SCORES:
        if all(is_number(row.columns.get(name)) for name in names) and row[names[0]] < row[names[1]]:
            row.note("scores")
    return _Said(chosen[:common], chosen[common:], rejected[common:], float(margin))


_FORMATS: dict[str, Callable[[Row], _Said]] = {
    "messages": _from_messages,
    "prompt": _from_prompt,
    "sharegpt": lambda row: _from_messages(row, "conversations"),
    "alpaca": _from_alpaca,
    "hh": _from_hh,
    "pairs": _from_pairs,
}
# For chats: the keys that each format needs, one of each group. Formats are tried in this order.
_NEEDS = {
    "messages": (("messages",),),
    "sharegpt": (("conversations",),),
    "alpaca": (("instruction",), ("output", "response")),
    "prompt": (("prompt",), ("response", "completion")),
}

_SCORES = (("score_chosen", "score_rejected"), ("chosen_score", "rejected_score"))

_TURN = re.compile(r"(?:\A|\n\n)(Human|Assistant):[ \t]*")
_SPEAKERS = {"Human": "user", "Assistant": ASSISTANT}
# tatsu-lab/stanford_alpaca, train.py: the text around an instruction and, if there is one, its input.
_WRAPPER = re.compile(
    r"\s*Below is an instruction that describes a task(?:, paired with an input that provides further context)?\."
    r"\s*Write a response that appropriately completes the request\.\s*###\s*Instruction:[ \t]*\n(?P<asked>.*?)"
    r"(?:\n\s*###\s*Input:[ \t]*\n(?P<input>.*?))?\n\s*###\s*Response:\s*",
    re.DOTALL,
)


def unwrapped(prompt: str) -> str:
    """Returns a prompt without the text that Alpaca puts around an instruction and its input; other prompts unchanged."""
    if not (wrapped := _WRAPPER.fullmatch(prompt)):
        return prompt
    return "\n\n".join(filter(None, (wrapped["asked"].strip(), (wrapped["input"] or "").strip())))


def _field(row: Row, *names: str) -> typing.Any:
    for name in names:
        if name in row:
            return row[name]
    raise Unfit(f"it has no {' or '.join(names)}, which the format needs (examples.format)")


def _prompt(value: typing.Any, row: Row) -> Messages:
    """Returns the messages of a prompt, which is a list of messages, a transcript, or the user's text."""
    if not isinstance(value, str):
        return messages_of(value, row)
    if _is_transcript(value):
        turns = _transcript(value)
        # "... \n\nAssistant:" waits for the answer.
        return turns[:-1] if turns[-1] == message_of(ASSISTANT, "") else turns
    return (message_of("user", unwrapped(value)),)


def _answer(value: typing.Any, row: Row) -> Messages:
    return (message_of(ASSISTANT, value),) if isinstance(value, str) else messages_of(value, row)


def _is_transcript(text: str) -> bool:
    return text.lstrip().startswith("Human:") and bool(_TURN.search(text))


def _transcript(text: str) -> Messages:
    """Returns the messages of an HH transcript, without the transcript's own spaces around each."""
    parts = _TURN.split(text.strip())
    if parts[0].strip() or len(parts) < 3:
        raise Unfit('a transcript begins with "Human:" and has "\\n\\nAssistant:" before each answer')
    return tuple(message_of(_SPEAKERS[who], said.strip()) for who, said in zip(parts[1::2], parts[2::2], strict=True))
