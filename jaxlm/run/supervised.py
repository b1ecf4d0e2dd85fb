"""The training process's side of the supervisor: it is tied to its parent, and shows its threads' stacks when asked.

The supervisor passes values by environment variables. No JAX is imported here, because the command line calls `adopt` first.
"""

import contextlib
import ctypes
import faulthandler
import os
import pickle
import signal
import threading
import time

from jaxlm.config import Config
from jaxlm.host import files, interrupts, screen
from jaxlm.run import clock

PARENT = "JAXLM_SUPERVISOR"  # the supervisor's process id
STACKS = "JAXLM_STACKS"  # a file descriptor: where SIGUSR1 writes the stacks of all threads
CONFIG = "JAXLM_CONFIG"  # a file descriptor: the config as the supervisor read it
SINCE = "JAXLM_SINCE"  # time.monotonic() from which this start counts
LOST = "JAXLM_LOST"  # for how many seconds the previous process had shown no sign of life when it was ended for that
VARIABLES = (PARENT, STACKS, CONFIG, SINCE, LOST, clock.PULSE, files.HANDED_DOWN)
_DESCRIPTORS = (STACKS, CONFIG, clock.PULSE, files.HANDED_DOWN)

FIRST, AGAIN, SAME = "first", "again", "same"  # what a signal that asks to stop means
announced = False  # True once a preemption notice came: SIGTERM will follow, or came before it

_PR_SET_PDEATHSIG = 1
_SAME_S = 1.0  # a group's SIGTERM and its leader's mean one request
_ALONE_S = 600.0  # for how long a run may go on saving when its supervisor is gone


def adopt() -> Config | None:
    """Ties this process to its supervisor, and returns the config that the supervisor read; None without a supervisor.

    If the supervisor dies, this process gets SIGTERM: it saves its state and ends. It never outlives the supervisor by more
    than ten minutes, so that a hanging process does not keep out a new start.
    """
    parent = int(os.environ.get(PARENT) or 0)
    if not parent or parent != os.getppid():  # no supervisor, or only that of an ancestor
        for name in VARIABLES:
            os.environ.pop(name, None)
        with contextlib.suppress(AttributeError, OSError, ValueError):  # no such signal, or a stderr of no file
            faulthandler.register(signal.SIGUSR1, all_threads=True)
        return None
    for name in _DESCRIPTORS:
        if descriptor := os.environ.get(name):
            os.set_inheritable(int(descriptor), False)  # only this process and the supervisor hold the lock
    faulthandler.register(signal.SIGUSR1, file=int(os.environ[STACKS]), all_threads=True)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # the supervisor died meanwhile
        os.kill(os.getpid(), signal.SIGTERM)
    threading.Thread(target=_end_when_alone, args=(parent,), daemon=True).start()
    interrupts.hold()  # as `main` did already, but not every program that calls this
    # SIGINT was blocked since the supervisor started this process.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    with contextlib.suppress(ProcessLookupError):
        screen.share(os.getpgid(parent))
    config = int(os.environ[CONFIG])
    return pickle.loads(os.pread(config, os.fstat(config).st_size, 0))


def _end_when_alone(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    time.sleep(_ALONE_S)
    os.write(2, b"jaxlm: the supervisor is gone, and this run did not end by itself\n")
    os.killpg(0, signal.SIGKILL)


def stop_at_once_until_training() -> None:
    """Makes SIGTERM and SIGHUP raise KeyboardInterrupt, as ctrl-C does: before the first step there is nothing to save.

    Further signals of the same request are ignored, so that the run can end. Call this when all modules are imported: an
    exception inside an import may become a traceback, or be swallowed. Raises KeyboardInterrupt if a signal came while
    `interrupts` held them. A SIGHUP or ctrl-C that is ignored, as under nohup, stays ignored. `signals.StopSignal` takes
    over the signals later.
    """
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        if number == signal.SIGTERM or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _stop_at_once)
    if (came := interrupts.taken_over()) is not None:
        _stop_at_once(came, None)


class Requests:
    """The signals that asked this process to stop: `came` lists them as (signal, `time.monotonic()`).

    One request may come as several signals: when a terminal closes (SIGHUP, SIGTERM), when a group and its leader both get
    SIGTERM, when a cloud sends SIGTERM around its notice. So a second request is only a ctrl-C after any signal, or a SIGTERM
    more than a second after a SIGTERM that no notice announced. In a supervisor's child only SIGINT, which the supervisor
    sends, is a second request: the child gets further SIGTERMs if all processes get them, and when the supervisor dies.
    """

    def __init__(self):
        self.came: list[tuple[int, float]] = []

    @property
    def first(self) -> int | None:
        return self.came[0][0] if self.came else None

    def note(self, number: int) -> str:
        """Returns what a signal means: FIRST, AGAIN (stop at once, whatever is lost), or the SAME request as an earlier one."""
        now, earlier = time.monotonic(), list(self.came)
        self.came.append((number, now))
        if not earlier:
            return FIRST
        again = number == signal.SIGINT
        if number == signal.SIGTERM and not announced and PARENT not in os.environ:
            again = any(other == signal.SIGTERM and now - then > _SAME_S for other, then in earlier)
        return AGAIN if again else SAME


requests = Requests()  # of this process


def mark_fault() -> None:
    """Tells the supervisor that a fault of storage or network ends this start; a later start may not meet that fault."""
    if pulse := clock.Pulse.of_parent():
        step, _, activity, _ = pulse.read() or (0, 0.0, clock.START, "")
        pulse.write(step, activity, clock.FAULT)


def _stop_at_once(number: int, frame: object) -> None:
    if requests.note(number) != SAME:
        raise KeyboardInterrupt


def orphaned() -> bool:
    parent = os.environ.get(PARENT)
    return parent is not None and int(parent) != os.getppid()


def since() -> float | None:
    """Returns the `time.monotonic()` from which this start's time counts; None without a supervisor."""
    return float(os.environ[SINCE]) if os.environ.get(SINCE) else None


def lost() -> float:
    """Returns the seconds that the previous process hung, if it was ended for that; else 0."""
    return float(os.environ.get(LOST) or 0.0)
