"""How training ended under the supervisor, and whether another start would get further."""

import contextlib
import dataclasses
import pathlib
import signal
import threading
import time
import typing
from collections.abc import Callable

from jaxlm.files import is_step
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
    """

    code: int
    step: int
    activity: str
    hung: float = 0.0
    out_of_memory: bool = False
    stuck: bool = False

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
    """What the starts so far achieved, judged by their checkpoints and the steps at which they died."""

    def __init__(self, checkpoints: pathlib.Path):
        self._checkpoints = checkpoints
        self._newest = self._latest()
        self._died_at: set[int] = set()
        self.met: float | None = None  # when all processes of the run were last seen at work
        self.newer = self.again = False

    def note(self, step: int, activity: str) -> None:
        """Notes a death after `step`, which came during `activity`."""
        newest = self._latest()
        self.newer = newest > self._newest
        if self.newer:
            self._newest, self._died_at = newest, set()
        if self.newer or activity != clock.START:
            self.met = time.monotonic()
        self.again = step in self._died_at
        self._died_at.add(step)

    def _latest(self) -> int:
        """The newest checkpoint's step; -1 if there is none, or if the storage does not answer."""

        def find() -> int:
            return max((int(p.name) for p in self._checkpoints.iterdir() if is_step(p.name)), default=-1)

        found = within(10.0, find)
        return -1 if found is None else found


def within(seconds: float, action: Callable[[], typing.Any]) -> typing.Any:
    """Returns what `action` returns; None if it fails, or takes longer, as on storage that hangs."""
    found: list = []

    def act() -> None:
        with contextlib.suppress(OSError):
            found.append(action())

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None
