"""Runs training as a child process, and starts it again after a crash or a hang. Imports no JAX.

It judges by progress: training that dies twice at the same step, without a newer checkpoint in between, would die there
again and again. Training that ended by its own decision (exit codes 0, 2, 3, 4) is never started again. `checkpoints/store.py`
chooses the checkpoint from which a start goes on.
"""

import contextlib
import dataclasses
import functools
import itertools
import os
import pathlib
import pickle
import signal
import sys
import threading
import time
import typing
from collections.abc import Callable, Collection, Iterator, Sequence

from jaxlm.config import Config, ConfigError
from jaxlm.host import console, files, interrupts, screen
from jaxlm.run import clock, ledger, supervised
from jaxlm.run.checkpoints import keep
from jaxlm.run.survive import children, farewell, notify

# Programs that set one of these restart a job by themselves.
_OTHERS = ("SLURM_JOB_ID", "SKYPILOT_TASK_ID", "KUBERNETES_SERVICE_HOST")
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_READ_S = 10.0  # for the storage to answer
_ROOM_S = 300.0  # for the disk to take as many bytes as a checkpoint has
_MEETING_S = 3600.0  # for how long the processes of a run may take to meet again
_FINAL = (0, 2, 3, 4)
_AGAIN = "; the same command goes on"


def run(config: Config, program: Callable[[], int]) -> int:
    """Trains in a child process, or by `program` in this process; then calls `say_farewell`, and returns the exit code.

    Signals may still be held (`interrupts`): the supervisor releases them when it trains in a child; else `program` does.
    """
    notify.check(config.notify)
    again = command()
    if again and wanted(config.runs.supervise):
        supervisor = Supervisor(again, config, functools.partial(notify.tell, config.notify, workdir=config.workdir))
        with signals([supervisor]):  # further signals of the request that ended the run must not stop the farewell
            return _farewell(config, supervisor.run(), supervisor.start, supervisor.requests.first)
    _ask_for_notices(config.runs.notices)
    start, code = farewell.Start(None if _several(config) else os.getpid(), time.time()), 1
    lock = _lock(config)  # raises ConfigError if another start trains there: then no farewell
    try:
        with _handed_down(lock):
            code = program()
    except ConfigError:
        code = 2
        raise
    except KeyboardInterrupt:
        code = 4
        raise
    finally:
        _farewell(config, code, start, supervised.requests.first)
    return code


def _farewell(config: Config, code: int, start: farewell.Start, signalled: int | None) -> int:
    """Calls `say_farewell`, unless the run was refused because another start trains in its folder; returns `code`."""

    def another_trains() -> bool:
        try:
            ledger.lock(pathlib.Path(config.workdir)).close()
        except ConfigError:
            return True
        return False

    refused = code == 2 and config.workdir
    if not refused or not children.within(files.ENDING_S + farewell.READ_S, another_trains):
        farewell.say_farewell(config, code, start, signalled)
    return code


def _several(config: Config) -> bool:
    return config.distributed.num_processes > 1 or config.distributed.auto


def _lock(config: Config) -> typing.IO[str] | None:
    """Returns the lock on the run's folder; None if another process of this run locks it, or on an OSError."""
    distributed, folder = config.distributed, pathlib.Path(config.workdir)
    alone = not distributed.auto and (not distributed.coordinator or distributed.process_id == 0)
    if config.workdir and alone:
        with contextlib.suppress(OSError):  # the training itself will say what is wrong
            folder.mkdir(parents=True, exist_ok=True)
            return ledger.lock(folder)
    return None


@contextlib.contextmanager
def _handed_down(lock: typing.IO[str] | None) -> Iterator[None]:
    """Hands the lock to the training in this process; closes it in the end."""
    with lock or contextlib.nullcontext():
        if lock:
            os.environ[files.HANDED_DOWN] = str(lock.fileno())
        try:
            yield
        finally:
            os.environ.pop(files.HANDED_DOWN, None)


def wanted(supervise: str) -> bool:
    """True if training runs under a supervisor here, by `runs.supervise`. Raises ConfigError if it can't."""
    if supervise == "on" and sys.platform != "linux":
        raise ConfigError("config.runs.supervise=on needs Linux; set it to auto or off")
    return supervise == "on" or (supervise == "auto" and sys.platform == "linux" and not _others_start_again())


def _others_start_again() -> bool:
    return any(os.environ.get(name) for name in _OTHERS)


@dataclasses.dataclass(frozen=True)
class Times:
    """The seconds that the supervisor waits; tests wait less."""

    look: float = 1.0  # between two looks at the child
    still: float = 10.0  # after a request to stop: until the user is told what the run waits for
    at_once: float = 3.0  # after a second request to stop, or the first while the run compiles with nothing to save
    stacks: float = 2.0  # for a process to write its stacks
    term: float = 20.0  # for a hanging process to end after SIGTERM
    kill: float = 30.0  # for the kernel to end it after SIGKILL
    patience: float = 1800.0  # for how long deaths by storage or network are retried


@dataclasses.dataclass(eq=False)
class Supervisor:
    """One run of `jaxlm train`, with all its starts. `tell` gets "crash" or "stall" and a line.

    `output`: a file to which the children print, if this process has more runs than this one.
    """

    command: Sequence[str]
    config: Config
    tell: Callable[[str, str], None] = lambda event, text: None
    times: Times = Times()
    output: pathlib.Path | None = None

    def __post_init__(self):
        c, self._folder, self._several = self.config, pathlib.Path(self.config.workdir), _several(self.config)
        meeting_s = c.distributed.start_timeout_s if self._several else 0.0
        mirror_s, rewards_s = c.checkpoint.mirror_timeout_s, c.reward.timeout_s
        self._hangs = children.Watch(c.runs.hang_s, c.data.timeout_s, mirror_s, meeting_s, rewards_s)
        self._child: children.Child | None = None
        self.requests = supervised.Requests()
        self._at_once: float | None = None  # when the user asked to stop at once
        self.over = False
        self._woken = threading.Event()
        self._since = time.monotonic()  # from here the time of the next start counts
        self._hung = 0.0  # for how long the last child hung
        self.start = farewell.Start(None, time.time())  # the last one

    def run(self) -> int:
        """Trains, with restarts, until there is no reason for another; returns the exit code."""
        progress, failures = children.Progress(self._folder / "checkpoints", self.times.patience), 0
        screen.share()
        with contextlib.ExitStack() as stack:
            if threading.current_thread() is threading.main_thread():  # else that thread passes them on
                stack.enter_context(signals([self]))
            # The lock is held between the starts too: another command must not train there meanwhile.
            if lock := _lock(self.config):
                stack.callback(lock.close)
                if not self.output:  # else this process has other runs
                    console.keep(self._folder / console.LOG)
            stack.callback(_ask_for_notices(self.config.runs.notices))
            place = children.within(_READ_S, lambda: os.stat(self._folder))
            stack.callback(setattr, self, "over", True)
            while True:
                death = self._one_start(lock)
                if death.code in _FINAL and not death.hung:
                    return death.code
                if death.stuck:
                    return 1
                if self.requests.came:
                    return self._stopped(death)
                if place and children.within(_READ_S, lambda: files.moved(self._folder, place)):
                    if death.code != 1:  # else the child said so itself
                        self._say(f"{death.words()}; {self._folder} was moved or deleted: not started again")
                    return 1
                progress.note(death)
                failures = 1 if progress.newer else failures + 1
                if not self._may_go_on(death, progress):
                    return death.code if death.code > 0 else 1
                if not self._wait(death, failures):
                    return 4

    def _one_start(self, lock: typing.IO[str] | None) -> children.Death:
        """Starts the child, watches it until it ends, ends processes that it leaves behind; returns how it ended."""
        began = time.time()
        # The child gets the config as it was read, so that an edited file changes nothing, and the lock.
        passed = {supervised.CONFIG: os.memfd_create("jaxlm-config")}
        os.write(passed[supervised.CONFIG], pickle.dumps(self.config))
        if lock:
            passed[files.HANDED_DOWN] = os.dup(lock.fileno())
        environment = {supervised.SINCE: repr(self._since), supervised.LOST: f"{self._hung:.3f}"}
        with open(self.output, "ab") if self.output else contextlib.nullcontext() as output:
            child = children.Child(self.command, environment, passed, output)
        self._hangs.begin(time.monotonic())
        self._child, self.start = child, farewell.Start(None if self._several else child.pid, began)
        if self.requests.came:  # a signal that came just now
            child.send(signal.SIGTERM)
        self._hung = self._watch(child)
        sign, self._child = child.sign(), None  # before `reap`: no signal may reach another process of its number
        if not child.ended():
            self._say(
                f"process {child.pid} of the run can't be ended: it waits inside the kernel, for a disk or a device. "
                "End it, or start this machine again, then give the same command"
            )
            return children.Death(1, sign.step, sign.activity, self._hung, stuck=True)
        code = child.reap()
        fault = sign.detail == clock.FAULT and not sign.step and not _others_start_again()
        death = children.Death(code, sign.step, sign.activity, self._hung, child.out_of_memory, fault=fault)
        ended = {"step": sign.step, "code": code, "why": death.words(), "pid": child.pid, "hung": death.hung > 0}
        children.within(_READ_S, lambda: ledger.end(self._folder, **ended))
        return death

    def _watch(self, child: children.Child) -> float:
        """Waits for the child's end, and ends it if it hangs; returns the seconds that it hung."""
        times, told_so = self.times, False
        while not child.ended(times.look):
            now, sign = time.monotonic(), child.sign()
            used = child.processor_s() if sign.activity in children.BY_PROCESSOR else 0.0
            if self._hangs.look(sign, now, used) > 0:
                return self._end_hung(child, sign, now)
            if self._at_once is not None and now > self._at_once + times.at_once:
                child.kill(times.kill)
                return 0.0
            if not self.requests.came:
                continue
            waited, compiles = now - self.requests.came[0][1], sign.activity == clock.COMPILE
            # XLA ignores signals, and before the first step there is nothing to save. Of several processes none ends alone:
            # that would make the others start again.
            if _nothing_to_save(sign) and not (compiles and self._several):
                if compiles and not told_so:
                    self._say("stopping: no step is done yet, so nothing is to be saved")
                    told_so = True
                if waited > (times.at_once if compiles else times.still):
                    child.kill(times.kill)
                    return 0.0
            elif waited > times.still and not told_so:
                self._say(f"still stopping: it waits for {sign.waits_for()}; again to stop at once")
                told_so = True
        return 0.0

    def _end_hung(self, child: children.Child, sign: children.Sign, now: float) -> float:
        """Says what a hanging child waits for, shows its threads' stacks, ends it; returns the seconds that it hung."""
        since = max(sign.when, child.started)
        words = f"no sign of life for {_duration(now - since)}: it waits for {sign.waits_for()}"
        self._say(words)
        stacks = child.stacks(self.times.stacks)
        self._say("\n".join(["where its main thread stands:", *children.main_thread(stacks)]))
        # In case the disk hangs: with a time-out.
        if path := children.within(_READ_S, lambda: _keep_stacks(self._folder, words, stacks)):
            self._say(f"the stacks of all its threads are in {path}")
        self.tell("stall", words)
        # JAX passes SIGTERM on to the other processes, which would end for good.
        if not self._several:
            child.send(signal.SIGTERM)
            child.ended(self.times.term)
        child.kill(self.times.kill)
        return time.monotonic() - since

    def _may_go_on(self, death: children.Death, progress: children.Progress) -> bool:
        """Returns False, and says why, if another start would not get further."""
        if self._several and death.activity == clock.START and not death.fault:
            if progress.met is not None and time.monotonic() < progress.met + _MEETING_S:
                return True  # the other processes come back when their own supervisors notice
            self._say(f"{death.words()}, before all processes of the run had met; not started again")
            return False
        # A finished run that could not be saved would repeat its last steps for nothing.
        checkpoints, finished = self._folder / "checkpoints", death.code == 1 and death.step >= self.config.train.steps
        if finished and children.within(2 * _ROOM_S, lambda: keep.is_full(checkpoints, _ROOM_S)):
            self._say(f"{death.words()}, and another checkpoint does not fit in {self._folder}: free some room{_AGAIN}")
            return False
        if progress.again:
            why = "storage or network failed for too long" if death.fault else "no checkpoint was saved in between"
            words = f"{death.words()}, as before, and {why}: not started again"
            self._say(words)
            self.tell("crash", words)
        return not progress.again

    def _wait(self, death: children.Death, failures: int) -> bool:
        """Waits before the next start; False if a signal came meanwhile."""
        delay = children.backoff(self.config.runs.backoff_s, failures)
        peers = self.config.distributed.num_processes > 1 and death.code == -signal.SIGABRT
        why = " (another process of the run died or froze)" if peers else ""
        words = f"{death.words()}{why}; starting again from the last checkpoint in {_duration(delay)}"
        self._say(words)
        if not death.hung:  # `_end_hung` told of a hang
            self.tell("crash", words)
        self._woken.wait(delay)
        if self.requests.came:
            self._say(f"stopped between two starts{_AGAIN}")
        self._since = time.monotonic()
        return not self.requests.came

    def _stopped(self, death: children.Death) -> int:
        """Returns the exit code of a run that was asked to stop, and did not end with its state saved."""
        if death.code < 0 and _nothing_to_save(death) and not death.hung:
            self._say(f"stopped before training began{_AGAIN}")
            return 4
        if death.code < 0 or death.hung:
            self._say(f"stopped at once; what came after the last checkpoint is not saved{_AGAIN}")
        return death.code if death.code > 0 and not death.hung else 1

    def on_signal(self, number: int) -> None:
        """Passes a signal of this process on to the child. Raises KeyboardInterrupt for a request to stop after the end."""
        if number == signal.SIGUSR1:
            if self._child:
                threading.Thread(target=self._show_stacks, args=(self._child,), daemon=True).start()
            return
        meaning = self.requests.note(number)
        again = meaning == supervised.AGAIN
        self._woken.set()
        if self.over and (again or number == signal.SIGINT):
            raise KeyboardInterrupt
        if again:
            self._at_once = self._at_once or time.monotonic()
        if self._child and meaning != supervised.SAME:
            self._child.send(signal.SIGINT if again else number)

    def _show_stacks(self, child: children.Child) -> None:
        with contextlib.suppress(OSError):  # it ended meanwhile
            stacks = child.stacks(self.times.stacks)
            self._say(f"it waits for {child.sign().waits_for()}; the stacks of all its threads:\n{stacks}")

    def send_all(self, number: int) -> None:
        """Sends a signal to the child and all that it started."""
        if self._child:
            self._child.send_all(number)

    def _say(self, text: str) -> None:
        _say(f"{self._folder.name}: {text}" if self.output else text)


@contextlib.contextmanager
def signals(supervisors: Collection[Supervisor]) -> Iterator[list[int]]:
    """Passes signals on to the children, which are in process groups of their own: the terminal reaches only this process.

    Yields the list of the requests to stop that came so far: a child that just ended takes none.

    After the end of `run`, ctrl-C and a request to stop at once raise KeyboardInterrupt; with no supervisor each request does.
    """
    came: list[int] = []

    def on_signal(number: int, frame: typing.Any) -> None:
        came.extend([number] * (number != signal.SIGUSR1))
        for each in [each for each in supervisors if not each.over] or [*supervisors]:
            each.on_signal(number)
        if not supervisors and number != signal.SIGUSR1:
            raise KeyboardInterrupt

    def on_pause(number: int, frame: typing.Any) -> None:
        """On ctrl-Z, stops and later continues the children together with this process."""
        for each in supervisors:
            each.send_all(signal.SIGSTOP)
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)  # this process stops here, until `fg`
        signal.signal(signal.SIGTSTP, on_pause)
        for each in supervisors:
            each.send_all(signal.SIGCONT)

    handlers: dict[int, typing.Any] = dict.fromkeys(_FORWARDED, on_signal) | {signal.SIGTSTP: on_pause}
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        del handlers[signal.SIGHUP]  # nohup; the child inherits that
    interrupts.release()
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _nothing_to_save(last: children.Sign | children.Death) -> bool:
    begins = last.activity in (clock.MIRROR, clock.COMPILE) and not last.step  # of this start
    return last.activity in (clock.START, clock.RESTORE) or begins


def _keep_stacks(folder: pathlib.Path, words: str, stacks: str) -> pathlib.Path:
    for number in itertools.count(1):
        path = folder / f"hang-{number}.txt"
        with contextlib.suppress(FileExistsError), path.open("x") as file:
            file.write(f"{words}\n\n{stacks}")
            return path


def _duration(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _ask_for_notices(clouds: Sequence[str]) -> Callable[[], None]:
    """Makes a cloud's notice stop this process as SIGTERM does. Returns a function that stops the asking."""

    def stop() -> None:
        supervised.announced = True
        os.kill(os.getpid(), signal.SIGTERM)

    return farewell.watch_for_notices(clouds, stop, _say)


def _say(text: str) -> None:
    console.say(f"jaxlm: {text}")


def command() -> list[str] | None:
    """Returns the command that starts this program again; None if it runs inside another program, which changed `sys.argv`."""
    arguments, whole = sys.argv[1:], sys.orig_argv
    return [sys.executable, *whole[1:]] if whole[len(whole) - len(arguments) :] == arguments else None
