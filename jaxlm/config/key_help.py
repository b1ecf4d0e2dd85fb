"""Writes the help on the config's keys, from the schema."""

import dataclasses
import functools
import itertools
import textwrap
from collections.abc import Sequence
from typing import get_args, get_origin, get_type_hints

from ml_collections import config_dict

from jaxlm.config import config_files
from jaxlm.config.build import limits, meant, type_name
from jaxlm.config.corpora import PrepareSourceConfig
from jaxlm.config.prepare_stages import StagesConfig
from jaxlm.config.schema import Config, PhaseConfig
from jaxlm.host.errors import ConfigError

WIDTH = 100
# Sections whose entries the user names -> the class of an entry. In the help, SECTION.NAME stands for each entry.
NAMED = {"prepare.sources": PrepareSourceConfig, "phases.plan": PhaseConfig}


@dataclasses.dataclass(frozen=True)
class Key:
    """A key of the config.

    Attributes:
      name: the dotted name, as in --config.NAME=VALUE.
      type: the name of its type for users: "int", "tuple of str".
      limits: the rule for its values: "at least 1", "one of llama, gpt2"; "" if any value of the type is allowed.
      default: its default.
      comment: what the key sets.
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
    """All keys, and dotted name -> comment for each section, in the order of the schema."""

    keys: tuple[Key, ...]
    sections: dict[str, str]


@functools.cache
def read(entry: str = "NAME") -> Keys:
    """Returns the keys and sections of the schema; `entry`: the name of the entry in each section of NAMED."""
    keys, sections = [], {}

    def collect(section: object, prefix: str) -> None:
        hints = get_type_hints(type(section), include_extras=True)
        for field in dataclasses.fields(section):
            name, default = prefix + field.name, getattr(section, field.name)
            if name in NAMED:
                sections[name], sections[f"{name}.{entry}"] = field.metadata["comment"], NAMED[name].__doc__
                collect(NAMED[name](), f"{name}.{entry}.")
            elif name == "prepare.stages" or dataclasses.is_dataclass(default):
                default = StagesConfig() if name == "prepare.stages" else default
                sections[name] = type(default).__doc__
                collect(default, f"{name}.")
            else:
                keys.append(Key(name, *_type_and_limits(hints[field.name]), default, field.metadata["comment"]))

    collect(Config(), "")
    return Keys(tuple(keys), sections)


def _type_and_limits(kind: type) -> tuple[str, str]:
    each, scalar = ("each ", get_args(kind)[0]) if get_origin(kind) is tuple else ("", kind)
    return type_name(kind), ", ".join(f"{each}{limit.words}" for limit in limits(scalar))


def overview(known: Keys, first: Sequence[str] = ()) -> list[str]:
    """Returns lines on the top-level sections, two a line, those in `first` first, and a line on the keys outside sections."""
    names = dict.fromkeys([*first, *(name for name in known.sections if "." not in name)])
    cells = [f"{name:<12} {known.sections[name].partition(';')[0]}" for name in names]
    pairs = itertools.zip_longest(cells[::2], cells[1::2], fillvalue="")
    outside = ", ".join(key.name for key in known.keys if not key.section)
    return [*(f"  {left:<48} {right}".rstrip() for left, right in pairs), f"  and the keys {outside}"]


def page(known: Keys, wanted: str, config: config_dict.ConfigDict) -> str:
    """Returns the help on a section, a key or "all": values in `config`, defaults, types, limits, comments.

    Raises:
      ConfigError: there is no such section or key.
    """
    names = {section: list(config_files.value_of(config, section.split(".")) or ()) for section in NAMED}
    for section in NAMED:
        if wanted.startswith(f"{section}.") and (name := wanted.split(".")[2]) in names[section]:
            known = read(name)
    everything = [*known.sections, *(key.name for key in known.keys)]
    shown = {name for name in everything if wanted == "all" or f"{name}.".startswith(f"{wanted}.")}
    if not shown:
        near = meant(wanted, everything)
        top = ", ".join(section for section in known.sections if "." not in section)
        raise ConfigError(f"no section or key {wanted!r}; " + (f"did you mean {near}?" if near else f"there are {top}"))
    lines = ["each is set by --config.KEY=VALUE"]
    for section, comment in {"": "", **known.sections}.items():
        keys = [key for key in known.keys if key.section == section and key.name in shown]
        if keys or section in shown:
            here = f"; in this config: {', '.join(names[section])}" if names.get(section) else ""
            lines += ["", *_wrapped(f"{section}: {comment}{here}", 0)] if section else [""]
        for key in keys:
            lines += _entry(key, config)
    return "\n".join(lines)


def _entry(key: Key, config: config_dict.ConfigDict) -> list[str]:
    value = config_files.value_of(config, key.name.split("."))
    if value is None:  # SECTION.NAME, or a config that does not start from base
        value = key.default
    value = value.to_dict() if isinstance(value, config_dict.ConfigDict) else value
    default = "default" if value == key.default else f"default {key.default!r}"
    words = ", ".join(filter(None, (key.type, key.limits)))
    return [*_wrapped(f"{key.name} = {value!r}  ({default}; {words})", 2), *_wrapped(key.comment, 6)]


def _wrapped(text: str, indent: int) -> list[str]:
    whole = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.wrap(text, WIDTH, initial_indent=" " * indent, subsequent_indent=" " * max(indent, 4), **whole)
