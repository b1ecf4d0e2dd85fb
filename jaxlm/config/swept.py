"""Reads the keys of a command line that have several values, and combines them. Imports no JAX."""

import ast
import contextlib
import itertools
from collections.abc import Mapping, Sequence

from ml_collections import config_dict

from jaxlm.config import ConfigError, config_files

_FIXED = ("data.", "prepare.", "eval.", "workdir", "program")


def split(overrides: Sequence[str]) -> tuple[list[str], dict[str, Sequence]]:
    """Takes the keys with several values out: "optim.lr=1e-3,2e-3"; of a tuple "adapter.targets=(q,v);(q,k,v)".

    Returns (the other overrides, key -> values), of a range, "optim.lr=1e-4..1e-2", the tuple of its ends. Raises
    ConfigError if a key must be the same in all runs.
    """
    base, plain, swept = config_files.load("base"), [], {}
    for override in overrides:
        key, _, text = override.partition("=")
        own, fixed = value_of(base, key), key.startswith(_FIXED)
        one = ";" not in text and (isinstance(own, tuple) or (fixed and isinstance(own, str)))  # a path with a comma
        values = [value.strip() for value in text.split(";" if ";" in text else ",")]
        ends = text.split("..")
        if len(ends) == 2 and isinstance(own, float):
            with contextlib.suppress(ValueError):  # then the config says so
                values = tuple(sorted(map(float, ends)))
        if one or len(values) < 2:
            plain.append(override)
        elif key == "seed":
            raise ConfigError(f"config.seed={text}: --seeds=N runs each with N seeds, from config.seed on")
        elif fixed:
            raise ConfigError(f"config.{key}={text}: all runs of a sweep read one data directory and one held-out text")
        else:
            swept[key] = list(map(_quoted, values)) if isinstance(own, tuple) else values
    return plain, swept


def _quoted(text: str) -> str:
    """Returns the tuple of texts "(a,b)" with its quotes, which a shell takes away; other values as they are."""
    with contextlib.suppress(ValueError, SyntaxError):
        ast.literal_eval(text)
        return text
    return repr(tuple(word.strip() for word in text[1:-1].split(","))) if text.startswith("(") else text


def combined(swept: Mapping[str, Sequence[str]], one_at_a_time: bool) -> list[list[str]]:
    """Returns the overrides of each arm: all combinations, or none and then one key after the other."""
    named = [[f"{key}={value}" for value in values] for key, values in swept.items()]
    return (
        [[], *([value] for values in named for value in values)] if one_at_a_time else list(itertools.product(*named))
    )


def value_of(config: config_dict.ConfigDict, key: str) -> object:
    """Returns the value of a dotted key; None if there is no such key."""
    value: object = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, config_dict.ConfigDict) else None
    return value
