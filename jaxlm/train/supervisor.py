"""Runs training as a child process, and starts it again after a crash or a hang. Imports no JAX.

The supervisor judges by progress. Training that dies twice at the same step, with no newer checkpoint in between, would
die there for ever. What ended by its own decision is never started again: done, bad input, stopped, or interrupted with
its state saved (exit codes 0, 2, 3, 4).
"""

import contextlib
import dataclasses
import itertools
import os
import pathlib
import pickle
import signal
import sys
import threading
import time
import typing
from collections.abc import Callable, Iterator, Sequence

from jaxlm import console, files, interrupts, screen
from jaxlm.config import Config, ConfigError
from jaxlm.train import children, clock, deaths, farewell, hangs, ledger, notify, supervised
from jaxlm.train.checkpoints import keep

# Whoever sets one of these starts a job again by itself.
_OTHERS = ("SLURM_JOB_ID", "SKYPILOT_TASK_ID", "KUBERNETES_SERVICE_HOST")
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_LOOK_S = 1.0  # between two looks at the child
_STILL_S = 10.0  # after a request to stop: until the user is told what it waits for
_AT_ONCE_S = 3.0  # after a second request to stop, or the first while it compiles and has nothing to save
_STACKS_S = 2.0  # for a process to write its stacks
_TERM_S, _KILL_S = 20.0, 30.0  # that a process which hangs has after SIGTERM, and the kernel after SIGKILL
_PATIENCE_S = 1800.0  # for how long starts that die of storage or network are begun again
_ROOM_S = 300.0  # for the disk to take as many bytes as a checkpoint has
_MEETING_S = 3600.0  # for how long the processes of a run may take to meet again
_FINAL = (0, 2, 3, 4)
_AGAIN = "; the same command goes on"


def run(config: Config, program: Callable[[], int]) -> int:
    """Trains in a child process, or by `program` in this one; says farewell, and returns the exit code.

    Signals may still be held (`interrupts`): this process gives them back when it has a child; else `program` does.
    """
    notify.check(config.notify)
    again = command()
    if again and wanted(config.runs.supervise):
        supervisor = Supervisor(again, config, notify.tell_of(config.notify, config.workdir))
        with supervisor.signals():  # that mean the request which ended the run must not cost the farewell
            return _farewell(config, supervisor.run(), supervisor.start, supervisor.signalled)
    _ask_for_notices(config.runs.notices)
    start, code = farewell.Start(None if _several(config) else os.getpid(), time.time()), 1
    held = _lock(config)  # if it is refused, another start trains there: no farewell
    try:
        with _handed_down(held):
            code = program()
    except ConfigError:
        code = 2
        raise
    except KeyboardInterrupt:
        code = 4
        raise
    finally:
        _farewell(config, code, start, supervised.signalled)
    return code


def _farewell(config: Config, code: int, start: farewell.Start, signalled: int | None) -> int:
    """Says farewell, unless the run was refused because another start of it trains; returns the exit code."""
    if code != 2 or not deaths.within(files.ENDING_S + farewell.READ_S, lambda: _another_trains(config)):
        farewell.say_farewell(config, code, start, signalled)
    return code


def _another_trains(config: Config) -> bool:
    if not config.workdir:
        return False
    try:
        ledger.lock(pathlib.Path(config.workdir)).close()
    except ConfigError:
        return True
    except OSError:  # there is no such folder
        pass
    return False


def _several(config: Config) -> bool:
    return config.distributed.num_processes > 1 or config.distributed.auto


def _lock(config: Config) -> typing.IO[str] | None:
    """The lock on the run's folder, for all starts; None if another process of the run holds it, or none can."""
    distributed, folder = config.distributed, pathlib.Path(config.workdir)
    alone = not distributed.auto and (not distributed.coordinator or distributed.process_id == 0)
    if not config.workdir or not alone:
        return None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return ledger.lock(folder)
    except OSError:
        return None  # the training says what is wrong


@contextlib.contextmanager
def _handed_down(held: typing.IO[str] | None) -> Iterator[None]:
    """Lets the training in this process have the lock; closes it in the end."""
    if held is None:
        yield
        return
    with held:
        os.environ[files.HANDED_DOWN] = str(held.fileno())
        try:
            yield
        finally:
            del os.environ[files.HANDED_DOWN]


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

    look: float = _LOOK_S
    still: float = _STILL_S
    at_once: float = _AT_ONCE_S
    stacks: float = _STACKS_S
    term: float = _TERM_S
    kill: float = _KILL_S
    patience: float = _PATIENCE_S


class Supervisor:
    """One run of `jaxlm train`, with all its starts.

    Args:
      command: what to start.
      config: the config that the command names; the child gets it too.
      tell: called with an event ("crash", "stall") and a line about it, when the child is started again or given up.
      times: the seconds that it waits.
      output: a file that takes what the child says and prints; None: where this process does.
    """

    def __init__(
        self,
        command: Sequence[str],
        config: Config,
        tell: Callable[[str, str], None] = lambda event, text: None,
        times: Times | None = None,
        output: typing.IO[bytes] | None = None,
    ):
        self._command, self._config, self._tell, self._output = list(command), config, tell, output
        self._times = times or Times()
        self._folder = pathlib.Path(config.workdir)
        self._several = _several(config)
        meeting_s = config.distributed.start_timeout_s if self._several else 0.0
        self._hangs = hangs.Watch(
            config.runs.hang_s,
            config.data.timeout_s,
            config.checkpoint.mirror_timeout_s,
            meeting_s,
            config.reward.timeout_s,
        )
        self._child: children.Child | None = None
        self._asked: list[tuple[int, float]] = []  # the signals that ask to stop, and when each came
        self._at_once: float | None = None  # when they asked to stop at once
        self._over = False
        self._woken = threading.Event()
        self._since = time.monotonic()
        self._hung = 0.0  # for how long the last child did
        self.start = farewell.Start(None, time.time())  # the last one

    def run(self) -> int:
        """Trains until nothing is to be started again; returns the exit code."""
        progress, failures = deaths.Progress(self._folder / "checkpoints", self._times.patience), 0
        screen.share()
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.signals())
            if held := _lock(self._config):
                stack.callback(held.close)
                console.keep(self._folder / console.LOG)
            stack.callback(_ask_for_notices(self._config.runs.notices))
            place = deaths.within(10.0, lambda: os.stat(self._folder))
            stack.callback(setattr, self, "_over", True)
            while True:
                death = self._one_start(held)
                if death.code in _FINAL and not death.hung:
                    return death.code
                if death.stuck:
                    return 1
                if self._asked:
                    return self._stopped(death)
                if place and deaths.within(10.0, lambda: files.moved(self._folder, place)):
                    if death.code != 1:  # else it said so itself
                        _say(f"{death.words()}; {self._folder} was moved or deleted: not started again")
                    return 1
                progress.note(death)
                failures = 1 if progress.newer else failures + 1
                if not self._may_go_on(death, progress):
                    return death.code if death.code > 0 else 1
                if not self._wait(death, failures):
                    return 4

    def _one_start(self, lock: typing.IO[str] | None) -> deaths.Death:
        """Starts the child, watches it to its end, and ends what it leaves behind."""
        began = time.time()
        child = children.Child(self._command, self._environment(), self._passed(lock), self._output)
        self._hangs.begin(time.monotonic())
        self._child, self.start = child, farewell.Start(None if self._several else child.pid, began)
        if self._asked:  # a signal that came just now
            child.send(signal.SIGTERM)
        try:
            hung = self._watch(child)
            if child.alive():
                _say(
                    f"process {child.pid} of the run can't be ended: it waits inside the kernel, for a disk or a device. "
                    "End it, or start this machine again, then give the same command"
                )
                return deaths.Death(1, child.sign().step, child.sign().activity, hung, stuck=True)
            sign, self._child = child.sign(), None  # it has ended: no signal can reach it
            code = child.reap()
        finally:
            self._child = None
        self._hung = hung
        self._since = time.monotonic()
        fault = sign.detail == clock.FAULT and not sign.step and not _others_start_again()
        death = deaths.Death(code, sign.step, sign.activity, hung, out_of_memory=child.out_of_memory, fault=fault)
        said = {"step": sign.step, "code": code, "why": death.words(), "pid": child.pid, "hung": hung > 0}
        deaths.within(10.0, lambda: ledger.end(self._folder, **said))
        return death

    def _environment(self) -> dict[str, str]:
        lost = f"{clock.HUNG}:{self._hung:.3f}" if self._hung else ""
        return {supervised.SINCE: repr(self._since), supervised.LOST: lost}

    def _passed(self, lock: typing.IO[str] | None) -> dict[str, int]:
        """The variables that name open files, and these files."""
        config = os.memfd_create("jaxlm-config")
        os.write(config, pickle.dumps(self._config))
        return {supervised.CONFIG: config} | ({files.HANDED_DOWN: os.dup(lock.fileno())} if lock else {})

    def _watch(self, child: children.Child) -> float:
        """Waits for the child's end, and brings it about if the child hangs; returns for how long it hung."""
        times, told = self._times, False
        while not child.ended(times.look):
            now, sign = time.monotonic(), child.sign()
            used = child.processor_s() if sign.activity in hangs.BY_PROCESSOR else 0.0
            if self._hangs.look(sign, now, used) > 0:
                return self._end_hung(child, sign, now)
            if self._at_once is not None and now > self._at_once + times.at_once:
                child.kill(times.kill)
                return 0.0
            compiles = sign.activity == clock.COMPILE
            if self._asked and _nothing_to_save(sign) and not (compiles and self._several):  # there they stop together
                if compiles and not told:
                    _say("stopping: no step is done yet, so nothing is to be saved")
                    told = True
                if now > self._asked[0][1] + (times.at_once if compiles else times.still):  # XLA hears no signal
                    child.kill(times.kill)
                    return 0.0
            elif self._asked and now > self._asked[0][1] + times.still and not told:
                _say(f"still stopping: it waits for {sign.waits_for()}; again to stop at once")
                told = True
        return 0.0

    def _end_hung(self, child: children.Child, sign: hangs.Sign, now: float) -> float:
        """Says what a child that hangs waits for, shows the stacks of its threads, and ends it."""
        since = max(sign.when, child.started)
        words = f"no sign of life for {_duration(now - since)}: it waits for {sign.waits_for()}"
        _say(words)
        stacks = child.stacks(self._times.stacks)
        _say("\n".join(["where its main thread stands:", *children.main_thread(stacks)]))
        if path := deaths.within(10.0, lambda: _keep_stacks(self._folder, words, stacks)):
            _say(f"the stacks of all its threads are in {path}")
        self._tell("stall", words)
        # JAX passes SIGTERM on to the other processes, which would end as if they were not to come back.
        if not self._several:
            child.send(signal.SIGTERM)
            child.wait(self._times.term)
        child.kill(self._times.kill)
        return time.monotonic() - since

    def _may_go_on(self, death: deaths.Death, progress: deaths.Progress) -> bool:
        """False, with a line that says why, if another start would not get further."""
        if self._several and death.activity == clock.START and not death.fault:
            if progress.met is not None and time.monotonic() < progress.met + _MEETING_S:
                return True  # the other processes come back when their own supervisors notice
            _say(f"{death.words()}, before all processes of the run had met; not started again")
            return False
        if death.code == 1 and death.step >= self._config.train.steps and self._is_full():
            _say(f"{death.words()}, and another checkpoint does not fit in {self._folder}: free some room{_AGAIN}")
            return False
        if not progress.again:
            return True
        why = "storage or network failed for too long" if death.fault else "no checkpoint was saved in between"
        words = f"{death.words()}, as before, and {why}: not started again"
        _say(words)
        self._tell("crash", words)
        return False

    def _is_full(self) -> bool:
        """True if another checkpoint has no room: a finished run that could not be saved would train the rest for nothing."""
        return bool(deaths.within(2 * _ROOM_S, lambda: keep.is_full(self._folder / "checkpoints", _ROOM_S)))

    def _wait(self, death: deaths.Death, failures: int) -> bool:
        """Waits before the next start; False if a signal came meanwhile."""
        delay = deaths.backoff(self._config.runs.backoff_s, failures)
        peers = self._config.distributed.num_processes > 1 and death.code == -signal.SIGABRT
        why = " (another process of the run died or froze)" if peers else ""
        words = f"{death.words()}{why}; starting again from the last checkpoint in {_duration(delay)}"
        _say(words)
        if not death.hung:
            self._tell("crash", words)
        self._woken.wait(delay)
        if self._asked:
            _say(f"stopped between two starts{_AGAIN}")
        self._since = time.monotonic()
        return not self._asked

    def _stopped(self, death: deaths.Death) -> int:
        """The exit code of a run that was asked to stop and did not say that its state is saved."""
        if death.code < 0 and _nothing_to_save(death) and not death.hung:
            _say(f"stopped before training began{_AGAIN}")
            return 4
        if death.code < 0 or death.hung:
            _say(f"stopped at once; what came after the last checkpoint is not saved{_AGAIN}")
        return death.code if death.code > 0 and not death.hung else 1

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Passes signals on to the child, which is in a process group of its own: the terminal reaches this one alone.

        After the end of `run`, ctrl-C and a request to stop at once raise KeyboardInterrupt.
        """
        handlers: dict[int, typing.Any] = dict.fromkeys(_FORWARDED, self._on_signal)
        handlers |= {signal.SIGTSTP: self._on_pause}
        if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
            del handlers[signal.SIGHUP]  # nohup; the child inherits that
        interrupts.release()
        old = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: typing.Any) -> None:
        if number == signal.SIGUSR1:
            if self._child:
                threading.Thread(target=self._show_stacks, args=(self._child,), daemon=True).start()
            return
        now, earlier = time.monotonic(), list(self._asked)
        self._asked.append((number, now))
        self._woken.set()
        again = supervised.asks_at_once(number, now, earlier)
        if self._over and (again or number == signal.SIGINT):
            raise KeyboardInterrupt
        if again:
            self._at_once, number = self._at_once or now, signal.SIGINT
        elif earlier:
            return  # the child has been told
        if self._child:
            self._child.send(number)

    @property
    def signalled(self) -> int | None:
        """The first signal that asked to stop; None if none did."""
        return self._asked[0][0] if self._asked else None

    @staticmethod
    def _show_stacks(child: children.Child) -> None:
        with contextlib.suppress(OSError):  # it ended meanwhile
            stacks = child.stacks(_STACKS_S)
            _say(f"it waits for {child.sign().waits_for()}; the stacks of all its threads:\n{stacks}")

    def _on_pause(self, number: int, frame: typing.Any) -> None:
        """ctrl-Z stops the child with this process, and it goes on with it."""
        if self._child:
            self._child.send_all(signal.SIGSTOP)
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)  # here it stops, until `fg`
        signal.signal(signal.SIGTSTP, self._on_pause)
        if self._child:
            self._child.send_all(signal.SIGCONT)


def _nothing_to_save(found: hangs.Sign | deaths.Death) -> bool:
    begins = found.activity in (clock.MIRROR, clock.COMPILE) and not found.step  # of this start
    return found.activity in (clock.START, clock.RESTORE) or begins


def _keep_stacks(folder: pathlib.Path, words: str, stacks: str) -> pathlib.Path:
    for number in itertools.count(1):
        path = folder / f"hang-{number}.txt"
        with contextlib.suppress(FileExistsError), path.open("x") as file:
            file.write(f"{words}\n\n{stacks}")
            return path


def _duration(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _ask_for_notices(clouds: Sequence[str]) -> Callable[[], None]:
    """A notice stops this process as SIGTERM does. Returns what ends the asking."""
    if not clouds:
        return lambda: None
    from jaxlm.train import notices  # Python's web client takes a while

    def stop() -> None:
        supervised.announced = True
        os.kill(os.getpid(), signal.SIGTERM)

    return notices.watch(clouds, stop, _say)


def _say(text: str) -> None:
    console.say(f"jaxlm: {text}")


def command() -> list[str] | None:
    """Returns how to start this very program again: the same interpreter, flags, module or script, arguments.

    None if this is a part of another program, which changed `sys.argv`.
    """
    given = sys.argv[1:]
    return [sys.executable, *sys.orig_argv[1:]] if sys.orig_argv[len(sys.orig_argv) - len(given) :] == given else None
