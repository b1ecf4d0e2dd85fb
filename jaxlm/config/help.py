"""Writes the help on the config's keys: types and limits from the schema, defaults and comments from base.py.

`tokenize` reads the comments of base.py and of the files that it imports. A comment belongs to the assignment (found by
`ast`) that shares its lines or follows it directly. Indentation and line breaks make no difference.
"""

import ast
import dataclasses
import io
import itertools
import pathlib
import textwrap
import tokenize
import types
from collections.abc import Iterator, Sequence
from typing import get_args, get_origin, get_type_hints

from ml_collections import config_dict

from jaxlm.config.build import limits, meant, type_name
from jaxlm.config.schema import Config, ConfigError

WIDTH = 100
# Sections whose parts the user names -> the function of base.py that makes a part, and has its defaults and comments.
# In the help, SECTION.NAME stands for every part.
NAMED = {"prepare.sources": "source", "phases.plan": "phase"}


@dataclasses.dataclass(frozen=True)
class Key:
    """A key of the config.

    Attributes:
      name: the dotted name, as in --config.NAME=VALUE.
      type: the name of its type for users: "int", "tuple of str".
      limits: the rule for its values: "at least 1", "one of llama, gpt2"; "" if any value of the type is allowed.
      default: the default in base.py.
      comment: the comment in base.py; "" if there is none.
    """

    name: str
    type: str
    limits: str
    default: object
    comment: str

    @property
    def section(self) -> str:
        return self.name.rpartition(".")[0]


@dataclasses.dataclass(frozen=True)
class Keys:
    """All keys, and dotted name -> comment for each section, in the order of base.py."""

    keys: tuple[Key, ...]
    sections: dict[str, str]


def read(base: types.ModuleType) -> Keys:
    """Returns the keys that `get_config`, `source` and `phase` set in a module like `configs/base.py`."""
    defaults = base.get_config()
    for section, make in NAMED.items():
        _get(defaults, section).NAME = getattr(base, make)()
    modules = [base, *(value for value in vars(base).values() if isinstance(value, types.ModuleType))]
    texts = [pathlib.Path(module.__file__).read_text(encoding="utf-8") for module in modules]
    keys, sections = [], {}
    for name, comment in comments(texts).items():
        default = _value(defaults, name)
        if isinstance(default, dict) and name not in ("data.sources", "data.final.weights"):
            sections[name] = comment
        else:
            keys.append(Key(name, *_type_and_limits(name, default), default, comment))
    return Keys(tuple(keys), sections)


def _value(config: config_dict.ConfigDict, name: str) -> object:
    """The value of a dotted key, plain. Raises KeyError if the config has no such key."""
    value = _get(config, name)
    return value.to_dict() if isinstance(value, config_dict.ConfigDict) else value


def _get(config: config_dict.ConfigDict, name: str) -> object:
    for part in name.split("."):
        config = config[part]
    return config


def _type_and_limits(name: str, default: object) -> tuple[str, str]:
    """By the schema, but for settings of stages, which the stages check: their type is that of their default."""
    kind = Config
    for part in name.split("."):
        kind = get_args(kind)[1] if get_origin(kind) is dict else get_type_hints(kind, include_extras=True)[part]
    if kind is object:
        return type(default).__name__, ""
    each, scalar = ("each ", get_args(kind)[0]) if get_origin(kind) is tuple else ("", kind)
    return type_name(kind), ", ".join(f"{each}{limit.words}" for limit in limits(scalar))


# ---------------------------------------------------------------------------------------------------------------------
# Comments


@dataclasses.dataclass(frozen=True)
class _Function:
    """A function of a source text, and the comments of that text."""

    node: ast.FunctionDef
    notes: "_Notes"


def comments(sources: Sequence[str]) -> dict[str, str]:
    """Returns dotted name -> comment ("" for none), for every section and key that source texts like base.py assign."""
    functions = {}
    for source in sources:
        notes = _Notes(source)
        nodes = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
        functions |= {node.name: _Function(node, notes) for node in nodes}
    found = dict(_assignments(functions, "get_config", {}, ""))
    for section, make in NAMED.items():
        found[f"{section}.NAME"] = ast.get_docstring(functions[make].node) or ""
        found |= dict(_assignments(functions, make, {}, f"{section}.NAME"))
    return found


def _assignments(
    functions: dict[str, _Function], called: str, sections: dict[str, str], root: str
) -> Iterator[tuple[str, str]]:
    """(dotted name, comment) of all that a function and those that it calls assign to sections of the config.

    Args:
      functions: all of the texts, by name.
      called: the function to follow.
      sections: the function's arguments that are sections -> their dotted names ("" for the config itself).
      root: what a `ConfigDict()` is that is given a name of its own only, as in `c = ConfigDict()`.
    """
    sections = dict(sections)

    def dotted(node: ast.expr) -> str | None:
        if isinstance(node, ast.Name):
            return sections.get(node.id)
        section = dotted(node.value) if isinstance(node, ast.Attribute) else None
        return section if section is None else f"{section}.{node.attr}".lstrip(".")

    for statement in functions[called].node.body:
        match statement:
            case ast.Expr(
                value=ast.Call(func=ast.Name(id=name) | ast.Attribute(value=ast.Name(), attr=name), args=arguments)
            ) if name in functions:
                parameters = [parameter.arg for parameter in functions[name].node.args.args]
                given = zip(parameters, map(dotted, arguments), strict=True)
                inner = {parameter: section for parameter, section in given if section is not None}
                yield from _assignments(functions, name, inner, root)
            case ast.Assign(targets=targets, value=value):
                keys = [key for target in targets if isinstance(target, ast.Attribute) and (key := dotted(target))]
                yield from ((key, functions[called].notes.of(statement)) for key in keys)
                if ast.unparse(value) == "ConfigDict()":  # `c.model = m = ConfigDict()`: from here on m is model
                    sections |= {target.id: (keys or [root])[0] for target in targets if isinstance(target, ast.Name)}


class _Notes:
    """The comments of a source text."""

    def __init__(self, source: str):
        self.text: dict[int, str] = {}  # line -> its comment
        self.alone: set[int] = set()  # lines that are a comment and nothing else
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT:
                self.text[token.start[0]] = token.string.lstrip("#").strip()
                if not token.line[: token.start[1]].strip():
                    self.alone.add(token.start[0])

    def of(self, statement: ast.stmt) -> str:
        """The comments in the statement's lines, else those on the lines directly above it; "" without any."""
        lines = [line for line in range(statement.lineno, statement.end_lineno + 1) if line in self.text]
        if not lines:
            lines = sorted(itertools.takewhile(self.alone.__contains__, itertools.count(statement.lineno - 1, -1)))
        return " ".join(filter(None, (self.text[line] for line in lines)))


# ---------------------------------------------------------------------------------------------------------------------
# Pages


def overview(known: Keys, first: Sequence[str] = ()) -> list[str]:
    """Returns a line on each top-level section, those in `first` before the others, and on each key outside all sections."""
    top = [name for name in known.sections if "." not in name]
    names = [*first, *(name for name in top if name not in first)]
    cells = [f"{name:<12} {known.sections[name].partition(';')[0]}" for name in names]
    pairs = itertools.zip_longest(cells[::2], cells[1::2], fillvalue="")
    outside = ", ".join(key.name for key in known.keys if not key.section)
    return [*(f"  {left:<48} {right}".rstrip() for left, right in pairs), f"  and the keys {outside}"]


def page(known: Keys, wanted: str, config: config_dict.ConfigDict) -> str:
    """Returns the help on a section, a key or "all": values in `config`, defaults, types, limits, comments.

    Raises:
      ConfigError: there is no such section or key.
    """
    names = {section: list(_get(config, section)) for section in NAMED}
    for section in NAMED:
        if wanted.startswith(f"{section}.") and (name := wanted.split(".")[2]) in names[section]:
            known = _of_part(known, section, name)
    everything = [*known.sections, *(key.name for key in known.keys)]
    asked = {name for name in everything if wanted == "all" or f"{name}.".startswith(f"{wanted}.")}
    if not asked:
        near = meant(wanted, everything)
        top = ", ".join(section for section in known.sections if "." not in section)
        raise ConfigError(f"no section or key {wanted!r}; " + (f"did you mean {near}?" if near else f"there are {top}"))
    lines = ["each is set by --config.KEY=VALUE"]
    for section, comment in {"": "", **known.sections}.items():
        keys = [key for key in known.keys if key.section == section and key.name in asked]
        if keys or section in asked:
            here = f"; in this config: {', '.join(names[section])}" if names.get(section) else ""
            lines += ["", *_wrapped(f"{section}: {comment}{here}", 0)] if section else [""]
        for key in keys:
            lines += _entry(key, config)
    return "\n".join(lines)


def _of_part(known: Keys, section: str, name: str) -> Keys:
    """The keys with the name of a part of the section in place of NAME."""
    part = f"{section}.NAME"

    def named(key: str) -> str:
        return f"{section}.{name}{key.removeprefix(part)}" if f"{key}.".startswith(f"{part}.") else key

    keys = tuple(dataclasses.replace(key, name=named(key.name)) for key in known.keys)
    return Keys(keys, {named(section): comment for section, comment in known.sections.items()})


def _entry(key: Key, config: config_dict.ConfigDict) -> list[str]:
    try:
        value = _value(config, key.name)
    except KeyError:  # NAME, or a config that was not begun with base
        value = key.default
    default = "default" if value == key.default else f"default {key.default!r}"
    words = ", ".join(filter(None, (key.type, key.limits)))
    return [*_wrapped(f"{key.name} = {value!r}  ({default}; {words})", 2), *_wrapped(key.comment, 6)]


def _wrapped(text: str, indent: int) -> list[str]:
    kept = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.wrap(text, WIDTH, initial_indent=" " * indent, subsequent_indent=" " * max(indent, 4), **kept)
