"""Limits and fields for lines of the schema: `steps: Annotated[int, at_least(1)] = key(1000, "optimizer steps in all")`.

`jaxlm.config.build` refuses values beyond a limit ("config.train.steps=0 must be at least 1"); the help prints the same words.
"""

import copy
import dataclasses
import math
import re
import sys
from collections.abc import Callable
from typing import Annotated, TypeVar

T = TypeVar("T")
LARGEST = 2**31 - 1  # size of an array's axis


def key(default: T, comment: str) -> T:
    """Returns a field of the schema: its default, and its comment, which the help prints."""
    metadata = {"comment": comment}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=lambda: copy.deepcopy(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class Limit:
    """A rule for one value.

    Attributes:
      words: what a value must be: "at least 1".
      problem: value -> the rest of a message that begins with the value (" must be at least 1"); "" if it is allowed.
    """

    words: str
    problem: Callable[[object], str]


def at_least(low: float, or_else: dict[int, str] | None = None, most: float = math.inf) -> Limit:
    """Allows numbers of at least `low`, and the special values in `or_else`, with their meanings: {-1: "auto"}.

    Args:
      most: a larger value can only be a typing error; the help does not mention this limit.
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
    """Allows numbers of at least `low` and below `high`."""
    return _numbers(f"at least {low} and below {high}", lambda value: low <= value < high)


def _numbers(words: str, allows: Callable[[float], bool]) -> Limit:
    def problem(value: float) -> str:
        if not abs(value) <= sys.float_info.max:  # also true of an integer too large for a float
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

_TIMES = written(r".*\S [0-9]*\.?[0-9]+(e[-+]?[0-9]+)?\^?", '"PATTERN TIMES", such as "embed/.* 0.5"')
Rate = Annotated[str, _TIMES, REGULAR_EXPRESSION]
Pattern = Annotated[str, REGULAR_EXPRESSION]
Count = Annotated[int, at_least(0, most=LARGEST)]
Size = Annotated[int, at_least(1, most=LARGEST)]
Natural = Annotated[int, at_least(0)]
Tokens = Annotated[int, at_least(0, most=10**18)]
Steps = Annotated[int, at_least(0, most=10**12)]
NotNegative = Annotated[float, at_least(0)]
Positive = Annotated[float, above(0)]
Share = Annotated[float, within(0, 1)]
Fraction = Annotated[float, above(0, most=1)]
BelowOne = Annotated[float, from_to_below(0, 1)]
