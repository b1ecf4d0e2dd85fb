"""Takes SIGTERM, SIGHUP and ctrl-C as a request to stop after the current step."""

import dataclasses
import os
import pickle
import signal
import threading
import typing
from collections.abc import Callable

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxlm.host import console, screen, transcript
from jaxlm.run import clock, supervised

_MESSAGE_BYTES = 4096


class StopSignal:
    """Turns SIGTERM, SIGHUP and SIGINT (ctrl-C) into a request to stop after the current step. Use it in a `with`.

    A second request ends the process at once (`supervised.Requests`). A SIGHUP that was ignored (nohup) stays ignored. If
    there are several processes, JAX's own preemption notice takes SIGTERM (a Python handler never sees it). So this class turns
    its own requests into SIGTERM, and all processes stop at the same step.
    """

    def __init__(self, doing: Callable[[], str] = lambda: clock.STEP):
        self._doing = doing
        self._requested = threading.Event()
        self._signals = supervised.Requests()
        self._why: typing.Any = None
        self._agreed = False
        self._before: dict[int, typing.Any] = {}  # the handlers

    def __enter__(self) -> "StopSignal":
        if threading.current_thread() is threading.main_thread():
            numbers = [signal.SIGINT] + [signal.SIGTERM] * (jax.process_count() == 1)
            numbers += [signal.SIGHUP] * (signal.getsignal(signal.SIGHUP) != signal.SIG_IGN)
            self._before = {number: signal.signal(number, self._on_signal) for number in numbers}
        return self

    def __exit__(self, *exc) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def ask(self, why: typing.Any) -> None:
        """Asks all processes to stop at the same step. `why`: a `loop.Ending`, None for a signal; the first Ending counts."""
        self._why = self._why or why
        if not self._requested.is_set():
            self._requested.set()
            if jax.process_count() > 1:  # JAX takes this as its preemption notice, and tells the other processes
                os.kill(os.getpid(), signal.SIGTERM)

    def requested(self, step: int) -> bool:
        """True if the run must stop after `step`. All processes get the same answer at the same step."""
        if jax.process_count() == 1:
            return self._requested.is_set()
        if not self._agreed and multihost_utils.reached_preemption_sync_point(step):
            self._agreed, self._why = True, self._of_any_process()
        return self._agreed

    def asked(self) -> bool:
        return self._requested.is_set()

    def alone(self) -> bool:
        """True if the run must stop and no other process has to agree."""
        return jax.process_count() == 1 and self.asked()

    def why(self) -> typing.Any:
        """Returns the `loop.Ending` given to `ask`, the same on all processes once `requested` is True; None for a signal."""
        return self._why

    def _of_any_process(self) -> typing.Any:
        """Returns the Ending of the lowest-numbered process that has one, with that process's number; None if none has."""
        why = self._why
        if why is not None:
            why = dataclasses.replace(why, why=f"process {jax.process_index()}: {why.why[:1000]}")
        row = np.frombuffer(pickle.dumps(why).ljust(_MESSAGE_BYTES, b"\0"), np.uint8)
        rows = multihost_utils.process_allgather(row)
        endings = [pickle.loads(bytes(row)) for row in rows]  # of this very program, from its own processes
        return next((ending for ending in endings if ending is not None), None)

    def _on_signal(self, number: int, frame: typing.Any) -> None:
        supervised.requests.note(number)
        meaning = self._signals.note(number)
        if meaning == supervised.FIRST:
            doing = self._doing()
            # While a batch is awaited the device still computes the step before.
            activity = "step" if doing == clock.DATA else clock.NOUNS.get(doing, "step")
            console.say(f"jaxlm: stopping after this {activity}, once the state is saved; again to stop at once")
            self.ask(None)
        elif meaning == supervised.AGAIN:
            console.say("jaxlm: stopped at once; what came after the last checkpoint is not saved")
            screen.end()
            transcript.end()
            os._exit(1)
