"""Builds the typed dataclasses of the schema from plain values, and suggests corrections of misspelt names."""

import dataclasses
import difflib
import functools
from collections.abc import Iterable, Sequence
from typing import Annotated, Literal, TypeVar, get_args, get_origin, get_type_hints

from jaxlm.config import older, theirs
from jaxlm.config.annotations import Limit
from jaxlm.host.errors import ConfigError

_NEAR = 0.7  # how similar a name must be to be meant: below it, guesses mislead

T = TypeVar("T")


def build(kind: type[T], value: object, key: str) -> T:
    """Returns the value as a `kind`, after checking every type and limit.

    Args:
      kind: a dataclass, or the type of one of its fields: dict[str, X], tuple[X, ...], a scalar type, a Literal,
        Annotated with limits, or `object` for a value that is checked elsewhere.
      value: plain values: dicts, lists or tuples, scalars.
      key: the value's dotted key, for messages; "" for the whole config.

    Raises:
      ConfigError: a key is unknown or missing, or a value has the wrong type or is beyond its limits.
    """
    if dataclasses.is_dataclass(kind):
        return _section(kind, value, key)
    origin = get_origin(kind)
    if origin is dict and isinstance(value, dict):
        item = get_args(kind)[1]
        return {name: build(item, part, _join(key, name)) for name, part in value.items()}
    if origin is tuple and isinstance(value, tuple | list):
        item = get_args(kind)[0]
        for part in value:
            if problem := _problem(item, part):
                raise ConfigError(f"config.{key}={tuple(value)!r}: {part!r}{problem}")
        return tuple(_scalar(item, part) for part in value)
    if value not in older.GONE.get(key, ()) and (problem := _problem(kind, value)):
        raise ConfigError(f"config.{key}={value!r}{problem}")
    return _scalar(kind, value)


def _section(kind: type[T], value: object, key: str) -> T:
    hints = _hints(kind)
    if not isinstance(value, dict):
        raise ConfigError(f"config.{key} must be a section with the keys {', '.join(hints)}")
    for name in value:
        if name not in hints:
            known = [_join(key, hint) for hint in hints]
            raise ConfigError(f"unknown key config.{_join(key, name)}; {nearest_key(_join(key, name), known)}")
    for name in hints:
        if name not in value:
            raise ConfigError(f"missing key config.{_join(key, name)}; begin the config with base.get_config()")
    return kind(**{name: build(hint, value[name], _join(key, name)) for name, hint in hints.items()})


_hints = functools.cache(functools.partial(get_type_hints, include_extras=True))


@functools.cache
def plain(kind: type) -> type:
    """Returns the type without its limits: int for Annotated[int, ...], str for a Literal of strings."""
    if get_origin(kind) is Annotated:
        return plain(get_args(kind)[0])
    return type(get_args(kind)[0]) if get_origin(kind) is Literal else kind


@functools.cache
def limits(kind: type) -> list[Limit]:
    """Returns the limits of a scalar type, in the order in which they are checked."""
    if get_origin(kind) is Annotated:
        inner, *own = get_args(kind)
        return [*limits(inner), *(limit for limit in own if isinstance(limit, Limit))]
    return [_choice(get_args(kind))] if get_origin(kind) is Literal else []


def _choice(values: Sequence[str | int]) -> Limit:
    words = f"one of {', '.join(str(value) or repr('') for value in values)}"

    def problem(value: str | int) -> str:
        if value in values:
            return ""
        near = difflib.get_close_matches(value, values, n=1) if isinstance(value, str) else ()
        return f": choose {words}" + (f"; did you mean {near[0]!r}?" if near else "")

    return Limit(words, problem)


def _problem(kind: type, value: object) -> str:
    """Returns the rest of a message that begins with the value (" must be at least 1"); "" if the value is allowed."""
    wanted = plain(kind)
    if wanted is object:
        return ""
    number = wanted is float and isinstance(value, int | float) and not isinstance(value, bool)
    if not number and type(value) is not wanted:
        return f": expected {type_name(kind)}"
    return next(filter(None, (limit.problem(value) for limit in limits(kind))), "")


def _scalar(kind: type[T], value: object) -> T:
    return float(value) if plain(kind) is float else value


def type_name(kind: type) -> str:
    """Returns the name of a key's type for users: "int", "tuple of str"."""
    if get_origin(kind) is tuple:
        return f"tuple of {type_name(get_args(kind)[0])}"
    return "section" if get_origin(kind) is dict else plain(kind).__name__


def _join(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name


def nearest(name: str, names: Iterable[str]) -> str:
    """Returns a hint for a misspelt name: the most similar of `names`, or all names if none is similar."""
    near = difflib.get_close_matches(name, list(names), n=1)
    return f"did you mean {near[0]!r}?" if near else f"there are {', '.join(sorted(names)) or 'none'}"


def nearest_key(key: str, keys: Sequence[str]) -> str:
    """Returns a hint for an unknown key: the key that was probably meant, also by a user of another trainer."""
    if known := theirs.hint(key, keys):
        return known
    near, section = meant(key, keys), key.partition(".")[0]
    page = section if any(each.startswith(f"{section}.") for each in keys) else "all"
    return f"did you mean config.{near}?" if near else f"jaxlm train --help={page} lists all keys"


def meant(key: str, keys: Sequence[str]) -> str:
    """Returns the dotted key probably meant: a key with the same last part, else a similar key or last part; "" if none."""
    last = key.split(".")[-1]
    near = [k for k in keys if k.split(".")[-1] == last] or difflib.get_close_matches(key, keys, n=1, cutoff=_NEAR)
    if not near:
        by_last = {k.split(".")[-1]: k for k in keys}
        near = [by_last[m] for m in difflib.get_close_matches(last, by_last, n=1, cutoff=_NEAR)]
    return min(near, key=lambda k: k.count(".")) if near else ""  # train.seed: seed rather than data.seed
