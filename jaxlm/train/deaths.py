"""How training ended under the supervisor, and whether another start would get further."""

import contextlib
import dataclasses
import pathlib
import signal
import time
import typing
from collections.abc import Callable

from jaxlm import files
from jaxlm.train import clock

_LONGEST_WAIT_S = 300.0  # between two starts


def backoff(first_s: float, failures: int) -> float:
    """Returns the seconds to wait after so many deaths with no newer checkpoint in between."""
    return min(first_s * 2 ** min(failures - 1, 30), _LONGEST_WAIT_S)


@dataclasses.dataclass(frozen=True)
class Death:
    """How a child ended.

    Attributes:
      code: its exit code; below 0 the signal that ended it.
      step: the last step that it did.
      activity: what it did last.
      hung: the seconds without a sign of life, if it was ended for that.
      out_of_memory: True if the kernel ended a process for want of memory meanwhile.
      stuck: True if it could not be ended.
      fault: True if storage or network failed before its first step, as it said itself, and nobody else starts it again.
    """

    code: int
    step: int
    activity: str
    hung: float = 0.0
    out_of_memory: bool = False
    stuck: bool = False
    fault: bool = False

    def words(self) -> str:
        """Returns what happened, for the user."""
        if self.hung:
            return f"training hung after step {self.step}"
        if self.code >= 0:
            return f"training failed (exit code {self.code}) after step {self.step}"
        try:
            name = signal.Signals(-self.code).name
        except ValueError:
            name = f"signal {-self.code}"
        memory = " (the machine is out of memory)" if self.out_of_memory else ""
        return f"training was ended by {name} after step {self.step}{memory}"


class Progress:
    """What the starts so far achieved, judged by their checkpoints and the steps at which they died.

    Args:
      checkpoints: the folder of the checkpoints.
      patience_s: for how long starts may die of storage or network before their first step.

    Attributes:
      newer: True if there was a newer checkpoint at the last death than at the one before.
      again: True if another start would die as the last one did.
    """

    def __init__(self, checkpoints: pathlib.Path, patience_s: float):
        self._checkpoints, self._patience_s = checkpoints, patience_s
        self._fault_began: float | None = None  # when the first of the last starts died of storage or network
        self._newest = self._latest()
        self._died_at: set[int] = set()
        self.met: float | None = None  # when all processes of the run were last seen at work
        self.newer = self.again = False

    def note(self, death: Death) -> None:
        """Notes how a start ended."""
        newest, now, step = self._latest(), time.monotonic(), death.step
        self.newer = newest > self._newest
        if self.newer:
            self._newest, self._died_at = newest, set()
        if self.newer or death.activity != clock.START:
            self.met = now
        if death.fault:
            self._fault_began = now if self._fault_began is None else self._fault_began
            self.again = now - self._fault_began > self._patience_s
            return
        self._fault_began = None
        self.again = step in self._died_at
        self._died_at.add(step)

    def _latest(self) -> int:
        """The newest checkpoint's step; -1 if there is none, or if the storage does not answer."""

        def find() -> int:
            return max((int(p.name) for p in self._checkpoints.iterdir() if files.is_step(p.name)), default=-1)

        found = within(10.0, find)
        return -1 if found is None else found


def within(seconds: float, action: Callable[[], typing.Any]) -> typing.Any:
    """Returns what `action` returns; None if the storage fails, or does not answer in time."""
    with contextlib.suppress(OSError, files.NoAnswer):
        return files.within(seconds, action)
    return None
