"""A child process of the supervisor: in a process group of its own, with a pulse, and ended for certain."""

import contextlib
import os
import pathlib
import select
import signal
import subprocess
import time
import typing
from collections.abc import Mapping, Sequence

from jaxlm.train import clock, hangs, supervised

_TICKS = os.sysconf("SC_CLK_TCK")
_STACK_LINES = 12
_TRACKERS_S = 2.0  # Python's resource tracker needs them to remove shared memory that its processes left


class Child:
    """Starts a process.

    Args:
      command: what to start.
      environment: variables to add to those of this process.
      passed: variable -> file descriptor to pass on, whose number the variable names. They are closed here.
      output: a file that takes what it says and prints; None: where this process does.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        passed: Mapping[str, int],
        output: typing.IO[bytes] | None = None,
    ):
        self._pulse, pulse = clock.Pulse.create()
        self._stacks = os.memfd_create("jaxlm-stacks")
        passed = {**passed, clock.PULSE: pulse}
        variables = {name: str(fd) for name, fd in passed.items()} | {supervised.STACKS: str(self._stacks)}
        variables |= {supervised.PARENT: str(os.getpid()), **environment}
        self._killed_before = _out_of_memory_kills()
        self.started = time.monotonic()
        # A ctrl-C in its first moments waits until `supervised.adopt`: before, it would end in a traceback of Python's.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process = subprocess.Popen(
                command,
                env=os.environ | variables,
                process_group=0,
                pass_fds=[*passed.values(), self._stacks],
                stdout=output,
                stderr=output,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            for descriptor in passed.values():
                os.close(descriptor)
        self.pid = self._process.pid
        self._ended = os.pidfd_open(self.pid)
        self._last = hangs.Sign(0, self.started)

    @property
    def out_of_memory(self) -> bool:
        """True if the kernel killed a process of this container for want of memory since the start."""
        return _out_of_memory_kills() > self._killed_before

    def ended(self, timeout_s: float) -> bool:
        """Waits for the end, at most this long; returns True if the process has ended."""
        return bool(select.select([self._ended], [], [], timeout_s)[0])

    def alive(self) -> bool:
        """True if the process has not ended."""
        return not self.ended(0)

    def wait(self, timeout_s: float) -> None:
        """Waits for the end, at most this long."""
        self.ended(timeout_s)

    def sign(self) -> hangs.Sign:
        """Returns the last sign of life; the start itself before the first one."""
        if found := self._pulse.read():
            self._last = hangs.Sign(*found)
        return self._last

    def send(self, number: int) -> None:
        """Sends a signal to the process."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._ended, number)

    def send_all(self, number: int) -> None:
        """Sends a signal to the process and all that it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def kill(self, timeout_s: float) -> None:
        """Kills the process and all that it started, and waits for its end, at most this long."""
        if self.alive():
            self.send_all(signal.SIGKILL)
            self.wait(timeout_s)

    def reap(self) -> int:
        """Returns the exit code, below 0 the signal, of a process that has ended, and ends what it left behind."""
        # It is not waited for yet, so that no other process can have the number of its group.
        self.send_all(signal.SIGTERM)
        end = time.monotonic() + _TRACKERS_S
        while self._group() and time.monotonic() < end:
            time.sleep(0.05)
        self.send_all(signal.SIGKILL)
        code = self._process.wait()
        os.close(self._ended)
        os.close(self._stacks)
        return code

    def processor_s(self) -> float:
        """Returns the seconds of processor time that the process and all that it started have used."""
        used = 0.0
        for pid in self._group():
            with contextlib.suppress(OSError, IndexError):
                fields = _stat(pid)
                used += sum(map(int, fields[11:15])) / _TICKS  # in user and kernel, its ended children's as well
        return used

    def stacks(self, timeout_s: float) -> str:
        """Returns the stacks of all threads, which the process writes itself, also while it hangs; "" if it can't."""
        first = size = os.fstat(self._stacks).st_size
        self.send(signal.SIGCONT)  # one that was stopped can't tell
        self.send(signal.SIGUSR1)
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            time.sleep(0.1)
            before, size = size, os.fstat(self._stacks).st_size
            if size == before > first:  # it has written all
                break
        return os.pread(self._stacks, size - first, first).decode("utf-8", "replace")

    def _group(self) -> list[str]:
        """The processes of the group that have not ended."""
        found = []
        for pid in filter(str.isdecimal, os.listdir("/proc")):
            with contextlib.suppress(OSError, IndexError):
                state, _, group = _stat(pid)[:3]
                if group == str(self.pid) and state != "Z":
                    found.append(pid)
        return found


def main_thread(stacks: str) -> list[str]:
    """Returns the top of the main thread's stack: the last that faulthandler writes, its latest call first."""
    lines = stacks.rstrip().splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith(("Thread ", "Current thread "))]
    return lines[starts[-1] :][:_STACK_LINES] if starts else ["it does not answer"]


def _stat(pid: str) -> list[str]:
    """The fields of /proc/PID/stat from the third on: the name before them may hold blanks."""
    return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _out_of_memory_kills() -> int:
    with contextlib.suppress(OSError, ValueError):
        for line in pathlib.Path("/sys/fs/cgroup/memory.events").read_text().splitlines():
            name, _, number = line.partition(" ")
            if name == "oom_kill":
                return int(number)
    return 0
