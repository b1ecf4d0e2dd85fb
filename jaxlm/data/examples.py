"""Reads chats and preference pairs of all common formats, and gives them one form: messages with a role and a content.

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
from jaxlm.corpus.benchmarks import reading
from jaxlm.files import is_number

Message = dict[str, str]  # "role" and "content"
Messages = tuple[Message, ...]
ASSISTANT = "assistant"


class Place(typing.NamedTuple):
    """Where an example stands: its file and its number there, from 1; in a .jsonl its line."""

    path: str
    number: int

    def __str__(self) -> str:
        return f"{self.path}:{self.number}"


@dataclasses.dataclass(frozen=True)
class Chat:
    """A conversation, which ends with what the assistant says.

    Attributes:
      messages: its messages.
      place: where it was read.
      given: how many of the messages are given, from the first one on: the loss is on what the assistant says after them.
    """

    messages: Messages
    place: Place
    given: int = 0


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two ways in which a conversation goes on, of which the first is preferred.

    Attributes:
      prompt: the messages that both have in common; there may be none.
      chosen, rejected: the messages after it; both end with what the assistant says.
      margin: by how much the chosen one is better, as the data says it; 0 if it does not.
      place: where it was read.
    """

    prompt: Messages
    chosen: Messages
    rejected: Messages
    margin: float
    place: Place

    def sides(self) -> tuple[Chat, Chat]:
        """Returns (chosen, rejected) as conversations whose prompt is given."""
        first, second = (self.prompt + side for side in (self.chosen, self.rejected))
        return Chat(first, self.place, len(self.prompt)), Chat(second, self.place, len(self.prompt))


Example = Chat | Pair


def read(path: str, form: str, pairs: bool, key: str = "data.path") -> Iterator[Example]:
    """Yields the examples of a file, a folder of files or a glob, in the order of the files' names.

    Args:
      path: the path.
      form: the format, or "auto": by the keys of each record.
      pairs: True to yield `Pair`s; False for `Chat`s, which pairs become by their chosen side.
      key: the config's key that names the path, for messages.

    Raises:
      ConfigError: there is no such file, a record is of another format, or what it says can't be trained on. The message
        begins with the file and the line.
    """
    if not path:
        raise ConfigError(f"{key} is empty: name a .jsonl, .json or .parquet file of examples, or a folder of them")
    for file in reading.files((path,), key):
        for number, record in reading.records(file):
            place = Place(file, number)
            try:
                yield _example(record, form, pairs, place)
            except _Unfit as error:
                raise ConfigError(f"{place}: {error}") from None


def read_prompts(path: str, key: str = "data.path") -> Iterator[tuple[Messages, dict[str, typing.Any], Place]]:
    """Yields (what is asked, the record's other columns, its place) for each record of a file, a folder or a glob.

    A record has `prompt`, a text or messages, or else `messages`, which stay among its columns; the user speaks last. Pairs,
    and chats of the other formats, are asked what they answer: HH's transcripts up to where both sides part.

    Raises ConfigError as `read` does.
    """
    for file in reading.files((path,), key):
        for number, record in reading.records(file):
            place = Place(file, number)
            try:
                yield _asked(record, place), {name: value for name, value in record.items() if name != "prompt"}, place
            except _Unfit as error:
                raise ConfigError(f"{place}: {error}") from None


def _asked(record: dict, place: Place) -> Messages:
    found = [name for name in ("prompt", "messages") if record.get(name) is not None]
    if not found and {"chosen", "conversations", "instruction"} & record.keys():
        one = _example(record, "auto", "rejected" in record, place)
        return one.prompt if isinstance(one, Pair) else one.messages[:-1]
    if not found:
        raise _Unfit(f"it has no prompt and no messages, only {', '.join(sorted(record)) or '(nothing)'}")
    messages = _prompt(record["prompt"]) if found[0] == "prompt" else _messages(record["messages"])
    if messages[-1]["role"] == ASSISTANT:
        raise _Unfit(f"the last message of {found[0]} is the assistant's, so there is nothing to answer: leave it out")
    return messages


class _Unfit(ValueError):
    """What is wrong with a record."""


def _example(record: dict, form: str, pairs: bool, place: Place) -> Example:
    found = {key: value for key, value in record.items() if value is not None}
    said = _FORMATS[form if form != "auto" else _form(found)](found)
    if said.rejected is None:
        if pairs:
            raise _Unfit("this is no pair: it needs chosen and rejected")
        return Chat(_ended(said.prompt + said.chosen), place, said.given)
    if not pairs:
        return Chat(_ended(said.prompt + said.chosen), place, len(said.prompt))
    for name, side in (("chosen", said.chosen), ("rejected", said.rejected)):
        if not side or side[-1]["role"] != ASSISTANT:
            raise _Unfit(f"{name} does not end with what the assistant says, so there is nothing to prefer")
    return Pair(said.prompt, said.chosen, said.rejected, said.margin, place)


def _ended(messages: Messages) -> Messages:
    """The messages up to the last of the assistant: nothing is learnt from what follows."""
    last = max((i for i, message in enumerate(messages) if message["role"] == ASSISTANT), default=None)
    if last is None:
        raise _Unfit("the assistant says nothing here, so there is nothing to learn: leave it out")
    return messages[: last + 1]


class _Said(typing.NamedTuple):
    """A record: what is said first, how it goes on, and how it should not; `given` messages are not learnt from."""

    prompt: Messages
    chosen: Messages
    rejected: Messages | None = None
    margin: float = 0.0
    given: int = 0


def _form(record: Mapping[str, typing.Any]) -> str:
    """The format of a record, by its keys."""
    if "chosen" in record:
        transcript = isinstance(record["chosen"], str) and "prompt" not in record
        return "hh" if transcript and _TURN.search(record["chosen"]) else "pairs"
    for form, needs in _NEEDS.items():
        if all(any(name in record for name in names) for names in needs):
            return form
    raise _Unfit(
        f"no known format has the keys {', '.join(sorted(record)) or '(none)'}: known are messages; prompt, response; "
        "conversations; instruction, output; chosen, rejected (examples.format)"
    )


def _from_messages(record: dict) -> _Said:
    return _Said((), _messages(_field(record, "messages")))


def _from_sharegpt(record: dict) -> _Said:
    return _Said((), _messages(_field(record, "conversations")))


def _from_prompt(record: dict) -> _Said:
    prompt, answer = _prompt(_field(record, "prompt")), _answer(_field(record, "response", "completion"))
    return _Said(prompt, answer, given=len(prompt))


def _from_alpaca(record: dict) -> _Said:
    asked = (_text(_field(record, "instruction")), _text(record.get("input", record.get("context", ""))))
    said = "\n\n".join(part for part in asked if part)
    return _Said((_message("user", said),), _answer(_field(record, "output", "response")))


def _from_hh(record: dict) -> _Said:
    chosen = _transcript(_text(_field(record, "chosen")))
    rejected = _transcript(_text(record["rejected"])) if "rejected" in record else None
    return _parted((), chosen, rejected, record) if rejected is not None else _Said((), chosen)


def _from_pairs(record: dict) -> _Said:
    prompt = _prompt(record["prompt"]) if "prompt" in record else ()
    chosen, rejected = (_side(_field(record, name), prompt) for name in ("chosen", "rejected"))
    return _parted(prompt, chosen, rejected, record)


def _side(value: typing.Any, prompt: Messages) -> Messages:
    """A side of a pair after the prompt. As messages it may repeat the prompt."""
    side = _answer(value)
    if isinstance(value, str) and not prompt:
        raise _Unfit("a pair of texts needs a prompt")
    return side[len(prompt) :] if prompt and side[: len(prompt)] == prompt else side


def _parted(prompt: Messages, chosen: Messages, rejected: Messages, record: Mapping[str, typing.Any]) -> _Said:
    """A pair whose prompt is all that both have in common, but for the last message."""
    most, common = min(len(chosen), len(rejected)) - 1, 0
    while common < most and chosen[common] == rejected[common]:
        common += 1
    margin = record.get("margin", 0.0)
    if not is_number(margin):
        raise _Unfit(f"the margin {str(margin)[:40]!r} is no number")
    return _Said(prompt + chosen[:common], chosen[common:], rejected[common:], float(margin))


_FORMATS: dict[str, Callable[[dict], _Said]] = {
    "messages": _from_messages,
    "prompt": _from_prompt,
    "sharegpt": _from_sharegpt,
    "alpaca": _from_alpaca,
    "hh": _from_hh,
    "pairs": _from_pairs,
}
# Of what is no pair: for each format the keys, of each group one, in the order in which they are looked for.
_NEEDS = {
    "messages": (("messages",),),
    "sharegpt": (("conversations",),),
    "alpaca": (("instruction",), ("output", "response")),
    "prompt": (("prompt",), ("response", "completion")),
}

_TURN = re.compile(r"(?:\A|\n\n)(Human|Assistant):[ \t]*")
_SPEAKERS = {"Human": "user", "Assistant": ASSISTANT}
_ROLES = {
    "human": "user",
    "gpt": ASSISTANT,
    "chatgpt": ASSISTANT,
    "bing": ASSISTANT,
    "bard": ASSISTANT,
    "model": ASSISTANT,
}
# tatsu-lab/stanford_alpaca, train.py: the text around an instruction and, if there is one, its input.
_WRAPPER = re.compile(
    r"\s*Below is an instruction that describes a task(?:, paired with an input that provides further context)?\."
    r"\s*Write a response that appropriately completes the request\.\s*###\s*Instruction:[ \t]*\n(?P<asked>.*?)"
    r"(?:\n\s*###\s*Input:[ \t]*\n(?P<input>.*?))?\n\s*###\s*Response:\s*",
    re.DOTALL,
)


def unwrapped(prompt: str) -> str:
    """Returns a prompt without the text that Alpaca puts around an instruction and its input; any other as it is."""
    found = _WRAPPER.fullmatch(prompt)
    return (
        "\n\n".join(part for part in (found["asked"].strip(), (found["input"] or "").strip()) if part)
        if found
        else prompt
    )


def _field(record: Mapping[str, typing.Any], *names: str) -> typing.Any:
    for name in names:
        if name in record:
            return record[name]
    raise _Unfit(f"it has no {' or '.join(names)}, which the format needs (examples.format)")


def _prompt(value: typing.Any) -> Messages:
    """A prompt: messages, a transcript, or what the user says."""
    if not isinstance(value, str):
        return _messages(value)
    if value.lstrip().startswith("Human:") and _TURN.search(value):
        turns = _transcript(value)
        # "... \n\nAssistant:" waits for the answer.
        return turns[:-1] if turns[-1] == _message(ASSISTANT, "") else turns
    return (_message("user", unwrapped(value)),)


def _answer(value: typing.Any) -> Messages:
    return (_message(ASSISTANT, value),) if isinstance(value, str) else _messages(value)


def _transcript(text: str) -> Messages:
    """The messages of an HH transcript. Spaces around each are the transcript's own."""
    parts = _TURN.split(text.strip())
    if parts[0].strip() or len(parts) < 3:
        raise _Unfit('a transcript begins with "Human:" and has "\\n\\nAssistant:" before each answer')
    return tuple(_message(_SPEAKERS[who], said.strip()) for who, said in zip(parts[1::2], parts[2::2], strict=True))


def _messages(value: typing.Any) -> Messages:
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise _Unfit("there is no list of messages where one should be")
    return tuple(map(_normal, value))


def _normal(message: typing.Any) -> Message:
    """A message of any format: {role, content} or {from, value}."""
    if not isinstance(message, Mapping):
        raise _Unfit(f"{str(message)[:40]!r} is no message: it needs role and content")
    role, content = message.get("role", message.get("from")), message.get("content", message.get("value"))
    if not isinstance(role, str) or not role:
        raise _Unfit("a message has no role")
    if isinstance(content, list):  # of parts, as models that see pictures have them
        if any(not isinstance(part, Mapping) or part.get("type") != "text" for part in content):
            raise _Unfit(f"a message of {role} is not only text")
        content = "".join(_text(part.get("text")) for part in content)
    return _message(_ROLES.get(role.lower(), role.lower()), _text(content))


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _text(value: typing.Any) -> str:
    if not isinstance(value, str):
        raise _Unfit(f"{str(value)[:40]!r} is no text where one should be")
    return value
