"""Holds ctrl-C and SIGTERM back while modules are imported, where they would end in a traceback."""

import signal
import types

_ORDINARY = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
_held: list[int] = []  # signals whose handler is `_note`
_asked: list[int] = []  # signals that came


def hold() -> None:
    """Notes the signals from now on. What is ignored, as under nohup, stays so. A second signal stops at once."""
    for number, ordinary in _ORDINARY.items():
        if signal.getsignal(number) == ordinary:
            signal.signal(number, _note)
            _held.append(number)


def release() -> None:
    """Gives the signals back, unless others took them meanwhile. Raises KeyboardInterrupt if one came."""
    while _held:
        number = _held.pop()
        if signal.getsignal(number) == _note:
            signal.signal(number, _ORDINARY[number])
    if _asked:
        _asked.clear()
        raise KeyboardInterrupt


def _note(number: int, frame: types.FrameType | None) -> None:
    if _asked:
        raise KeyboardInterrupt
    _asked.append(number)
