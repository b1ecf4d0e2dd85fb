"""Formats what users read: lines on standard error, tables on standard output, and figures as text.

Every table, count, size, time and price is formatted here, so that the same figure looks the same everywhere. This
module does not import JAX, because the worker processes of `jaxlm prepare` must not.
"""

import contextlib
import inspect
import json
import logging
import math
import os
import select
import sys
import threading
import time
import typing
from collections.abc import Callable, Collection, Iterator, Sequence

WORKING_S = 2.0  # what takes longer says so
PATIENCE_MS = 2000  # how long a line waits for a terminal or pipe that takes nothing; the lines after it do not wait
_stuck: set[int] = set()  # file descriptors that took nothing when last tried


def say(text: str) -> None:
    """Writes a line on standard error; see `write`."""
    write(text + "\n")


@contextlib.contextmanager
def working(what: str, total: float = 0) -> Iterator[Callable[[float], None]]:
    """Says that something goes on, once its `with` block has taken two seconds.

    Args:
      what: what goes on: "compiling the train step".
      total: how much there is to do, in any unit; 0 if unknown.

    Yields:
      A function that takes how much is done.
    """
    began, done = time.monotonic(), [0.0]
    timer = threading.Timer(WORKING_S, lambda: say(f"{what} ..."))
    timer.daemon = True
    timer.start()

    def tell(amount: float) -> None:
        done[0] = amount

    try:
        yield tell
    finally:
        timer.cancel()
    if (seconds := time.monotonic() - began) > WORKING_S:
        part = f" {count(done[0])} of {count(total)}" if total else ""
        say(f"{what}:{part} {duration(seconds)}")


def write(text: str, stream: typing.TextIO | None = None) -> None:
    """Writes text; never raises, and never waits for long. What can't be written is dropped, and the next text tried again.

    So a closed pipe, a lost terminal, a pager that is not read or a log file on a full disk never stops a run.

    Args:
      stream: standard error by default.
    """
    stream = stream or sys.stderr
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError, AttributeError):  # text in memory, a closed stream, no stream at all
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.write(text)
            stream.flush()
        return
    with contextlib.suppress(OSError, ValueError):
        _write(descriptor, text.encode(stream.encoding or "utf-8", "backslashreplace"))


def _write(descriptor: int, data: bytes) -> None:
    """Writes without Python's buffer: what stays in it after an error would change the exit code at the end."""
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    while data:
        if not poll.poll(0 if descriptor in _stuck else PATIENCE_MS):
            _stuck.add(descriptor)
            return
        _stuck.discard(descriptor)
        data = data[os.write(descriptor, data[: select.PIPE_BUF]) :]  # so much a pipe takes without waiting


def is_terminal(stream: typing.TextIO | None) -> bool:
    """True if the stream is a terminal."""
    try:
        return stream.isatty()
    except (OSError, ValueError, AttributeError):
        return False


def open_closed() -> None:
    """Opens standard streams that are closed (`2>&-`, some daemons) on /dev/null.

    Otherwise the next file that is opened gets their number, and what is printed goes into it.
    """
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))


def settle() -> None:
    """Flushes standard output and error. One that can't be written to any more is closed off, so that the exit code stands."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class LogHandler(logging.Handler):
    """Writes what is logged on standard error, as `write` does."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            write(self.format(record) + "\n")
        except Exception:  # an argument that does not fit its format, ...
            self.handleError(record)


def print_table(rows: Sequence[dict[str, typing.Any]], as_json: bool) -> None:
    """Prints rows, which have the same keys, as an aligned table, or if `as_json`, as one JSON object a line."""
    if as_json:
        for row in rows:
            print(json.dumps(row))
    elif rows:
        cells = [[f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows]
        print(table([list(rows[0]), *cells]))


def table(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> str:
    """Returns rows of cells as lines of text.

    Columns are aligned to the left, or if their index is in `right`, to the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def count(number: float) -> str:
    """Returns all digits of a number: 1234567 -> '1,234,567'."""
    return f"{number:,.0f}"


def human(number: float) -> str:
    """Returns three digits and a unit: 1234567 -> '1.23M', 1.04e9 -> '1.04B'."""
    for size, unit in ((1e15, "P"), (1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:.3g}{unit}" if number / size < 1000 else f"{number / size:,.0f}{unit}"
    return f"{number:.3g}"


def share(part: float, whole: float) -> str:
    """Returns a part of a whole in percent: '12.5%'; '' if the whole is 0. '0%' and '100%' are always exact."""
    if not whole:
        return ""
    percent = 100 * part / whole
    if part == whole or not part:
        return f"{percent:.0f}%"
    return "<0.1%" if percent < 0.1 else ">99.9%" if percent > 99.9 else f"{percent:.1f}%"


def size(number: float) -> str:
    """Returns bytes in a suitable unit (powers of 1000): 1234567 -> '1.23 MB'."""
    units = ["B", "kB", "MB", "GB", "TB"]
    while abs(number) >= 999.5 and len(units) > 1:
        number, units = number / 1000, units[1:]
    return f"{number:.0f} {units[0]}" if units[0] == "B" or abs(number) >= 99.5 else f"{number:.3g} {units[0]}"


def megabytes(number: float) -> str:
    """Returns bytes in units of 10^6: 1234567 -> '1.2 MB'."""
    return f"{number / 1e6:.1f} MB"


def gigabytes(number: float, digits: int | None = None) -> str:
    """Returns bytes in units of 10^9, without the unit. `digits`: digits after the point; by default 2 below 10 GB, else 1."""
    digits = (2 if number < 1e10 else 1) if digits is None else digits
    return f"{number / 1e9:.{digits}f}"


def dollars(usd: float | None) -> str:
    """Returns '$43.21', or from 100 dollars on '$4,321'. None and infinity are the price of a run that never ends."""
    if usd is None or not math.isfinite(usd):
        return "never ends"
    return f"${usd:,.0f}" if usd >= 100 else f"${usd:.2f}"


def hours(value: float) -> str:
    """Returns the time in a plan: '2.5 h', or from 100 hours on '10 days'."""
    if not math.isfinite(value):
        return "never ends"
    return f"{value:.3g} h" if value < 100 else f"{value / 24:,.3g} days"


def duration(seconds: float) -> str:
    """Returns seconds as a clock shows them: 95 -> '1m35s', 3725 -> '1h02m', 90000 -> '1d01h'."""
    s = round(seconds)
    if s >= 86400:
        return f"{s // 86400}d{s % 86400 // 3600:02d}h"
    if s >= 3600:
        return f"{s // 3600}h{s % 3600 // 60:02d}m"
    return f"{s // 60}m{s % 60:02d}s"


# In JAX's errors of collectives over a network.
_GONE = ("Connection closed by peer", "Connection reset by peer", "ncclRemoteError", "heartbeat timeout")


def peer_is_gone(error: BaseException) -> bool:
    """True for JAX's error if another process of the run died, or can't be reached: a stack of calls tells no more."""
    return any(words in str(error) for words in _GONE)


def drop_leftovers() -> None:
    """Keeps Python from printing what asyncio says of reads and writes that Orbax abandoned: the error itself was raised."""
    hook = sys.unraisablehook

    def unraisable(what: "sys.UnraisableHookArgs") -> None:
        if "Event loop is closed" not in str(what.exc_value) and not inspect.iscoroutine(what.object):
            hook(what)

    sys.unraisablehook = unraisable
