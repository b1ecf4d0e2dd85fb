"""Turns records of example files into messages of one form, and tools; notes which keys and rows are not read."""

import contextlib
import functools
import json
import shlex
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from jaxlm.config import ConfigError
from jaxlm.corpus.benchmarks import reading
from jaxlm.host.console import several
from jaxlm.host.files import json_of

# "role" and "content"; perhaps tool_calls, one of THOUGHTS, "weight": 0 for an answer that is not learnt.
Message = dict[str, typing.Any]
Messages = tuple[Message, ...]
T = typing.TypeVar("T")
ASSISTANT, TOOL = "assistant", "tool"
# Keys of the thoughts before an answer; transformers takes the first key that a message has.
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
# What only some models' templates write: the role, keys of messages, a row's key.
TEMPLATED = (TOOL, "tool_calls", "tools", *THOUGHTS)
_LINES = {
    "unfit": "left out, since nothing can be learnt from them",
    "emptied": "left out, since without the ignored keys an answer is empty",
    "scores": "trained on unchanged, though their scores say that the rejected side is better",
    "answered": "asked without what the assistant says at the end",
}
WEIGHTS = ("weight", "train", "loss")  # of an answer: 0 or 1
_ROLES = {"system": "system", "user": "user", "human": "user"}
_ROLES |= dict.fromkeys((ASSISTANT, "gpt", "chatgpt", "bing", "bard", "model"), ASSISTANT)
_NEWER = {"developer": "system", "observation": TOOL}  # roles that older versions passed to the template unchanged


class Place(typing.NamedTuple):
    """Where an example is: its file and its number there, from 1; in a .jsonl its line."""

    path: str
    number: int

    def __str__(self) -> str:
        return f"{self.path}:{self.number}"


class Absent(str):
    """The content of a message without content, for templates that distinguish it from an empty text."""


class Unfit(ValueError):
    """A record can't be used; the message says why."""


class Notes:
    """Notes on examples that are read and encoded: keys that are not read, rows that are left out."""

    def __init__(self, ignore: Collection[str] = ()):
        self.ignore = frozenset(ignore)
        self._met: dict[tuple[str, str], tuple[int, str]] = {}
        self.left_out = ""  # the first row that is left out of the path read last, with the reason

    def note(self, kind: str, name: str, place: Place, why: str = "") -> None:
        """Counts a row under a `kind`: one of `_LINES`, or "read", "unread", "refused", "ignored" for a key that it has."""
        here = f"{place}: {why}" if why else str(place)
        rows, first = self._met.get((kind, name), (0, here))
        self._met[kind, name] = rows + 1, first
        self.left_out = self.left_out or (here if kind in ("unfit", "emptied") else "")

    def of(self, kind: str) -> dict[str, tuple[str, str]]:
        """Returns name -> ("3 rows", which have this note; the place of the first and what is wrong there)."""
        return {name: (several(rows, "row"), first) for (met, name), (rows, first) in self._met.items() if met == kind}

    def check(self) -> None:
        """Raises ConfigError if rows have a key that can't be read."""
        if refused := self.of("refused"):
            keys = "; ".join(f"{name} in {rows}, the first {first}" for name, (rows, first) in refused.items())
            raise ConfigError(f"{keys}; to ignore such keys: {self.flag(refused)}")

    def flag(self, keys: Collection[str]) -> str:
        """Returns the flag, quoted for a shell, that ignores these keys and those already ignored."""
        names = (json.dumps(key, ensure_ascii=False) for key in dict.fromkeys((*sorted(self.ignore), *keys)))
        return shlex.quote(f"--config.examples.ignore=({','.join((*names, ''))})")

    def as_before(self) -> str:
        """Returns a line on how to read the rows as older versions did, without newer keys; "" if they have none."""
        keys, but = sorted(self.of("read")), "except rows whose answer is empty without it"
        told = f"{', '.join(keys)} was not read: {self.flag(keys)} gives the run its batches back, {but}"
        return told if keys else ""

    def lines(self, read: Collection[str] = ()) -> list[str]:
        """Returns a line for each kind of note. `read`: columns that are read elsewhere."""
        unread = [f"{name} in {rows}" for name, (rows, _) in self.of("unread").items() if name not in read]
        left = [(said, met) for kind, said in _LINES.items() for met in self.of(kind).values()]
        idle = sorted(self.ignore - self.of("ignored").keys())
        lines = [f"not read: {', '.join(unread)}"] if unread else []
        lines += [f"examples.ignore: no row has {', '.join(map(_named, idle))}"] if idle else []
        return lines + [f"{rows} {said}; the first: {first}" for said, (rows, first) in left]


def _named(key: str) -> str:
    return repr(key)[1:-1]


class Row(dict[str, typing.Any]):
    """A record without None and ignored keys, which notes the keys that are read; `columns` keeps those with None."""

    def __init__(self, record: Mapping[str, typing.Any], place: Place, ignore: frozenset[str]):
        self.columns = {key: value for key, value in record.items() if key not in ignore}
        super().__init__({key: value for key, value in self.columns.items() if value is not None})
        self.place, self.ignore, self.learns = place, ignore, True
        self.noted = {("unread", _named(key)): "" for key in self}
        self.noted |= {("ignored", key): "" for key in record if key in ignore}

    def __getitem__(self, key: str) -> typing.Any:
        self.noted.pop(("unread", _named(key)), None)
        return super().__getitem__(key)

    def get(self, key: str, default: typing.Any = None) -> typing.Any:
        return self[key] if key in self else default  # noqa: SIM401

    def note(self, kind: str, name: str = "", why: str = "") -> None:
        self.noted.setdefault((kind, name), why)

    def listed(self, key: str, value: typing.Any, fits: Callable[[typing.Any], bool]) -> list[typing.Any] | None:
        """Returns a key's list, given as JSON or JSON text; None if empty. Raises Unfit for no list, or an item not `fits`."""
        value = _pruned(value) if self.place.path.endswith(".parquet") else value
        with contextlib.suppress(ValueError):
            value = json_of(value, list) if isinstance(value, str) and value else value
        if value in (None, "", []):
            return None
        if not isinstance(value, list) or not all(map(fits, value)):
            raise Unfit(f"its {key} can't be read: {str(value)[:40]!r}")
        self.note("read", key)
        return value


def _pruned(value: typing.Any) -> typing.Any:
    """Returns a value of parquet without the keys that only other rows have."""
    if isinstance(value, Mapping):
        return {key: _pruned(inner) for key, inner in value.items() if inner is not None}
    return [_pruned(inner) for inner in value] if isinstance(value, list) else value


def rows(path: str, key: str, notes: Notes, make: Callable[[Row], T]) -> Iterator[T]:
    """Yields what `make` returns for each record that is fit; notes the rest. Raises ConfigError as `examples.read` does."""
    fit, notes.left_out = False, ""
    lost = functools.partial(notes.note, "unfit", "", why="it is no JSON object")
    for file in reading.files((path,), key):
        for number, record in reading.records(file, lambda number, file=file: lost(Place(file, number))):
            row, made = Row(record, Place(file, number), notes.ignore), None
            try:
                made = make(row)
            except Unfit as error:
                row.noted = {what: why for what, why in row.noted.items() if what[0] not in ("unread", "emptied")}
                if all(kind != "refused" for kind, _ in row.noted):
                    row.note("unfit", "", str(error))
            for (kind, name), why in row.noted.items():
                notes.note(kind, name, row.place, why)
            if not {"unfit", "emptied", "refused"} & {kind for kind, _ in row.noted}:
                fit = True
                yield made
    notes.check()
    if not fit and notes.left_out:
        raise ConfigError(notes.left_out)


def system_of(row: Row) -> str:
    """Returns the system message in a row's key `system`; "" if there is none."""
    if system := text_of(row.get("system", ""), "system"):
        row.note("read", "system")
    return system


def led_by(messages: Messages, system: str) -> Messages:
    """Returns messages that begin with this system message. Raises Unfit if they begin with another system message."""
    if not system or messages[:1] == (message_of("system", system),):
        return messages
    if messages and messages[0]["role"] == "system":
        raise Unfit("its system differs from the system message of its messages")
    return (message_of("system", system), *messages)


def messages_of(value: typing.Any, row: Row) -> Messages:
    """Returns a list of messages of any format in one form. Raises Unfit if it is empty, no list, or has a bad message."""
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise Unfit("there is no list of messages where one should be")
    return tuple(_normal(message, row) for message in value)


def _normal(message: typing.Any, row: Row) -> Message:
    """Returns a message in one form, from {role, content} or {from, value}."""
    if not isinstance(message, Mapping):
        raise Unfit(f"{str(message)[:40]!r} is no message: it needs role and content")
    has = {key: value for key, value in message.items() if value not in (None, []) and key not in row.ignore}
    speaker, text = "role" if "role" in has else "from", "content" if "content" in has else "value"
    role, content = _role(has.get(speaker), row), has.get(text)
    says = role == ASSISTANT
    if isinstance(content, list):  # of parts, as models that see pictures have them
        if any(not isinstance(part, Mapping) or part.get("type") != "text" for part in content):
            raise Unfit(f"a message of {role} is not only text")
        content = "".join(text_of(part.get("text"), text) for part in content)
    for key in message.keys() & row.ignore:
        row.note("ignored", key)
    instead = {key for key in ("tool_calls", "function_call", *THOUGHTS) if message.get(key) and says}
    normal = message_of(role, Absent() if content is None and instead else text_of(content, text))
    more = [key for key in THOUGHTS if has.get(key)][:1] if says else ["tool_call_id", "name"] if role == TOOL else []
    normal |= {key: text_of(has[key], key) for key in more if key in has}
    if says and (calls := row.listed("tool_calls", has.get("tool_calls"), _is_call)):
        normal["tool_calls"] = calls
    weights = {key: has[key] for key in WEIGHTS if key in has and says and row.learns}
    for key, value in weights.items():
        if not isinstance(value, int | float) or value not in (0, 1):
            row.note("refused", key, "it is neither 0 nor 1")
    normal |= {"weight": 0} if 0 in weights.values() else {}
    if "function_call" in has:
        row.note("refused", "function_call", "it is the old form of tool_calls")
    if instead & row.ignore and not normal["content"].strip() and "tool_calls" not in normal:
        row.note("emptied")
    for key in has.keys() - {speaker, text, "function_call"}:
        of = "" if key in normal or key in weights else " of messages"
        row.note("unread" if of else "read", _named(key) + of)
    return normal


def _is_call(call: typing.Any) -> bool:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)


def _role(name: typing.Any, row: Row) -> str:
    """Returns the role of a message as templates name it. Notes an unknown role as refused, unless it is ignored."""
    if not isinstance(name, str) or not name:
        raise Unfit("a message has no role")
    role = name.lower()
    for key in row.ignore & {name, role}:
        row.note("ignored", key)
    if role in _ROLES or row.ignore & {name, role}:
        return _ROLES.get(role, role)
    if role in _NEWER:
        row.note("read", role)
    elif role != TOOL:
        row.note("refused", role, "it is no role of a message")
    return _NEWER.get(role, role)


def message_of(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def text_of(value: typing.Any, key: str) -> str:
    """Returns the value of a key that must be a text. Raises Unfit if it is none."""
    if not isinstance(value, str):
        raise Unfit(f"its {key} {str(value)[:40]!r} is no text")
    return value
