"""How conversations are written: in ChatML, the role as one token of the vocabulary, or in an imported model's template.

    </s><|im_start|><|user|>
    Hello<|im_end|>
    <|im_start|><|assistant|>
    Hi there.<|im_end|>

`TEMPLATE` is the Jinja template of an exported tokenizer. It begins with EOS, as every document does (`tokenizer.ids`), and its
`{% generation %}` marks what the assistant says, so that `return_assistant_tokens_mask` gives the mask of the loss.

Templates are rendered as transformers does, with one difference: in a message, the spelling of a control token is ordinary
text, and ends no turn.
"""

import bisect
import contextlib
import copy
import datetime
import functools
import itertools
import json
import re
import typing
from collections.abc import Callable, Collection, Mapping, Sequence

import jinja2.ext
import jinja2.sandbox

from jaxlm.config import CHAT_TOKENS, ConfigError
from jaxlm.data.chats.records import THOUGHTS, Absent
from jaxlm.data.tokenizer import coder, imported
from jaxlm.data.tokenizer.coder import Coder, ours
from jaxlm.data.tokenizer.ids import conversation, conversations
from jaxlm.data.tokenizer.imported import IDS, JINJA, JSON, MODEL, settings_of
from jaxlm.data.tokenizer.ours import GUARD, Tokenizer, append_controls
from jaxlm.host import files

TURN = CHAT_TOKENS[:2]  # what opens a message, and what ends it
END = TURN[1]
_CUT = "\ufdd1"  # no character: the end of a message that is to be continued
_BEGINS, _ENDS = "\ufdd2", "\ufdd3"  # no characters: around what `{% generation %}` marks
_MARKS = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_SETTINGS = ("special_tokens_map.json", "tokenizer_config.json")  # the later one wins
T = typing.TypeVar("T")
Messages = Sequence[Mapping[str, typing.Any]]
Tools = Sequence[typing.Any] | None


# For imported models without a template (`examples.template`); the opening is put in front, and EOS filled in.
TEMPLATES = {
    "chatml": (
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
        "{% if message['role'] == 'assistant' %}"
        "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
        "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
    "plain": (
        "{% for message in messages %}{{ message['role'] | capitalize + ':' }}"
        "{% if message['role'] == 'assistant' %}"
        "{% generation %}{{ ' ' + message['content'] + (EOS if message['role'] == 'assistant' else '') }}{% endgeneration %}"
        "{% else %}{{ ' ' + message['content'] + (EOS if message['role'] == 'assistant' else '') }}{% endif %}"
        "{{ '\\n\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
    ),
}
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
    return all(tokenizer.find(token) is not None for token in CHAT_TOKENS)


def grown(tokenizer: Coder, asked: str = "") -> Coder:
    """Returns a tokenizer for chats: ours with the tokens of `TEMPLATE`, an imported one with the template `asked`.

    Other ids do not change. Raises ConfigError if the template can't be read, or does not suit the tokenizer.
    """
    key = f"config.examples.template={asked}"
    if ours(tokenizer):
        if asked:
            raise ConfigError(f"{key}: this model uses jaxlm's ChatML: leave this key out")
        return tokenizer if speaks(tokenizer) else Tokenizer(append_controls(tokenizer.files[MODEL], CHAT_TOKENS))
    if not asked:
        return tokenizer
    held, rows = dict(tokenizer.files), []
    if asked in TEMPLATES and _source(tokenizer):
        raise ConfigError(f"{key}: the model has a chat template of its own: leave this key out, or name a file")
    if asked == "chatml":
        if JSON not in held:
            raise ConfigError(f"{key} adds tokens to a tokenizer.json, which this model lacks: take plain")
        held[JSON] = imported.with_controls(held[JSON], TURN)
        rows = list(TURN)
    if asked in TEMPLATES:
        pieces = {i: piece for piece, i in tokenizer.controls.items()}
        if not {tokenizer.eos_id, *tokenizer.opening} <= pieces.keys():
            raise ConfigError(f"{key}: the model's EOS is no control token: write a template of your own into a file")
        opening = "".join(pieces[i] for i in tokenizer.opening)
        source = f"{{{{ {json.dumps(opening)} }}}}" if opening else ""
        source += TEMPLATES[asked].replace("EOS", json.dumps(pieces[tokenizer.eos_id]))
    else:
        source = _file(asked, key)
    held |= {JINJA: source.encode(), IDS: imported.json_line(settings_of(held, IDS) | {"rows": rows})}
    return coder.read(held, key)


def _file(path: str, key: str) -> str:
    """Returns the template in a file."""
    try:
        if (source := files.expanded(path).read_text(encoding="utf-8")).strip():
            return source
        raise ValueError("it is empty")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key} can't be read ({error}): chatml, plain, or a file with a Jinja template") from None


def own_rows(tokenizer: Coder) -> tuple[str, ...]:
    """Returns the tokens of a template that pretraining never saw; a model's own template has none."""
    return CHAT_TOKENS if ours(tokenizer) else tuple(settings_of(tokenizer.files, IDS).get("rows", ()))


def template(tokenizer: Coder) -> str:
    """Returns the Jinja template in which the model reads conversations. Raises ConfigError if it has none."""
    source = TEMPLATE if ours(tokenizer) and speaks(tokenizer) else _source(tokenizer)
    if not source:
        raise ConfigError("this model has no chat template: ask it plain text (eval.chat_template=False)")
    return source


def _source(tokenizer: Coder) -> str:
    """Returns the template in an imported tokenizer's files; "" if there is none."""
    try:
        source = tokenizer.files.get(JINJA, b"").decode() or settings(tokenizer).get("chat_template")
        if isinstance(source, list):
            source = next((one["template"] for one in source if one["name"] == "default"), None)
        if source and not isinstance(source, str):
            raise TypeError(f"it is a {type(source).__name__}")
    except files.MANGLED as error:
        raise ConfigError(f"the model's chat template is damaged ({error!r:.200}): copy its files again") from None
    return source or ""


def render(tokenizer: Coder, messages: Messages, reply: bool = True, tools: Tools = None) -> str:
    """Returns a conversation as text, in the model's template; without `reply`, its last message is left open.

    Control tokens that messages spell get a `GUARD`. Raises ConfigError if there is no template, or it refuses the
    messages.
    """
    writer = Writer(tokenizer)
    if not reply:
        messages = [*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + _CUT}]
    return writer.either(messages, lambda sound: writer.write(sound, reply, writer.sound(tools))).partition(_CUT)[0]


class Broken(ConfigError):
    """A template met messages that it was not written for."""


class Span(typing.NamedTuple):
    """A part of a text that the model is to say: characters `first` to `behind` - 1, in message `number`, from 0."""

    number: int
    first: int
    behind: int


class Written(typing.NamedTuple):
    """A conversation in the model's template."""

    text: str
    spans: list[Span]  # what the assistant says, with the control tokens that end it, in order
    begins: list[int]  # about where each of the assistant's messages begins, in characters
    otherwise: tuple[int, ...] = ()  # answers that the text writes differently than when each is the last message


class Probed(typing.NamedTuple):
    """What opens an answer and which control token ends it; "" if nothing does."""

    opening: str = ""
    end: str = ""
    unsaid: str = ""  # the part of the opening that written answers lack
    behind: str = ""  # what is written after an answer


class Writer:
    """Writes whole conversations in a model's template, and says where the assistant speaks.

    A template that names the day gets the day of `dated`, or else today. Raises ConfigError if no template can be read.
    """

    def __init__(self, tokenizer: Coder):
        self._named = {"bos_token": "", "eos_token": ""}
        self._named |= {k: v for k, v in settings(tokenizer).items() if k.endswith("_token") and v}
        moment = getattr(tokenizer, "moment", None)
        self._named["strftime_now"] = lambda form: (moment or datetime.datetime.now()).strftime(form)
        self._tokenizer, source = tokenizer, template(tokenizer)
        ends = filter(None, (END, self._named["eos_token"]))  # in some tokenizers these are no control tokens
        self._controls = tuple({*tokenizer.controls, *(piece for piece in ends if tokenizer.find(piece) is not None)})
        self._firsts = {piece[0] for piece in self._controls}
        self._plain, self._marking = _compiled(source), _compiled(source, mark=True) if _MARKS.search(source) else None

    def write(self, messages: Messages, reply: bool, tools: Tools = None) -> str:
        """Returns messages in the template; with `reply`, what opens the assistant's answer comes after them."""
        return self._plain(messages=messages, tools=tools, documents=None, add_generation_prompt=reply, **self._named)

    def either(self, messages: Messages, write: Callable[[Messages], T]) -> T:
        """Returns `write(guarded messages)` in the first form that the template takes.

        Calls' arguments as objects; as given; with "" where a message has no content, which few templates without tools take.
        """
        called, plain = ([_ready(m, called) if len(m) > 2 else m for m in messages] for called in (True, False))
        forms = called, plain, *([{"content": "", **m} for m in form] for form in (called, plain))
        *others, last = [form for number, form in enumerate(forms) if form not in forms[:number]]
        for form in others:
            with contextlib.suppress(ConfigError):
                return write(self.sound(form))
        return write(self.sound(last))

    def written(
        self, messages: Messages, tools: Tools, trained: Collection[int] | None = None, last: bool = False
    ) -> Written:
        """Returns a conversation as text, with the spans that the model is to say.

        `{% generation %}` marks these; in a template without it, a span is what an answer adds to its prompt's text, up to
        the control token that ends it. Raises ConfigError if the template refuses the messages.
        """
        answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        if self._marking is None:
            seen = sorted(trained or answers)[-1:] if last else answers
            return self.either(messages, lambda sound: self._unmarked(sound, self.sound(tools), answers, seen))
        one_each = len(answers) if trained is None or len(trained) == len(answers) else -1
        return self.either(messages, lambda sound: self._marked(sound, self.sound(tools), answers, one_each))

    def sound(self, value: typing.Any) -> typing.Any:
        """Returns JSON, such as messages or tools, whose texts spell neither a control token nor a mark."""
        if isinstance(value, str):
            value = guarded(self._tokenizer, value) if any(first in value for first in self._firsts) else value
            return value.replace(_BEGINS, "\ufffd").replace(_ENDS, "\ufffd")
        if isinstance(value, Mapping):
            return {key: self.sound(inner) for key, inner in value.items()}
        return [self.sound(inner) for inner in value] if isinstance(value, list | tuple) else value

    def _marked(self, sound: Messages, tools: Tools, answers: list[int], one_each: int) -> Written:
        """See `written`, for a template with marks. If there are `one_each` marks, each answer has one, in order."""
        marked = self._marking(messages=sound, tools=tools, documents=None, add_generation_prompt=False, **self._named)
        pieces = re.split(f"[{_BEGINS}{_ENDS}]", marked)
        ends, text = [*itertools.accumulate(map(len, pieces))], "".join(pieces)
        spans = list(zip(ends[0::2], ends[1::2], strict=False))
        owners, begins = answers, []
        if one_each != len(spans):
            begins = [self._length(sound[:number], tools, text) for number in answers]
            owners = [answers[max(0, bisect.bisect_right(begins, first) - 1)] if answers else -1 for first, _ in spans]
        begins = [first for first, _ in spans] if owners == answers else begins
        return Written(text, [Span(number, *span) for number, span in zip(owners, spans, strict=True)], begins)

    def _length(self, messages: Messages, tools: Tools, text: str) -> int:
        """Returns how many characters of a text these first messages take; 0 if the template refuses them alone."""
        try:
            return _alike(self.write(messages, False, tools), text) if messages else 0
        except ConfigError:
            return 0

    def _unmarked(self, sound: Messages, tools: Tools, answers: list[int], seen: list[int]) -> Written:
        """See `written`, for a template without marks: the spans of the answers `seen`."""
        text, spans, otherwise, begins = self.write(sound, False, tools), [], [], []
        for number in answers:
            if number not in seen:
                begins.append(self._length(sound[:number], tools, text))
                continue
            more = number + 1 < len(sound)
            alone = self.write(sound[: number + 1], False, tools) if more else text
            first = self._asked(sound[:number], tools, alone)
            behind = first + self._said(alone[first:])
            begins.append(min(first, len(text)))
            if more and not text.startswith(alone[:behind]):
                otherwise.append(number)
            else:
                spans.append(Span(number, first, behind))
        return Written(text, spans, begins, tuple(otherwise))

    def _asked(self, messages: Messages, tools: Tools, text: str) -> int:
        """Returns how many characters of a text are the prompt for the answer to these messages."""
        try:
            asked = self.write(messages, True, tools) if messages else ""
        except ConfigError:
            if any(message["role"] == "user" for message in messages):
                raise
            asked = ""
        if not asked:
            opening = self.probed.opening
            return text.find(opening) + len(opening) if opening in text else 0
        shared = _alike(asked, text)
        # A template may write only the beginning of what opens an answer, up to <think>, say.
        whole = text[:shared].endswith((*self._controls, ">", "\n"))
        if shared < len(asked) and not (whole and shared > _alike(asked, self.write(messages, False, tools))):
            lacks = f"{asked[shared:][:40]!r}, which ends the prompt for this message"
            advice = "give the model a template with {% generation %} around what the assistant says"
            raise ConfigError(f"the model's chat template writes message {len(messages) + 1} without {lacks}: {advice}")
        return shared

    @functools.cached_property
    def probed(self) -> Probed:
        """What the template writes around the answer of a short chat."""
        ask, say = {"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}
        try:
            whole, asked, text = self.write([ask], False), self.write([ask], True), self.write([ask, say], False)
        except ConfigError:
            return Probed()
        opening, unsaid = asked[_alike(whole, asked) :] or self._named["bos_token"], asked[_alike(asked, text) :]
        return Probed(opening, next((piece for piece, _ in self._closing(text)), ""), unsaid, text.rpartition("x")[2])

    def _closing(self, said: str) -> list[tuple[str, int]]:
        """Returns (control token, where it ends) for those at the end of a text, perhaps with spaces between."""
        pieces, rest = [], said.rstrip()
        while rest.endswith(self._controls):
            piece = max(filter(rest.endswith, self._controls), key=len)
            pieces.insert(0, (piece, len(rest)))
            rest = rest[: -len(piece)].rstrip()
        return pieces

    def _said(self, said: str) -> int:
        """Returns where the answer ends in `said`, the text that it adds: after its closing control token, if it has one."""
        pieces = self._closing(said)
        last = pieces[-1][1] if pieces else len(said.rstrip())
        return next((at for piece, at in pieces if piece == self.probed.end), last)


def _alike(first: str, second: str) -> int:
    most = min(len(first), len(second))
    return most if first[:most] == second[:most] else next(i for i in range(most) if first[i] != second[i])


def _ready(message: Mapping[str, typing.Any], called: bool) -> dict[str, typing.Any]:
    """Returns a message with its thoughts under both names that templates read; if `called`, calls' arguments as objects."""
    message = {key: value for key, value in message.items() if not isinstance(value, Absent)}
    thoughts = next((message[key] for key in THOUGHTS if key in message), None)
    ready = {"thinking": thoughts, **message, "reasoning_content": thoughts} if thoughts is not None else message
    if called and "tool_calls" in ready:
        ready["tool_calls"] = [_call(call) for call in ready["tool_calls"]]
    return ready


def _call(call: dict[str, typing.Any]) -> dict[str, typing.Any]:
    """Returns a call of a tool, with its arguments as an object if they are the JSON text of one."""
    if isinstance(call.get("function"), dict):
        return call | {"function": _call(call["function"])}
    with contextlib.suppress(ValueError):
        if isinstance(call.get("arguments"), str):
            return call | {"arguments": files.json_of(call["arguments"])}
    return call


def ids(tokenizer: Coder, messages: Messages, reply: bool = True, tools: Tools = None) -> list[int]:
    """Returns the ids of a conversation, with `tokenizer.opening` in front once. See `render`."""
    return conversation(tokenizer, render(tokenizer, messages, reply, tools))


def all_ids(tokenizer: Coder, texts: Sequence[str]) -> list[list[int]]:
    return [of_text.tolist() for of_text, _ in conversations(tokenizer, texts, [()] * len(texts))]


def guarded(tokenizer: Coder, text: str) -> str:
    """Returns a text with a GUARD inside each spelling of a control token."""
    for piece in tokenizer.controls:
        text = text.replace(piece, piece[0] + GUARD + piece[1:])
    return text


@functools.cache
def _compiled(source: str, mark: bool = False) -> typing.Callable[..., str]:
    """Returns a renderer as in transformers (utils/chat_template_utils.py); `mark`: _BEGINS, _ENDS around generation blocks."""

    class Generation(jinja2.ext.Extension):
        """`{% generation %}` renders its content."""

        tags = frozenset({"generation"})

        def parse(self, parser):
            line = next(parser.stream).lineno
            inside = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            return [text(_BEGINS, line), *inside, text(_ENDS, line)] if mark else inside

    def text(content: str, line: int) -> jinja2.nodes.Output:
        return jinja2.nodes.Output([jinja2.nodes.TemplateData(content)], lineno=line)

    def refuse(why: str) -> None:
        raise jinja2.TemplateError(why)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    options = {"trim_blocks": True, "lstrip_blocks": True, "extensions": [Generation, jinja2.ext.loopcontrols]}
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(**options)
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = refuse

    def render(**named) -> str:
        try:
            return compiled.render(**named)
        except Exception as error:  # a template is somebody else's program
            why = str(error) if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {error}"
            kind = ConfigError if type(error) is jinja2.TemplateError else Broken  # the template raised this itself
            raise kind(f"the model's chat template refuses these messages: {' '.join(why.split())}") from None

    try:
        compiled = environment.from_string(source)
    except (jinja2.TemplateError, RecursionError, *files.MANGLED) as error:
        raise ConfigError(f"the model's chat template can't be read: {error}") from None
    return render


def ends(tokenizer: Coder) -> tuple[int, ...]:
    """Returns the ids that end an answer or a text. Models imported before 28 November 2026 keep their old ids."""
    if ours(tokenizer) or not tokenizer.ends:
        every = (tokenizer.find(END), tokenizer.eos_id, tokenizer.separator_id)
    else:
        every = (answer_end(tokenizer), tokenizer.find(END), *tokenizer.ends, tokenizer.separator_id)
    return tuple(dict.fromkeys(i for i in every if i is not None))


def settled(tokenizer: Coder) -> Coder:
    """Returns a tokenizer whose files name all its `ends`, so that a changed template can't change them."""
    if ours(tokenizer):
        return tokenizer
    every = [i for i in dict.fromkeys((answer_end(tokenizer), *ends(tokenizer))) if i is not None]
    named = imported.json_line(settings_of(tokenizer.files, IDS) | {"ends": every})
    return coder.read({**tokenizer.files, IDS: named}, "the model")


def dated(tokenizer: Coder, moment: str) -> Coder:
    """Returns a tokenizer whose template sees `moment` (ISO 8601) as the present; ours names no day and is unchanged."""
    if ours(tokenizer) or not moment:
        return tokenizer
    other = copy.copy(tokenizer)
    other.moment = datetime.datetime.fromisoformat(moment)
    return other


def told_ends(tokenizer: Coder) -> str:
    """Returns a line for the user on what ends an answer."""
    pieces = {i: piece for piece, i in tokenizer.controls.items()}
    every = [pieces.get(i) or tokenizer.decode([i], follows=True) for i in ends(tokenizer)]
    probed = Writer(tokenizer).probed
    if not probed.end:
        behind = probed.behind.strip()
        what = f"{behind}, which is no token of this vocabulary," if behind else "no token"
        until = f"answers run on until the model says {' or '.join(every)}"
        return f"the chat template writes {what} after an answer, so training teaches no end: {until}"
    line = f"an answer ends with {' or '.join(every)}"
    if probed.unsaid:
        line += f"; prompts end with {probed.unsaid!r}, which the examples' answers lack"
    return line


def answer_end(tokenizer: Coder) -> int | None:
    """Returns the id of the control token that the template writes after an answer; None if there is no such token."""
    try:
        return tokenizer.find(Writer(tokenizer).probed.end)
    except ConfigError:
        return None


def settings(tokenizer: Coder) -> dict[str, typing.Any]:
    """Returns the settings in an imported tokenizer's files, tokens as text. Raises ConfigError if a file is damaged."""
    merged: dict[str, typing.Any] = {}
    for name in _SETTINGS:
        content = settings_of(tokenizer.files, name).items()
        merged |= {k: v.get("content") if isinstance(v, dict) else v for k, v in content if v is not None}
    return merged
