"""The one form in which a conversation is written: ChatML, its role as one token of the vocabulary.

    </s><|im_start|><|user|>
    Hello<|im_end|>
    <|im_start|><|assistant|>
    Hi there.<|im_end|>

`TEMPLATE` is the Jinja template of an exported tokenizer. It begins with EOS, as every document does (`data.ids`), and its
`{% generation %}` marks what the assistant says, so that `return_assistant_tokens_mask` gives the mask of the loss.

A model from elsewhere has a template of its own. Templates are rendered as transformers does, with one difference: what spells
a control token in a message is ordinary text, and ends no turn.
"""

import datetime
import functools
import itertools
import json
import re
import typing
from collections.abc import Mapping, Sequence

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

from jaxlm import files
from jaxlm.config import CHAT_TOKENS, ConfigError
from jaxlm.data.coder import Coder, ours
from jaxlm.data.ids import conversation, conversations
from jaxlm.data.imported import MODEL, settings_of
from jaxlm.data.tokenizer import GUARD, Tokenizer, append_controls

END = CHAT_TOKENS[1]
_CUT = "\ufdd1"  # no character: where a message that is to be continued ends
_BEGINS, _ENDS = "\ufdd2", "\ufdd3"  # no characters: around what `{% generation %}` marks
_MARKS = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_SETTINGS = ("special_tokens_map.json", "tokenizer_config.json")  # the later one wins

TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('a message is by system, user or assistant, not ' + message['role']) }}"
    "{% endif %}"
    "{{ '<|im_start|><|' + message['role'] + '|>\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}"
    "{{ message['content'] + '<|im_end|>\\n' }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|><|assistant|>\\n' }}{% endif %}"
)


def speaks(tokenizer: Coder) -> bool:
    """True if the vocabulary has all tokens of the template."""
    return all(_id(tokenizer, token) is not None for token in CHAT_TOKENS)


def grown(tokenizer: Coder) -> Coder:
    """Returns a tokenizer of ours with the tokens of the template, behind all its other ids, which stay as they are.

    One that has them is returned as it is, and so is one from elsewhere, which has a template of its own or none.
    """
    if not ours(tokenizer) or speaks(tokenizer):
        return tokenizer
    return Tokenizer(append_controls(tokenizer.files[MODEL], CHAT_TOKENS))


def template(tokenizer: Coder) -> str:
    """Returns the Jinja template in which the model reads conversations. Raises ConfigError if it has none."""
    if ours(tokenizer) and speaks(tokenizer):
        return TEMPLATE
    try:
        found = tokenizer.files.get("chat_template.jinja", b"").decode() or settings(tokenizer).get("chat_template")
        if isinstance(found, list):
            found = next((one["template"] for one in found if one["name"] == "default"), None)
        if found and not isinstance(found, str):
            raise TypeError(f"it is a {type(found).__name__}")
    except files.MANGLED as error:
        raise ConfigError(f"the model's chat template is damaged ({error!r:.200}): copy it again") from None
    if not found:
        raise ConfigError("this model has no chat template: ask it plain text (eval.chat_template=False)")
    return found


def render(tokenizer: Coder, messages: Sequence[Mapping[str, str]], reply: bool = True) -> str:
    """Returns a conversation as text, in the model's template. `ids.conversation` makes ids of it.

    Args:
      messages: `role` and `content` of each. Control tokens that a content spells get a `GUARD`.
      reply: True to end with what opens the assistant's answer; False to end inside the last message, which goes on.

    Raises:
      ConfigError: the model has no template, or it refuses these messages.
    """
    given = [{**message, "content": guarded(tokenizer, message["content"])} for message in messages]
    if not reply:
        given[-1]["content"] += _CUT
    return Writer(tokenizer).write(given, reply).partition(_CUT)[0]


Spans = list[tuple[int, int]]  # (first, behind the last) character


class Writer:
    """Writes whole conversations in a model's template, and says where the assistant speaks.

    Raises ConfigError if the model has no template, or one that can't be read.
    """

    def __init__(self, tokenizer: Coder):
        self._named = {"bos_token": "", "eos_token": ""}
        self._named |= {k: v for k, v in settings(tokenizer).items() if k.endswith("_token") and v}
        self._tokenizer, source = tokenizer, template(tokenizer)
        self._plain, self._marking = _compiled(source), _compiled(source, mark=True) if _MARKS.search(source) else None

    def write(self, messages: Sequence[Mapping[str, str]], reply: bool) -> str:
        """Returns messages as the template has them, perhaps with what opens the assistant's answer behind them."""
        return self._plain(messages=messages, add_generation_prompt=reply, **self._named)

    def spans(self, messages: Sequence[Mapping[str, str]]) -> tuple[str, Spans]:
        """Returns (a conversation as text, where in it stands what the model is to say for each message of the assistant).

        That is the message and the control token that ends it: what `{% generation %}` marks. For a template without that
        mark it is what follows the text that the model gets when it is asked.

        Raises:
          ConfigError: the template refuses the messages; it writes an answer in another way once more follows; or no control
            token ends an answer.
        """
        given = [{**message, "content": self._sound(message["content"])} for message in messages]
        answers = [number for number, message in enumerate(given) if message["role"] == "assistant"]
        if self._marking is None:
            text = self.write(given, reply=False)
            return text, [self._answer(given, number, text) for number in answers]
        text = self._marking(messages=given, add_generation_prompt=False, **self._named)
        pieces = re.split(f"[{_BEGINS}{_ENDS}]", text)
        ends = [*itertools.accumulate(map(len, pieces))]
        spans = list(zip(ends[0::2], ends[1::2], strict=False))
        if len(spans) != len(answers):
            raise ConfigError(f"the model's chat template marks {len(spans)} answers of {len(answers)}")
        return "".join(pieces), spans

    def _sound(self, content: str) -> str:
        """A content that spells neither a control token nor a mark."""
        content = guarded(self._tokenizer, content)
        return content.replace(_BEGINS, "\ufffd").replace(_ENDS, "\ufffd")

    def _answer(self, given: list[dict[str, str]], number: int, text: str) -> tuple[int, int]:
        """Where the answer `number` stands in a text without marks."""
        asked, content = self.write(given[:number], reply=True), given[number]["content"].strip()
        at = text.find(content, len(asked))
        if not text.startswith(asked) or at < 0:
            raise ConfigError(
                f"the model's chat template writes message {number + 1} in another way than the model is asked for it: "
                "give the model a template with {% generation %} around what the assistant says"
            )
        rest = text[at + len(content) :].lstrip()
        piece = max((piece for piece in self._tokenizer.controls if rest.startswith(piece)), key=len, default="")
        if not piece:
            raise ConfigError(
                f"the model's chat template ends message {number + 1} by no control token, so no answer would end"
            )
        return len(asked), len(text) - len(rest) + len(piece)


def ids(tokenizer: Coder, messages: Sequence[Mapping[str, str]], reply: bool = True) -> list[int]:
    """Returns the ids of a conversation, with what a document begins with in front once. See `render`."""
    return conversation(tokenizer, render(tokenizer, messages, reply))


def all_ids(tokenizer: Coder, texts: Sequence[str], num_threads: int) -> list[list[int]]:
    """Returns the ids of many conversations that `render` wrote, as `ids` does, encoded in `num_threads` threads."""
    return [found.tolist() for found, _ in conversations(tokenizer, texts, [()] * len(texts), num_threads)]


def guarded(tokenizer: Coder, text: str) -> str:
    """Returns a text in which a GUARD stands in all that spells a control token."""
    for piece in tokenizer.controls:
        text = text.replace(piece, piece[0] + GUARD + piece[1:])
    return text


@functools.cache
def _compiled(source: str, mark: bool = False) -> typing.Callable[..., str]:
    """A function that renders a template as transformers does (utils/chat_template_utils.py).

    If `mark`, _BEGINS and _ENDS stand around what `{% generation %}` holds.
    """

    class Generation(jinja2.ext.Extension):
        """`{% generation %}` writes what is in it."""

        tags = frozenset({"generation"})

        def parse(self, parser):
            line = next(parser.stream).lineno
            inside = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            return [text(_BEGINS, line), *inside, text(_ENDS, line)] if mark else inside

    def text(content: str, line: int) -> jinja2.nodes.Output:
        return jinja2.nodes.Output([jinja2.nodes.TemplateData(content)], lineno=line)

    def refuse(why: str) -> None:
        raise jinja2.TemplateError(why)

    def tojson(value, indent=None, **kwargs):
        return json.dumps(value, ensure_ascii=False, indent=indent, **kwargs)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals |= {
        "raise_exception": refuse,
        "strftime_now": lambda form: datetime.datetime.now().strftime(form),
    }

    def render(**named) -> str:
        try:
            return compiled.render(**named)
        except Exception as error:  # a program of others
            why = error if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {error}"
            raise ConfigError(f"the model's chat template refuses these messages: {why}") from None

    try:
        compiled = environment.from_string(source)
    except (jinja2.TemplateError, RecursionError, *files.MANGLED) as error:
        raise ConfigError(f"the model's chat template can't be read: {error}") from None
    return render


def ends(tokenizer: Coder) -> tuple[int, ...]:
    """Returns the ids that end a text: EOS, what begins the next document (BOS for some), the end of a message in a chat."""
    return tuple({tokenizer.eos_id, tokenizer.separator_id, *({end_id(tokenizer)} - {None})})


def end_id(tokenizer: Coder) -> int | None:
    """Returns the id of the token that ends a message; None if the vocabulary has none."""
    return _id(tokenizer, END)


def _id(tokenizer: Coder, token: str) -> int | None:
    try:
        return tokenizer.id_of(token)
    except ConfigError:
        return None


def settings(tokenizer: Coder) -> dict[str, typing.Any]:
    """Returns what the files beside a tokenizer from elsewhere say of it; of a token its text. Raises ConfigError."""
    found: dict[str, typing.Any] = {}
    for name in _SETTINGS:
        said = settings_of(tokenizer.files, name).items()
        found |= {k: v.get("content") if isinstance(v, dict) else v for k, v in said if v is not None}
    return found
