"""Windows of batches that a run passes over, and the batches that are left for its steps."""

import bisect
import functools
import itertools
from collections.abc import Iterable, Sequence

from jaxlm.config import ConfigError

Windows = tuple[tuple[int, int], ...]  # of batch numbers from 1: (first, last), both included


def merge_windows(windows: Iterable[Sequence[int]]) -> Windows:
    """Returns the same batch numbers as sorted windows that neither overlap nor touch.

    Raises ConfigError if one is no pair of whole numbers with 1 <= first <= last.
    """
    merged: list[tuple[int, int]] = []
    for window in sorted(map(_window, windows)):
        if merged and window[0] <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], window[1]))
        else:
            merged.append(window)
    return tuple(merged)


def _window(given: Sequence[int]) -> tuple[int, int]:
    pair = tuple(given) if isinstance(given, Sequence) and not isinstance(given, str) else ()
    whole = len(pair) == 2 and all(isinstance(number, int) and not isinstance(number, bool) for number in pair)
    if not whole or not 1 <= pair[0] <= pair[1] < 2**62:
        raise ConfigError(
            f"{given} is no window of batches to pass over: it needs a first and a last number, from 1 on"
        )
    return pair


def batch_number(step: int, passed_over: Windows) -> int:
    """Returns the number of the batch of a step, both from 1: the `step`-th number that is in no window.

    Takes O(log n) time. The windows are from `merge_windows`.
    """
    before, skipped = _skips(passed_over)
    return step + skipped[bisect.bisect_left(before, step)]


def step_of(number: int, passed_over: Windows) -> int:
    """Returns the last step whose batch has at most this number; the inverse of `batch_number`."""
    return number - sum(max(0, min(last, number) - first + 1) for first, last in passed_over)


@functools.lru_cache(maxsize=64)
def _skips(windows: Windows) -> tuple[list[int], list[int]]:
    """Returns (how many batches are used before each window, how many are skipped by the first 0, 1, ... windows)."""
    lengths = [last - first + 1 for first, last in windows]
    skipped = [0, *itertools.accumulate(lengths)]
    return [first - 1 - skips for (first, _), skips in zip(windows, skipped, strict=False)], skipped
