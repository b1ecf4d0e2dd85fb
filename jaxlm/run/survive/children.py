"""Watches the training under the supervisor: whether it hangs, how it died, and whether another start would get further.

A false alarm costs a restart, a missed hang costs rent. So the allowed silences, learned from the run's times, are long.
"""

import collections
import contextlib
import dataclasses
import os
import pathlib
import select
import signal
import statistics
import subprocess
import time
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence

from jaxlm.host import files
from jaxlm.run import clock, supervised

_TICKS = os.sysconf("SC_CLK_TCK")
_STACK_LINES = 12
_TRACKERS_S = 2.0  # Python's resource tracker needs them to remove shared memory that its processes left
_READ_S = 10.0  # for the storage to list the checkpoints
_LONGEST_WAIT_S = 300.0  # between two starts


MINUTE = 60.0
_FIRST = 60 * MINUTE  # until the run's own times are known
_FIRST_STEP = 30 * MINUTE
_MEETS = 30.0  # for this process to end after its wait for other processes
_STEPS_TO_LEARN = 20
_STEPS_KEPT = 200
_BUSY = 0.05  # seconds of processor time in a second: more than the threads of an idle JAX take
_STEPS = (clock.STEP, clock.REPEATED)
# Preparing data at the start, and compiling, may take any time: use of the processor shows that they are alive.
BY_PROCESSOR = (clock.START, clock.COMPILE)


@dataclasses.dataclass(frozen=True)
class Sign:
    """A sign of life: at `when` (`time.monotonic()`), after `step`, the run began the `activity`; see `clock.Pulse`."""

    step: int = 0
    when: float = 0.0
    activity: str = clock.START
    detail: str = ""

    def waits_for(self) -> str:
        """Returns words for the user on the activity that the run waits for: "the save (RUN/checkpoints/200)"."""
        words = clock.NOUNS.get(self.activity, f"device, in step {self.step + 1}")
        return f"the {words}" + (f" ({self.detail})" if self.detail else "")


@dataclasses.dataclass
class Watch:
    """Learns how long each activity takes, and tells when an activity takes too long.

    `hang_s`: the seconds of silence that are a hang (in a start or compilation: without use of the processor); 0: learned. The
    other arguments are the time-outs of the loader, the mirror, the wait for other processes (0 without any) and a reward.
    """

    hang_s: float
    data_timeout_s: float
    mirror_timeout_s: float
    meeting_s: float
    reward_timeout_s: float = 0.0

    def __post_init__(self):
        self._longest: dict[str, float] = {}
        self._steps: collections.deque[float] = collections.deque(maxlen=_STEPS_KEPT)
        self.begin(0.0)

    def begin(self, now: float) -> None:
        """Begins to watch a new process at `now`; keeps the times learned from the previous process."""
        self._sign: Sign | None = None
        self._busy_at, self._used_s = now, 0.0  # when the child was last seen busy, and the processor time used by then
        self._looked = self._not_before = now

    def look(self, sign: Sign, now: float, processor_s: float = 0.0) -> float:
        """Returns by how many seconds the run's silence exceeds its budget; below 0 while it is alive."""
        if now - self._looked > MINUTE:
            self._not_before = now  # this process itself did not run: what happened meanwhile is unknown
        self._looked = now
        if self._sign and sign.when > self._sign.when:
            seconds, kind = sign.when - max(self._sign.when, self._not_before), _kind(self._sign)
            self._longest[kind] = max(self._longest.get(kind, 0.0), seconds)
            if self._sign.activity in _STEPS:
                self._steps.append(seconds)
        self._sign = sign
        self._used_s = min(self._used_s, processor_s)  # the time of a worker that ended is no longer counted
        if processor_s - self._used_s > _BUSY * (now - self._busy_at) or sign.activity not in BY_PROCESSOR:
            self._busy_at, self._used_s = now, processor_s
        alive = max(sign.when, self._not_before)
        if sign.activity in BY_PROCESSOR:
            alive = max(alive, self._busy_at)
        return now - alive - self.budget(sign)

    def budget(self, sign: Sign) -> float:
        """Returns for how many seconds a run may be silent after this sign of life."""
        activity, longest = sign.activity, self._longest.get(_kind(sign), 0.0)
        if activity == clock.MIRROR:  # the mirror has its own time-out
            return max(self.hang_s or _FIRST, self.mirror_timeout_s + 2 * MINUTE)
        if self.hang_s:
            meets = self.meeting_s and activity == clock.START
            return max(self.hang_s, self.meeting_s + _MEETS) if meets else self.hang_s
        if activity == clock.DATA:
            return 2 * self.data_timeout_s + 2 * MINUTE
        if activity in _STEPS:
            known = len(self._steps) >= _STEPS_TO_LEARN
            return max(2 * MINUTE, 20 * statistics.median(self._steps), 3 * longest) if known else _FIRST_STEP
        # A start may prepare data or not, and compile from a cache or not: earlier times say too little.
        known = longest and activity in (clock.ROLLOUT, clock.EVALUATE, clock.SAVE)
        rewards = 3 * self.reward_timeout_s if activity == clock.ROLLOUT else 0.0  # a reward is tried three times
        return rewards + max(10 * MINUTE if known else _FIRST, 10 * longest)


def _kind(sign: Sign) -> str:
    """Returns the name under which durations are learned: the activity, for an evaluation with its detail if without digits."""
    if sign.activity in _STEPS:
        return clock.STEP
    same = sign.activity == clock.EVALUATE and not any(c.isdigit() for c in sign.detail)
    return f"{sign.activity} {sign.detail}" if same else sign.activity


class Child:
    """A child in its own process group, with a `Pulse`. `passed`: variable -> file descriptor to hand down and close here."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        passed: Mapping[str, int],
        output: typing.IO[bytes] | None = None,
    ):
        self._pulse, pulse = clock.Pulse.create()
        self._stacks = os.memfd_create("jaxlm-stacks")
        passed = {**passed, clock.PULSE: pulse, supervised.STACKS: os.dup(self._stacks)}
        numbers = {name: str(descriptor) for name, descriptor in passed.items()}
        self._killed_before = _out_of_memory_kills()
        self.started = time.monotonic()
        # A ctrl-C in its first moments waits until `supervised.adopt`: before, it would end in a traceback of Python's.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, **numbers, supervised.PARENT: str(os.getpid()), **environment},
                process_group=0,
                pass_fds=[*passed.values()],
                stdout=output,
                stderr=output,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            for descriptor in passed.values():
                os.close(descriptor)
        self.pid = self._process.pid
        self._ended = os.pidfd_open(self.pid)
        self._last = Sign(0, self.started)

    @property
    def out_of_memory(self) -> bool:
        """True if the kernel killed a process of this container for lack of memory since the start."""
        return _out_of_memory_kills() > self._killed_before

    def ended(self, timeout_s: float = 0.0) -> bool:
        """Waits up to `timeout_s` for the end; returns True if the process has ended."""
        return bool(select.select([self._ended], [], [], timeout_s)[0])

    def sign(self) -> Sign:
        """Returns the last sign of life; before the first, the start of the process."""
        if sign := self._pulse.read():
            self._last = Sign(*sign)
        return self._last

    def send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._ended, number)

    def send_all(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def kill(self, timeout_s: float) -> None:
        if not self.ended():
            self.send_all(signal.SIGKILL)
            self.ended(timeout_s)

    def reap(self) -> int:
        """Returns the exit code of the ended process (below 0: the signal), and ends processes that it left behind."""
        # The process is not waited for yet, so that no other process can get its group's number.
        self.send_all(signal.SIGTERM)
        end = time.monotonic() + _TRACKERS_S
        while any(self._group()) and time.monotonic() < end:
            time.sleep(0.05)
        self.send_all(signal.SIGKILL)
        code = self._process.wait()
        os.close(self._ended)
        os.close(self._stacks)
        return code

    def processor_s(self) -> float:
        """Returns the seconds of processor time that the process and all that it started have used."""
        # In user and kernel mode, its ended children's as well: see proc(5), utime to cstime.
        return sum(sum(map(int, fields[11:15])) for fields in self._group()) / _TICKS

    def stacks(self, timeout_s: float) -> str:
        """Returns the stacks of all threads, which the process writes itself, even while it hangs; "" if it can't."""
        first = size = os.fstat(self._stacks).st_size
        self.send(signal.SIGCONT)  # a stopped process can't answer
        self.send(signal.SIGUSR1)
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            time.sleep(0.1)
            before, size = size, os.fstat(self._stacks).st_size
            if size == before > first:  # the stacks are complete
                break
        return os.pread(self._stacks, size - first, first).decode("utf-8", "replace")

    def _group(self) -> Iterator[list[str]]:
        """Yields the fields of /proc/PID/stat, from the third on, of each process of the group that has not ended."""
        for pid in filter(str.isdecimal, os.listdir("/proc")):
            with contextlib.suppress(OSError, IndexError):  # it ended meanwhile
                text = pathlib.Path(f"/proc/{pid}/stat").read_text()
                fields = text.rpartition(")")[2].split()  # the name before them may hold blanks
                if fields[2] == str(self.pid) and fields[0] != "Z":
                    yield fields


def main_thread(stacks: str) -> list[str]:
    """Returns the top of the main thread's stack: faulthandler writes that stack last, its latest call first."""
    lines = stacks.rstrip().splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith(("Thread ", "Current thread "))]
    return lines[starts[-1] :][:_STACK_LINES] if starts else ["it does not answer"]


def _out_of_memory_kills() -> int:
    with contextlib.suppress(OSError, ValueError):
        events = pathlib.Path("/sys/fs/cgroup/memory.events").read_text()
        return int(dict(line.split() for line in events.splitlines()).get("oom_kill", 0))
    return 0


@dataclasses.dataclass(frozen=True)
class Death:
    """How a child ended, after which step, in which activity (`clock.ACTIVITIES`)."""

    code: int  # below 0: the signal that ended it
    step: int
    activity: str
    hung: float = 0.0  # the seconds without a sign of life, if the child was ended for that
    out_of_memory: bool = False  # the kernel ended a process for lack of memory meanwhile
    stuck: bool = False  # the child could not be ended
    fault: bool = False  # the child said that storage or network failed before its first step; nobody else restarts it

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
    """Judges whether restarts get further, by the checkpoints and by the steps at which starts died.

    `newer`: the last start left a newer checkpoint. `again`: another start would die as the last start did; deaths by storage
    or network are retried for `patience_s`. `met`: the `time.monotonic()` when all processes last worked; None if never.
    """

    def __init__(self, checkpoints: pathlib.Path, patience_s: float):
        self._checkpoints, self._patience_s = checkpoints, patience_s
        self._fault_began: float | None = None  # when the present series of deaths by storage or network began
        self._newest = self._latest()
        self._died_at: set[int] = set()  # the steps since the newest checkpoint at which a start died
        self.met: float | None = None
        self.newer = self.again = False

    def note(self, death: Death) -> None:
        newest, now = self._latest(), time.monotonic()
        self.newer = newest > self._newest
        if self.newer:
            self._newest, self._died_at = newest, set()
        if self.newer or death.activity != clock.START:
            self.met = now
        if death.fault:  # it may pass by itself: time counts, not the number of deaths
            self._fault_began = self._fault_began or now
            self.again = now - self._fault_began > self._patience_s
        else:
            self._fault_began = None
            self.again = death.step in self._died_at
            self._died_at.add(death.step)

    def _latest(self) -> int:
        """Returns the newest checkpoint's step; -1 if there is none, or if the storage does not answer."""
        names = within(_READ_S, lambda: os.listdir(self._checkpoints)) or []
        return max((int(name) for name in names if files.is_step(name)), default=-1)


def within(seconds: float, action: Callable[[], typing.Any]) -> typing.Any:
    """Returns `action()`; None if it raises OSError, or takes more than `seconds`."""
    with contextlib.suppress(OSError, files.NoAnswer):
        return files.within(seconds, action)
    return None


def backoff(first_s: float, failures: int) -> float:
    return min(first_s * 2 ** min(failures - 1, 30), _LONGEST_WAIT_S)
