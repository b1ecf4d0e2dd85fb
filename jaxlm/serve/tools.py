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
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}  # of a tool without parameters
_THOUGHT = re.compile(r"(?s).*</think>\s*|\s*")  # what a template puts in front of a first call
_JSON = json.JSONDecoder(parse_int=str)


class Form(typing.NamedTuple):
    """How a template writes calls: begin, name, middle, arguments; perhaps between, name, middle, arguments; then end.

    `between` is "" if the template writes only one call. The tokens that end an answer are no part of `end`.
    """

    begin: str
    middle: str
    between: str
    end: str


def form_of(tokenizer: Coder) -> Form:
    """Returns the form of calls in the model's template. Raises Refused if it writes none, or none with JSON arguments."""
    try:
        one = _said(tokenizer, "probe1")
    except ConfigError as error:
        raise Refused(f"this model can't call tools: {error}", param="tools", code="no_tools") from None
    begin, named, rest = one.partition("probe1")
    middle, arguments, end = rest.partition('{"x": 1}')
    begin = _THOUGHT.sub("", begin, count=1)
    if not arguments or not begin or "call0probe1" in one:
        why = "writes calls in no form that is read here: a name, then arguments as JSON" if named else "has no tools"
        why += ", as those of Hermes, Qwen 2.5 and Llama 3 do"
        raise Refused(f"this model's chat template {why}; leave tools out", param="tools", code="no_tools")
    try:
        between, named, rest = _said(tokenizer, "probe1", "probe2").partition("probe2")
    except ConfigError:
        named = rest = ""  # one call at a time
    known = named and rest == f'{middle}{{"x": 1}}{end}'
    return Form(begin, middle, between.partition('{"x": 1}')[2] if known else "", end)


def _said(tokenizer: Coder, *names: str) -> str:
    """Returns what the template writes for an answer that calls these tools, without the tokens that end an answer."""
    calls = [{"name": name, "arguments": '{"x": 1}'} for name in names]
    calls = [{"id": f"call0{call['name']}", "type": "function", "function": call} for call in calls]
    tool = {"name": "probe1", "description": "", "parameters": {"type": "object", "properties": {"x": {}}}}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": calls}]
    written = chat.Writer(tokenizer).written(messages, [{"type": "function", "function": tool}])
    ends = (re.escape(piece) for piece, i in tokenizer.controls.items() if i in chat.ends(tokenizer))
    return re.sub(rf"({'|'.join(ends)}|\s)*$", "", written.text[written.spans[-1].first : written.spans[-1].behind])


class Tools:
    """The tools that a request offers. Raises Refused for a wrong key or value.

    Attributes:
      given: as the template takes them; None if the model may call none, and then it reads of none.
      form: None likewise.
      schemas: name -> JSON schema of the arguments, of tools that may be called.
    """

    def __init__(self, fields: Fields, tokenizer: Coder):
        self._tokenizer, self.given = tokenizer, fields.take("tools", list) or None
        choice, self._several = fields.any("tool_choice") or "auto", fields.take("parallel_tool_calls", bool, True)
        self.schemas = dict(_tool(tool, f"tools[{number}]") for number, tool in enumerate(self.given or ()))
        if len(self.schemas) != len(self.given or ()) or len(self.schemas) > MOST:
            raise Refused(f"tools must be at most {MOST}, each with a name of its own", param="tools")
        if isinstance(choice, dict):
            name = choice["function"].get("name") if isinstance(choice.get("function"), dict) else None
            if not isinstance(name, str) or name not in self.schemas:
                says = f"tool_choice names {shown(name)}, which is none of tools: {', '.join(self.schemas) or 'none'}"
                raise Refused(says, param="tool_choice")
            self.schemas, choice, self._several = {name: self.schemas[name]}, "required", False
        if choice not in ("none", "auto", "required") or (choice == "required" and not self.given):
            says = '"none", "auto", "required" (these need tools) or {"type": "function", "function": {"name": ...}}'
            raise Refused(f"tool_choice must be {says}, not {shown(choice)}", param="tool_choice")
        self._free, self.given = choice == "auto", None if choice == "none" else self.given
        self.form = form_of(tokenizer) if self.given else None

    def grammar(self, ends: typing.Collection[int], schema: dict[str, typing.Any] | None) -> str:
        """Returns a grammar (llguidance's Lark) of answers: calls, with arguments by their schemas, or, if free, text.

        In free text the first line of what begins a call opens the call: from there on the grammar holds. See
        github.com/guidance-ai/llguidance/blob/main/docs/syntax.md. `schema`: of the text, from `response_format`.
        """
        begin, middle, between, end = map(self._literal, self.form)
        more = f"({between} call)*" if between and self._several else ""
        every = " | ".join(f"{_text(name)} {middle} %json {_json(of)}" for name, of in self.schemas.items())
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
        self._form, self._text, self._said = form, "", 0
        self.told: list[int] = []  # of each call, how many characters of its arguments

    def feed(self, text: str, whole: bool) -> tuple[str, list[dict[str, typing.Any]]]:
        """Returns the text and the deltas that are certain; all of them if the answer is `whole`."""
        self._text, deltas = self._text + text, []
        said, calls = self._parts(whole)
        for index, (name, arguments) in enumerate(calls):
            if index == len(self.told):
                self.told.append(0)
                head = {"id": f"call_{secrets.token_hex(12)}", "type": "function"}
                deltas.append({"index": index, **head, "function": {"name": name, "arguments": ""}})
            if new := arguments[self.told[index] :]:
                deltas.append({"index": index, "function": {"arguments": new}})
            self.told[index] = len(arguments)
        new, self._said = said[self._said :], len(said)
        return new, deltas

    def _parts(self, whole: bool) -> tuple[str, list[tuple[str, str]]]:
        """Returns the text, and (name, arguments) of each call, as far as they are certain."""
        begin, middle, between, _ = self._form
        said, found, rest = self._text.partition(begin)
        if not found and not whole:
            said = said[: len(said) - next((n for n in range(len(begin), 0, -1) if said.endswith(begin[:n])), 0)]
        calls = []
        while found and middle in rest:
            name, _, rest = rest.partition(middle)
            try:
                size = _JSON.raw_decode(rest)[1]
            except ValueError:
                size = len(rest)  # not whole yet
            calls.append((name, rest[:size]))
            _, found, rest = rest[size:].partition(between or "\0")
        return said, calls


def joined(deltas: typing.Iterable[dict[str, typing.Any]]) -> list[dict[str, typing.Any]]:
    """Returns the whole calls of their deltas."""
    calls: list[dict[str, typing.Any]] = []
    for delta in deltas:
        if "id" in delta:
            calls.append({"id": delta["id"], "type": "function", "function": dict(delta["function"])})
        else:
            calls[delta["index"]]["function"]["arguments"] += delta["function"]["arguments"]
    return calls


def is_call(value: typing.Any) -> bool:
    """Returns True for a call in a message of an assistant."""
    function = value.get("function") if isinstance(value, dict) else None
    return isinstance(function, dict) and all(isinstance(function.get(key), str) for key in ("name", "arguments"))


def _tool(value: typing.Any, where: str) -> tuple[str, dict[str, typing.Any]]:
    function = value.get("function") if isinstance(value, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    schema = (function.get("parameters") or _NOTHING) if isinstance(name, str) and _NAME.fullmatch(name) else None
    if not isinstance(schema, dict) or schema.get("type") != "object":
        says = (
            '{"type": "function", "function": {"name": at most 64 letters, digits, _ and -, "parameters": a JSON schema'
        )
        raise Refused(f'{where} must be {says} of "type": "object"}}}}, not {shown(value)}', param=where)
    return name, schema


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _json(schema: dict[str, typing.Any]) -> str:
    return json.dumps(schema | {"x-guidance": FORM})
