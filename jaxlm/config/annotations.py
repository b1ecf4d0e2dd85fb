"""Limits on the values of a key, in addition to its type: `steps: Annotated[int, at_least(1)]` in the schema.

`jaxlm.config.build` refuses other values ("config.train.steps=0 must be at least 1"); the help prints the same words.
"""

import dataclasses
import math
import re
import sys
from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class Limit:
    """A rule for one value.

    Attributes:
      words: what a value must be: "at least 1".
      problem: value -> what is wrong with it, to be written after the value (" must be at least 1"); "" if nothing is
        wrong.
    """

    words: str
    problem: Callable[[object], str]


def at_least(low: float, or_else: dict[int, str] | None = None, most: float = math.inf) -> Limit:
    """Allows numbers from `low` on, and those in `or_else`, which says what they stand for: {-1: "auto"}.

    Args:
      most: beyond this a value can only be a slip; the help does not mention it.
    """
    others = or_else or {}
    words = "".join([f"at least {low}", *(f", or {value} for {meaning}" for value, meaning in others.items())])
    limit = _numbers(words, lambda value: value >= low or value in others)
    return Limit(words, lambda value: f" must be at most {most:,}" if most < value < math.inf else limit.problem(value))


def above(low: float, most: float = math.inf) -> Limit:
    """Allows numbers greater than `low` and at most `most`."""
    words = f"greater than {low}" + (f" and at most {most}" if most < math.inf else "")
    return _numbers(words, lambda value: low < value <= most)


def within(low: float, high: float) -> Limit:
    """Allows numbers from `low` to `high`, both included."""
    return _numbers(f"in {low} to {high}", lambda value: low <= value <= high)


def from_to_below(low: float, high: float) -> Limit:
    """Allows numbers from `low` on, but below `high`."""
    return _numbers(f"at least {low} and below {high}", lambda value: low <= value < high)


def _numbers(words: str, allows: Callable[[float], bool]) -> Limit:
    def problem(value: float) -> str:
        if not abs(value) <= sys.float_info.max:  # also true of a whole number that no float holds
            return f" must be finite and {words}"
        return "" if allows(value) else f" must be {words}"

    return Limit(words, problem)


def written(pattern: str, words: str) -> Limit:
    """Allows text that the regular expression `pattern` matches as a whole; `words` describe such text."""
    return Limit(words, lambda value: "" if re.fullmatch(pattern, value) else f" must be {words}")


def _regular_expression_problem(value: str) -> str:
    try:
        re.compile(value)
    except re.error as error:
        return f" is not a regular expression: {error}"
    return ""


REGULAR_EXPRESSION = Limit("a regular expression", _regular_expression_problem)
