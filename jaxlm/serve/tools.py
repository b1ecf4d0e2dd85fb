"""Calls of tools: how a model's template writes them, a grammar that holds them to the tools' schemas, a reader of the text.

OpenAI's keys and objects. The form of a call is what the template writes for a call of ours, as llama.cpp finds it.
"""

import json
import re
import secrets
import typing

from jaxlm.config import ConfigError
from jaxlm.data.chats import chat
from jaxlm.data.tokenizer.coder import Coder
from jaxlm.data.tokenizer.ours import controls_of
from jaxlm.serve.body import Fields, Refused, shown
from jaxlm.serve.guide import FORM

MOST = 128  # tools of a request, as OpenAI's
_CHOICES = ("none", "auto", "required")
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_NOTHING = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}  # the schema of a tool without parameters
_THOUGHT = re.compile(r"(?s).*</think>\s*|\s+")  # what a template puts in front of a first call
_WHOLE = re.compile(r"(?:[^\\]|\\.)*", re.DOTALL)  # JSON without half an escape at its end
_MARK = re.compile(r'\\.|["{}\[\]]', re.DOTALL)


class Form(typing.NamedTuple):
    """How a template writes calls: begin, name, middle, arguments; perhaps between, name, middle, arguments; then end.

    `between` is "" if the template writes only one call. `ends`: the ids that end an answer, not part of `end`.
    """

    begin: str
    middle: str
    between: str
    end: str


class Tool(typing.NamedTuple):
    name: str
    parameters: dict[str, typing.Any]


def form_of(tokenizer: Coder) -> Form:
    """Returns the form of calls in the model's template. Raises Refused if it writes none, or none with JSON arguments."""
    try:
        one = _said(tokenizer, 1)
    except ConfigError as error:
        raise Refused(f"this model can't call tools: {error}", param="tools", code="no_tools") from None
    if "probe1" not in one:
        says = "this model's chat template has no tools: leave tools out, or serve a model that was trained with them"
        raise Refused(says, param="tools", code="no_tools")
    begin, _, rest = one.partition("probe1")
    middle, arguments, end = rest.partition('{"key1": 1}')
    begin = _THOUGHT.sub("", begin, count=1) if _THOUGHT.match(begin) else begin
    if not arguments or not begin or "call00001" in one:
        says = (
            "calls of tools in a form that is not read here, which is a name, then arguments as JSON: leave tools out"
        )
        raise Refused(f"this model's chat template writes {says}", param="tools", code="no_tools")
    between = ""
    try:
        two = _said(tokenizer, 2)
        if two.endswith(f'probe2{middle}{{"key2": 2}}{end}'):
            between = two.partition('{"key1": 1}')[2].partition("probe2")[0]
    except ConfigError:
        pass  # one call at a time
    return Form(begin, middle, between, end)


def _said(tokenizer: Coder, number: int) -> str:
    """Returns what the template writes for an answer of so many calls, without the tokens that end an answer."""
    calls, tools = [], []
    for at in range(1, number + 1):
        function = {"name": f"probe{at}", "arguments": json.dumps({f"key{at}": at})}
        calls.append({"id": f"call0000{at}", "type": "function", "function": function})
        schema = {"type": "object", "properties": {f"key{at}": {"type": "integer"}}}
        described = {"name": f"probe{at}", "description": "", "parameters": schema}
        tools.append({"type": "function", "function": described})
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": calls}]
    written = chat.Writer(tokenizer).written(messages, tools)
    said = written.text[written.spans[-1].first : written.spans[-1].behind].rstrip()
    ends = tuple(piece for piece, i in tokenizer.controls.items() if i in chat.ends(tokenizer))
    while said.endswith(ends):
        said = said.removesuffix(max(filter(said.endswith, ends), key=len))
    return said


class Tools:
    """The tools that a request offers. Raises Refused for a wrong key or value.

    Attributes:
      given: as the template takes them; None if the model may call none, and then it reads of none.
      form: None likewise.
    """

    def __init__(self, fields: Fields, tokenizer: Coder):
        self._tokenizer, self.form, self.given = tokenizer, None, fields.take("tools", list) or None
        choice, self._several = fields.any("tool_choice") or "auto", fields.take("parallel_tool_calls", bool, True)
        self.tools = [_tool(tool, f"tools[{number}]") for number, tool in enumerate(self.given or ())]
        names = [tool.name for tool in self.tools]
        if len(names) > MOST or len({*names}) < len(names):
            raise Refused(f"tools must be at most {MOST}, each with a name of its own", param="tools")
        if isinstance(choice, dict):
            function = choice.get("function")
            name = function.get("name") if isinstance(function, dict) and choice.get("type") == "function" else None
            if name not in names:
                says = (
                    f"tool_choice names {shown(name)}, which is none of tools: {', '.join(names) or 'there are none'}"
                )
                raise Refused(says, param="tool_choice")
            self.tools, choice = [self.tools[names.index(name)]], "required"
            self._several = False
        if choice not in _CHOICES or (choice == "required" and not names):
            says = '"none", "auto", "required" (these need tools) or {"type": "function", "function": {"name": ...}}'
            raise Refused(f"tool_choice must be {says}, not {shown(choice)}", param="tool_choice")
        self._free = choice == "auto"
        if choice == "none":
            self.given = None
        if self.given:
            self.form = form_of(tokenizer)

    def grammar(self, ends: typing.Collection[int], schema: dict[str, typing.Any] | None) -> str:
        """Returns a grammar (llguidance's Lark) of answers: calls, with arguments by their schemas, or, if free, text.

        In free text the first line of what begins a call opens the call: from there on the grammar holds. See
        github.com/guidance-ai/llguidance/blob/main/docs/syntax.md. `schema`: of the text, from `response_format`.
        """
        begin, middle, between, end = map(self._literal, self.form)
        more = f"({between} call)*" if between and self._several else ""
        every = " | ".join(f"{_text(tool.name)} {middle} %json {_json(tool.parameters)}" for tool in self.tools)
        calls = f"call {more} {end}"
        rules = f"%llguidance {{}}\ncall: {every}\n"
        if not self._free or schema is not None:
            return f"{rules}start: {begin} {calls}" + (f" | %json {_json(schema)}" if self._free else "")
        controls = self._tokenizer.controls
        first = controls_of(self._tokenizer).match(self.form.begin)
        trigger = (first and first[0]) or self.form.begin.partition("\n")[0]
        others = sorted({*controls.values()} - {*ends, controls.get(trigger)})
        text = f"(TEXT | <[{','.join(map(str, others))}]>)*" if others else "TEXT?"
        opened = f"<[{controls[trigger]}]>" if trigger in controls else "trigger"
        rest = self._literal(self.form.begin.removeprefix(trigger))
        return (
            f"{rules}start: text {opened} {rest} {calls} | text\ntext: {text}\nTEXT: /(.|\\n)+/\n"
            f"trigger[lazy]: /(.|\\n)*/ {_text(trigger)}"
        )

    def _literal(self, text: str) -> str:
        controls = self._tokenizer.controls
        pieces = filter(None, controls_of(self._tokenizer).split(text))
        return " ".join(f"<[{controls[piece]}]>" if piece in controls else _text(piece) for piece in pieces)


class Calls:
    """Parts an answer into text and OpenAI's deltas of calls, however its text comes in pieces."""

    def __init__(self, form: Form):
        self._form, self._state, self._held = form, self._in_text, ""
        self._depth, self._quoted = 0, False  # of the arguments so far
        self.number = 0  # of calls so far

    def feed(self, text: str, whole: bool) -> tuple[str, list[dict[str, typing.Any]]]:
        """Returns the text and the deltas that are certain; all of them if the answer is `whole`."""
        self._held, self._whole = self._held + text, whole
        said, deltas, before = "", list[dict[str, typing.Any]](), None
        while before != (before := (self._state, self._held)):
            new = self._state()
            said += new if isinstance(new, str) else ""
            deltas += [new] if isinstance(new, dict) else []
        return said, deltas

    def _in_text(self) -> str:
        begin, held = self._form.begin, self._held
        text, found, rest = held.partition(begin)
        if found:
            self._held, self._state = rest, self._in_name
            return text
        unsure = 0 if self._whole else next((n for n in range(len(begin), 0, -1) if held.endswith(begin[:n])), 0)
        self._held = held[len(held) - unsure :]
        return held[: len(held) - unsure]

    def _in_name(self) -> dict[str, typing.Any] | None:
        name, found, rest = self._held.partition(self._form.middle)
        if not found:
            return None
        self._held, self._state, self.number = rest, self._in_arguments, self.number + 1
        head = {"id": f"call_{secrets.token_hex(12)}", "type": "function"}
        return {"index": self.number - 1, **head, "function": {"name": name, "arguments": ""}}

    def _in_arguments(self) -> dict[str, typing.Any] | None:
        sure = _WHOLE.match(self._held)[0]
        at = len(sure)
        for mark in _MARK.finditer(sure):
            if mark[0] == '"':
                self._quoted = not self._quoted
            elif not self._quoted and len(mark[0]) == 1:
                self._depth += 1 if mark[0] in "{[" else -1
                if not self._depth:
                    at, self._state = mark.end(), self._behind
                    break
        self._held = self._held[at:]
        return {"index": self.number - 1, "function": {"arguments": sure[:at]}} if at else None

    def _behind(self) -> None:
        between = self._form.between
        if between and self._held.startswith(between):
            self._held, self._state = self._held.removeprefix(between), self._in_name
        elif not between.startswith(self._held):
            self._held = ""  # the end, or a part of it


def is_call(value: typing.Any) -> bool:
    """Returns True for a call in a message of an assistant."""
    function = value.get("function") if isinstance(value, dict) else None
    return isinstance(function, dict) and all(isinstance(function.get(key), str) for key in ("name", "arguments"))


def _tool(value: typing.Any, where: str) -> Tool:
    function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Refused(f'{where} must be {{"type": "function", "function": {{"name": ...}}}}', param=where)
    name, parameters = function["name"], function.get("parameters")
    if not _NAME.fullmatch(name):
        raise Refused(
            f"{where} must have a name of at most 64 letters, digits, _ and -, not {shown(name)}", param=where
        )
    if not isinstance(parameters, dict | None) or (parameters and parameters.get("type") != "object"):
        raise Refused(
            f'parameters of {name} must be a JSON schema of an object: {{"type": "object", ...}}', param=where
        )
    return Tool(name, parameters or _NOTHING)


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _json(schema: dict[str, typing.Any]) -> str:
    return json.dumps(schema | {"x-guidance": FORM})
