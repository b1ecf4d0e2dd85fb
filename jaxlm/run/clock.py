"""Divides the wall time of a run into activities, and shows the supervisor what the run does right now.

Every second belongs to exactly one activity, so the activities add up to the wall time ("goodput" is the share of
STEP and ROLLOUT).
"""

import contextlib
import mmap
import os
import struct
import time
from collections.abc import Iterator

START = "start"  # processes, data, folders, until the first step
RESTORE = "restore"  # reading a checkpoint
COMPILE = "compile"  # compiling the train step, and its first call
DATA = "data"  # waiting for a batch
ROLLOUT = "rollout"  # drawing answers from the policy, and their rewards
STEP = "step"  # productive: steps that nobody has done before
REPEATED = "repeated"  # steps that an earlier start did and lost
EVALUATE = "evaluate"  # held-out loss, benchmarks, samples, reports
SAVE = "save"  # the loop stands still for a checkpoint
MIRROR = "mirror"  # waiting for the mirror, at the start and at the end
DOWN = "down"  # from the death of a start to the next one, on the same machine
HUNG = "hung"  # no sign of life, until the supervisor ended it
ACTIVITIES = (START, RESTORE, COMPILE, DATA, ROLLOUT, STEP, REPEATED, EVALUATE, SAVE, MIRROR, DOWN, HUNG)

FAULT = "a fault of the storage or the network"  # the detail of a start's last sign, if such a fault ends it

NOUNS = {
    START: "start",
    RESTORE: "restore",
    COMPILE: "compilation",
    DATA: "batch",
    ROLLOUT: "round of answers and rewards",
    EVALUATE: "evaluation",
    SAVE: "save",
    MIRROR: "exchange with the mirror",
    "samples": "samples",  # a hook's name says more than its activity
}

PULSE = "JAXLM_PULSE"  # the environment variable that names the file descriptor of a Pulse


class Pulse:
    """Memory that two processes share: the run writes its step, activity and the time; the supervisor reads them.

    It is no file on disk, so that the supervisor learns the activity even while the disk hangs.
    """

    _FORMAT = struct.Struct("=Qqd32s96s")  # version (odd while it is written), step, monotonic time, activity, detail
    SIZE = _FORMAT.size

    def __init__(self, descriptor: int):
        self._memory = mmap.mmap(descriptor, self.SIZE)
        self._version = 0

    @classmethod
    def create(cls) -> tuple["Pulse", int]:
        """Returns a new pulse, and the file descriptor to pass on to the child (Linux)."""
        descriptor = os.memfd_create("jaxlm-pulse", 0)
        os.ftruncate(descriptor, cls.SIZE)
        return cls(descriptor), descriptor

    @classmethod
    def of_parent(cls) -> "Pulse | None":
        """Returns the pulse that the supervisor reads; None without a supervisor."""
        descriptor = os.environ.get(PULSE, "")
        return cls(int(descriptor)) if descriptor else None

    def write(self, step: int, activity: str, detail: str = "") -> None:
        """Writes that the run is alive after `step` and begins `activity`. `detail`: the path or shard that it waits for."""
        self._version += 2
        words = activity.encode()[:32], detail.encode()[:96]
        self._memory[: self.SIZE] = self._FORMAT.pack(self._version - 1, step, time.monotonic(), *words)
        self._memory[:8] = struct.pack("=Q", self._version)

    def read(self) -> tuple[int, float, str, str] | None:
        """Returns (step, `time.monotonic()` of the last sign of life, activity, detail); None before or during a write."""
        version, step, when, activity, detail = self._FORMAT.unpack(self._memory[: self.SIZE])
        if not version or version % 2:
            return None
        return step, when, *(raw.rstrip(b"\0").decode("utf-8", "ignore") for raw in (activity, detail))


class Clock:
    """Counts the seconds of each activity, over all starts of a run.

    Attributes:
      redo: the last step that was done already; steps up to it count as REPEATED.
    """

    def __init__(self, pulse: Pulse | None = None, since: float | None = None):
        self._seconds = dict.fromkeys(ACTIVITIES, 0.0)
        self._mark = time.monotonic() if since is None else since
        self.activity, self._pulse, self._detail = START, pulse, ""
        self._spells: dict[str, list[float]] = {}  # detail -> seconds of each `spend`
        self.began = self._mark
        self.step = self.redo = 0
        self._show()

    def begin(self, activity: str, detail: str = "") -> None:
        now = time.monotonic()
        self._seconds[self.activity] += now - self._mark
        self._mark, self.activity, self._detail = now, activity, detail
        self._show()

    @contextlib.contextmanager
    def spend(self, activity: str, detail: str = "") -> Iterator[None]:
        """Counts the time in the `with` block as `activity`, then resumes the previous activity."""
        before, began = self.activity, time.monotonic()
        self.begin(activity, detail)
        try:
            yield
        finally:
            self.begin(before)
            if detail:
                self._spells.setdefault(detail, []).append(time.monotonic() - began)

    def usual_s(self, detail: str) -> float:
        """Returns the mean seconds of `spend` with this detail; 0 if none. The first, which compiled, counts only if alone."""
        spells = self._spells.get(detail, [0.0])
        counted = spells[1:] or spells
        return sum(counted) / len(counted)

    def doing(self) -> str:
        """Returns what the run does besides training, such as "evaluation"; "" for nothing."""
        return "" if self.activity == DATA else NOUNS.get(self._detail) or NOUNS.get(self.activity, "")

    def after(self, step: int) -> None:
        """Notes that `step` was sent to the device. From now on time counts as STEP, or as REPEATED for a repeated step."""
        self.step = step
        self.begin(REPEATED if step <= self.redo else STEP)
        self.redo = max(step, self.redo)  # for a rollback within this start

    def add(self, activity: str, seconds: float) -> None:
        """Counts seconds that passed outside this process, such as the time since an earlier start died."""
        self._seconds[activity] += seconds

    def seconds(self) -> dict[str, float]:
        return self._seconds | {self.activity: self._seconds[self.activity] + time.monotonic() - self._mark}

    def _show(self) -> None:
        if self._pulse:
            self._pulse.write(self.step, self.activity, self._detail)
