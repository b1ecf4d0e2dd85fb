"""Reads the keys of a command line that have several values, and combines them. Imports no JAX."""

import ast
import contextlib
import itertools
import math
from collections.abc import Mapping, Sequence

from jaxlm.config import ConfigError, config_files

_FIXED = ("data.", "prepare.", "eval.", "workdir", "program")


def split(overrides: Sequence[str]) -> tuple[list[str], dict[str, Sequence]]:
    """Takes the keys with several values out: "optim.lr=1e-3,2e-3"; of a tuple "adapter.targets=(q,v);(q,k,v)".

    Returns (the other overrides, key -> values), of a range, "optim.lr=1e-4..1e-2", the tuple of its ends. Raises
    ConfigError if a key must be the same in all runs, for a key that is given again after several values, and for a bad range.
    """
    base, plain, swept = config_files.load("base"), [], {}
    for override in overrides:
        key, _, text = override.partition("=")
        own, fixed = config_files.value_of(base, key.split(".")), key.startswith(_FIXED)
        single = ";" not in text and (isinstance(own, tuple) or (fixed and isinstance(own, str)))  # a path with a comma
        values = [value.strip() for value in text.split(";" if ";" in text else ",")]
        if ".." in text and isinstance(own, int | float):
            values = _ends(key, text, own)
        if key in swept:
            raise ConfigError(f"config.{key}={text}: this key has several values already: give all at once, A,B,C")
        if single or len(values) < 2:
            plain.append(override)
        elif key == "seed":
            raise ConfigError(f"config.seed={text}: --seeds=N runs each with N seeds, from config.seed on")
        elif fixed:
            raise ConfigError(f"config.{key}={text}: all runs of a sweep read one data directory and one held-out text")
        else:
            swept[key] = list(map(_quoted, values)) if isinstance(own, tuple) else values
    return plain, swept


def _ends(key: str, text: str, own: float) -> tuple[float, float]:
    """Returns the two ends of a range, the lower first. Raises ConfigError if `text` is none, or `own` is a whole number."""
    with contextlib.suppress(ValueError):
        low, high = sorted(map(float, text.split("..")))
        if isinstance(own, float) and "..." not in text and -math.inf < low < high < math.inf:
            return low, high
    form = "a range is LOW..HIGH of a key with a point in its number, such as --config.optim.lr=1e-4..1e-2"
    raise ConfigError(f"config.{key}={text}: {form}; other values have commas between them: A,B,C")


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
