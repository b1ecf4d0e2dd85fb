"""Decides by the clock after which step a save is due: at a given interval, or at the interval that loses the least time."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator

import jax

from jaxlm.devices.processes import from_first

AUTO = -1.0  # the value of `checkpoint.every_minutes` that asks for the best interval
LEAST, MOST = 1.0, 120.0  # minutes
_STALL = 0.01  # at most this share of the time may be lost to the stall of the loop
_BESIDE = 0.02  # at most this share of the time may be spent on verifying, while training goes on
FIRST_MINUTES = 10.0  # before any save was measured
_ASK_S = 10.0  # several processes agree this often whether a save is due


def minutes(stall_s: float, verify_s: float, failures_per_day: float) -> float:
    """Returns the interval in minutes that loses the least time, to saving and to work undone by failures.

    It is Young's and Daly's sqrt(2 * stall * mean time between failures) (Young, CACM 17(9), 1974; Daly, FGCS 22(3),
    2006), from 1 to 120 minutes (120 without failures), or longer, so that the stall stays under 1% and verifying under 2%
    of the time.
    """
    between_s = 86400 / failures_per_day if failures_per_day > 0 else math.inf
    best = min(MOST, math.sqrt(2 * stall_s * between_s) / 60) if stall_s > 0 else LEAST
    return max(LEAST, best, stall_s / _STALL / 60, verify_s / _BESIDE / 60)


class Pace:
    """Decides after which step enough time has passed since the last save. Only the first process's clock counts.

    A single process looks at its clock after every step; several agree at steps ~10 s apart, which the first process chooses.
    """

    def __init__(self, every_minutes: float, failures_per_day: float):
        self._every, self._failures = every_minutes, failures_per_day
        self._stall_s, self._verify_s, self._saves = 0.0, 0.0, 0
        self._saved_at = time.monotonic()
        self._first: tuple[int, float] | None = None  # a step, and when it was over
        self._asked, self._answer, self._ask_at = -1, False, 0

    @property
    def minutes(self) -> float:
        if self._every != AUTO:
            return self._every or math.inf
        return minutes(self._stall_s, self._verify_s, self._failures) if self._stall_s else FIRST_MINUTES

    def due(self, step: int, wanted: Callable[[], bool], verify_s: float) -> bool:
        """True if a save is due after `step`: it is time, or `wanted()` is True. All processes must ask for the same steps."""
        if step == self._asked:
            return self._answer
        self._asked, self._answer, self._verify_s = step, False, verify_s
        if step >= self._ask_at:
            self._answer, self._ask_at = from_first(lambda: self._decide(step, wanted))
        return self._answer

    def _decide(self, step: int, wanted: Callable[[], bool]) -> tuple[bool, int]:
        late = time.monotonic() - self._saved_at >= self.minutes * 60
        steps = 1 if jax.process_count() == 1 else max(1, min(1000, round(_ASK_S / (self._step_s(step) or _ASK_S))))
        return late or wanted(), step + steps

    def _step_s(self, step: int) -> float:
        """Returns the seconds that a step takes; 0 if not known yet."""
        now = time.monotonic()
        if self._first is None or step <= self._first[0]:
            self._first = (step, now)
            return 0.0
        return (now - self._first[1]) / (step - self._first[0])

    def left(self, step: int, end: int) -> float:
        """Returns how many saves are due between `step` and `end`, by the mean time of a step so far."""
        if self._first is None or step <= self._first[0]:
            return 0.0
        return (end - step) * self._step_s(step) / (self.minutes * 60)

    @contextlib.contextmanager
    def measured(self, step: int, say: Callable[[str], None]) -> Iterator[None]:
        """Measures how long the save in its `with` block holds the loop, and says once how often the run will save."""
        began = time.monotonic()
        step_s = self._step_s(step)
        yield
        self._saved_at = time.monotonic()
        self._stall_s = max(self._saved_at - began, 1e-3)
        self._saves += 1
        if step_s and self._saves == 2 and self._every:  # the first save compiled the digests
            steps = max(1, round(self.minutes * 60 / step_s))
            every = f"{self.minutes:.3g} minutes ({steps:,} steps)"
            say(f"saving at least every {every}: a save holds the loop for {self._stall_s:.2g} s")
