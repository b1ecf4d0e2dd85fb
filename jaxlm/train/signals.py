"""Takes SIGTERM and ctrl-C as a request to stop after the current step."""

import logging
import os
import signal
import threading
import typing

import jax
from jax.experimental import multihost_utils


class StopSignal:
    """Turns SIGTERM and SIGINT (ctrl-C) into a request to stop after the current step. Use it in a `with`.

    A second SIGINT ends the process at once. If there are several processes, JAX's own preemption notice takes SIGTERM
    (a Python handler never sees it). So this class turns ctrl-C into SIGTERM, and all processes stop at the same step.
    """

    def __init__(self):
        self._asked = threading.Event()
        self._old: dict[int, typing.Any] = {}

    def __enter__(self) -> "StopSignal":
        if threading.current_thread() is threading.main_thread():
            self._old[signal.SIGINT] = signal.signal(signal.SIGINT, self._on_signal)
            if jax.process_count() == 1:
                self._old[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._on_signal)
        return self

    def __exit__(self, *exc) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def requested(self, step: int) -> bool:
        """True if the run must stop after `step`. All processes get the same answer at the same step."""
        if jax.process_count() > 1:
            return multihost_utils.reached_preemption_sync_point(step)
        return self._asked.is_set()

    def asked(self) -> bool:
        """True if this process was asked to stop."""
        return self._asked.is_set()

    def alone(self) -> bool:
        """True if the run must stop and no other process has to agree."""
        return jax.process_count() == 1 and self._asked.is_set()

    def why(self) -> typing.Any:
        """Returns the ending that this process asked for; None for a signal."""
        return None

    @staticmethod
    def _at_once(number: int, frame: typing.Any) -> None:
        os.write(2, b"\njaxlm: stopped at once; what came after the last checkpoint is not saved\n")
        os._exit(1)

    def _on_signal(self, number: int, frame: typing.Any) -> None:
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, self._at_once)
        self._asked.set()
        logging.warning("stopping after this step; the state will be saved")
        if jax.process_count() > 1:
            os.kill(os.getpid(), signal.SIGTERM)
