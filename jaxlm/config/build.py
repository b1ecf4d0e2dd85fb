"""From plain values to the typed dataclasses, with hints at what was probably meant."""

import dataclasses
import difflib
import typing

from jaxlm.config.schema import ConfigError


def build(kind: typing.Any, value: typing.Any, where: str) -> typing.Any:
    """Builds `kind` (a dataclass, dict[str, X], tuple[X, ...] or scalar type) from plain values, checking every type."""
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        if not isinstance(value, dict):
            raise ConfigError(f"config.{where} must be a section with the keys {', '.join(hints)}")
        for key in value:
            if key not in hints:
                raise ConfigError(
                    f"unknown key config.{_join(where, key)}; {nearest_key(_join(where, key), list(hints))}"
                )
        missing = [key for key in hints if key not in value]
        if missing:
            raise ConfigError(f"missing key config.{_join(where, missing[0])}; begin the config with base.get_config()")
        return kind(**{key: build(hint, value[key], _join(where, key)) for key, hint in hints.items()})
    origin = typing.get_origin(kind)
    if origin is dict and isinstance(value, dict):
        return {key: build(typing.get_args(kind)[1], v, _join(where, key)) for key, v in value.items()}
    if origin is tuple and isinstance(value, (tuple, list)):
        return tuple(build(typing.get_args(kind)[0], v, where) for v in value)
    if kind is typing.Any:
        return value
    if kind is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if kind in (int, str, bool) and type(value) is kind:
        return value
    raise ConfigError(f"config.{where}={value!r}: expected {getattr(kind, '__name__', kind)}")


def _join(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def nearest(name: str, names: typing.Iterable[str]) -> str:
    """A hint for a misspelt name: the one that was probably meant, else all that there are."""
    near = difflib.get_close_matches(name, list(names), n=1)
    return f"did you mean {near[0]!r}?" if near else f"there are {', '.join(sorted(names))}"


def nearest_key(key: str, keys: typing.Sequence[str]) -> str:
    """A hint at the key that was probably meant."""
    last = key.split(".")[-1]
    same = [k for k in keys if k.split(".")[-1] == last]
    near = same or difflib.get_close_matches(key, keys, n=1, cutoff=0.5)
    if not near:
        by_last = {k.split(".")[-1]: k for k in keys}
        near = [by_last[m] for m in difflib.get_close_matches(last, by_last, n=1)]
    return f"did you mean config.{near[0]}?" if near else "jaxlm train --help lists all keys"
