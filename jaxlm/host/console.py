"""Formats what users read: lines on standard error, tables on standard output, and figures as text. Imports no JAX."""

import contextlib
import inspect
import json
import logging
import math
import os
import pathlib
import signal
import sys
import threading
import time
import typing
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from jaxlm.host import screen, transcript
from jaxlm.host.redact import redact
from jaxlm.host.screen import CYAN, DIM, Part, say

LOG = "log.txt"  # in a run's folder: its messages
WORKING_S = 2.0  # an activity that takes longer is reported
AGAIN_S = 30.0  # without a live line, reported again after this time; during training, first after this time
_YEAR_H = 24 * 365.25

T = typing.TypeVar("T")
Say = Callable[[str], object]  # shows a line
Tell = Callable[..., None]  # (amount, words = "")


def keep(path: pathlib.Path) -> None:
    """Copies all messages into this file: a line that names the command, then the earlier messages, then the later ones."""
    command = [os.path.basename(sys.orig_argv[0]), *sys.orig_argv[1:]]
    transcript.begin(path, f"process {os.getpid()}: {' '.join(redact(command))}")


@contextlib.contextmanager
def working(what: str, total: float = 0, unit: str = "", *, end: bool = True, quiet: bool = False) -> Iterator[Tell]:
    """Shows an activity: in a terminal on the live line, elsewhere by a line now and then if the activity takes long.

    After an activity of over two seconds a line says how long it took, unless the `with` block raised. Yields a function that
    takes the amount done, and optionally words to show with it.

    Args:
      what: the activity: "compiling the train step".
      total, unit: the amount to do, 0 if unknown, and its unit, such as "documents".
      end: False if the caller itself reports the end.
      quiet: True to write no line in the first half minute where there is no live line.
    """
    activity = _Working(what, total, unit, quiet)
    with screen.shown(activity):
        yield activity.tell
    if end and (line := activity.end()):
        say(line)


def told(items: Iterable[T], tell: Tell) -> Iterator[T]:
    """Yields the items; after each calls `tell` with the number done."""
    for number, item in enumerate(items, start=1):
        yield item
        tell(number)


class _Working:
    stands = False

    def __init__(self, what: str, total: float, unit: str, quiet: bool):
        self._what, self._total, self._unit = what, total, unit and f" {unit}"
        self._done, self._note = 0.0, ""
        self._began, self._said = time.monotonic(), 0
        quiet = quiet or screen.standing()  # a run's own lines must not drown among others
        self._patience_s = AGAIN_S if quiet else WORKING_S

    def tell(self, done: float, note: str = "") -> None:
        self._done, self._note = done, note

    def parts(self, alone: bool) -> list[Part]:
        """Returns the parts of the live line."""
        took = time.monotonic() - self._began
        beside = [Part(self._amount(), 2), Part(self._note, 6), Part(duration(took), 8, DIM)]
        return [Part(self._what, 0, CYAN), *beside, Part(self._left(took), 7, DIM)]

    def line(self) -> str:
        """Returns the line that is due now where there is no live line; "" if none is due."""
        took = time.monotonic() - self._began
        if took < self._patience_s + self._said * AGAIN_S:
            return ""
        self._said += 1
        if self._said == 1:
            return f"{self._what} ..."
        return f"{self._what}: {_listed(self._amount(), self._note, duration(took), self._left(took))}"

    def end(self) -> str:
        """Returns the line at the end; "" if the activity was short."""
        took = time.monotonic() - self._began
        if took < self._patience_s:
            return ""
        shown = _listed(self._amount(), self._note)
        return f"{self._what}: {shown} in {duration(took)}" if shown else f"{self._what}: {duration(took)}"

    def _amount(self) -> str:
        if not self._total:
            return f"{count(self._done)}{self._unit}" if self._done else ""
        return f"{count(int(self._done))} of {count(self._total)}{self._unit}"  # a part of one is not done

    def _left(self, took: float) -> str:
        if not 0 < self._done < self._total:
            return ""
        return f"{duration(took / self._done * (self._total - self._done))} left"


def _listed(*words: str) -> str:
    return ", ".join(filter(None, words))


def open_closed() -> None:
    """Opens standard streams that are closed (`2>&-`, some daemons) on /dev/null.

    Otherwise the next opened file gets a closed stream's number, and printed text goes into that file.
    """
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))


def settle() -> None:
    """Flushes and ends a program's output: log.txt, standard output and standard error.

    A stream that can't be written to is redirected to /dev/null, so that it does not change the exit code.
    """
    screen.end()
    transcript.end()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class LogHandler(logging.Handler):
    """Writes log records by `say`."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            say(self.format(record))
        except Exception:  # an argument that does not fit its format, ...
            self.handleError(record)


def print_table(rows: Sequence[dict], as_json: bool) -> None:
    """Prints rows, which have the same keys, as an aligned table or, if `as_json`, as one JSON object a line."""
    if as_json:
        for row in rows:
            print(json.dumps(row))
    elif rows:
        cells = [[f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows]
        print(table([list(rows[0]), *cells]))


def table(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> str:
    """Returns rows of cells as lines of text. Columns are aligned to the left, those with an index in `right` to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def count(number: float) -> str:
    return f"{number:,.0f}"


def several(number: int, what: str, ending: str = "s") -> str:
    """Returns "1 document" or "1,234 documents"."""
    return f"{count(number)} {what}{ending * (number != 1)}"


def loss(value: float | None) -> str:
    """Returns a loss or another measured figure with four digits after the point; "" if it was not measured."""
    return "" if value is None else f"{value:.4f}"


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


def gigabytes(number: float, digits: int | None = None) -> str:
    """Returns bytes in units of 10^9, without the unit. `digits`: digits after the point; by default 2 below 10 GB, else 1."""
    digits = (2 if number < 1e10 else 1) if digits is None else digits
    return f"{number / 1e9:.{digits}f}"


def dollars(usd: float | None) -> str:
    """Returns "$43.21", below $1 two significant digits: "$0.0032". None and infinity: a run that never ends."""
    if usd is None or not math.isfinite(usd):
        return "never ends"
    if 0 < usd < 1:
        return f"${usd:.{1 - math.floor(math.log10(usd))}f}" if usd >= 1e-4 else "<$0.0001"
    return f"${usd:,.2f}"


def hours(value: float) -> str:
    """Returns hours as a plan shows them: '12 min', '2.5 h', '10 days', '3.1 years'; 'never ends' if not finite."""
    if not math.isfinite(value):
        return "never ends"
    if value < 1:
        return f"{60 * value:.2g} min" if value >= 1 / 60 else "<1 min"
    if (years := value / _YEAR_H) >= 1.5:
        return f"{years:.2g} years" if years < 100 else f"{years:,.0f} years"
    return f"{value:.3g} h" if value < 100 else f"{value / 24:.3g} days"


def duration(seconds: float) -> str:
    """Returns seconds as a clock shows them: 95 -> '1m35s', 3725 -> '1h02m', 90000 -> '1d01h'."""
    s = round(seconds)
    for large, small, unit, part in ((86400, 3600, "d", "h"), (3600, 60, "h", "m")):
        if s >= large:
            return f"{s // large}{unit}{s % large // small:02d}{part}"
    return f"{s // 60}m{s % 60:02d}s"


def costs(seconds: float, usd_per_hour: float) -> str:
    """Returns "1h02m, $3.10"; without a price, "1h02m"."""
    return duration(seconds) + f", {dollars(seconds / 3600 * usd_per_hour)}" * (usd_per_hour > 0)


# Words in JAX's errors when a collective over a network fails.
_GONE = ("Connection closed by peer", "Connection reset by peer", "ncclRemoteError", "heartbeat timeout")


def peer_is_gone(error: BaseException) -> bool:
    """True if JAX's error means that another process of the run died or can't be reached."""
    return any(words in str(error) for words in _GONE)


def drop_leftovers() -> None:
    """Keeps Python from printing asyncio's warnings on I/O that Orbax abandoned after an error, which Orbax raises itself.

    A ctrl-C inside a callback of the garbage collector (JAX has one) would be printed and lost, so SIGINT is sent again.
    """
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
    hook = sys.unraisablehook

    def unraisable(what: "sys.UnraisableHookArgs") -> None:
        if isinstance(what.exc_value, KeyboardInterrupt):
            again = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))  # once the callback is over
            again.daemon = True
            again.start()
        elif "Event loop is closed" not in str(what.exc_value) and not inspect.iscoroutine(what.object):
            hook(what)

    sys.unraisablehook = unraisable
