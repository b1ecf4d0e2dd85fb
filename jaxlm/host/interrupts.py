"""Holds ctrl-C, SIGTERM and SIGHUP back while modules are imported, where they would end in a traceback; a gentle ctrl-C."""

import contextlib
import os
import signal
import types
from collections.abc import Callable, Iterator

_ORDINARY = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL}
_held: list[int] = []  # signals whose handler is `_note`
_asked: list[int] = []  # signals that came


def hold() -> None:
    """Records the signals from now on, without acting on them. Ignored signals, as under nohup, stay ignored.

    A second ctrl-C ends the process at once: an exception would become a traceback, or be swallowed by an import.
    """
    for number, ordinary in _ORDINARY.items():
        if signal.getsignal(number) == ordinary:
            signal.signal(number, _note)
            _held.append(number)


def release(raising: bool = False) -> None:
    """Restores the signals' handlers, unless other code replaced them. Raises KeyboardInterrupt if a signal came.

    `raising`: from now on SIGTERM and SIGHUP raise KeyboardInterrupt, so that worker processes and shared memory are removed.
    """
    for number in _held:
        if signal.getsignal(number) == _note:
            signal.signal(number, signal.default_int_handler if raising else _ORDINARY[number])
    if taken_over() is not None:
        raise KeyboardInterrupt


def taken_over() -> int | None:
    """Ends the recording, for a caller that has set its own handlers. Returns the first signal that came, or None."""
    _held.clear()
    came = _asked[0] if _asked else None
    _asked.clear()
    return came


@contextlib.contextmanager
def gently(stop: Callable[[], object]) -> Iterator[None]:
    """In the `with` block a first ctrl-C calls `stop`, a second one does what it did before."""

    def on_signal(number: int, frame: types.FrameType | None) -> None:
        signal.signal(number, before)
        stop()

    before = signal.signal(signal.SIGINT, on_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _note(number: int, frame: types.FrameType | None) -> None:
    if _asked and number == signal.SIGINT:
        os.write(2, b"\r\x1b[K" * os.isatty(2) + b"jaxlm: stopped at once; nothing was begun\n")
        os._exit(4)
    _asked.append(number)
