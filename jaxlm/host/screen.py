"""Writes lines on standard error, and below them in a terminal one live line, which is rewritten.

A stream that is closed, lost, full or not read never stops a run, nor delays it for long: text that it does not take is
dropped. The cursor is never hidden and no mode of the terminal is changed, so a process may be killed at any moment.
"""

import contextlib
import dataclasses
import os
import re
import select
import sys
import textwrap
import threading
import time
import typing
from collections.abc import Iterator, Sequence

from jaxlm.host import transcript

PATIENCE_MS = 2000  # how long a line waits for a terminal or pipe that takes nothing; the lines after it do not wait
TICK_S = 0.5  # between two updates of the live line
COLUMNS = 80  # of a terminal of unknown width
_RETRY_S = 0.01  # a terminal may say that it has room, and take nothing
_CTRL_C = 3  # columns left free on the live line: the terminal writes ^C after it
_CLEAR = "\r\x1b[K"
_RESET = "\x1b[0m"
_stuck: set[int] = set()  # file descriptors that took nothing when last tried

DIM, BOLD, CYAN, GREEN = "\x1b[2m", "\x1b[1m", "\x1b[36m", "\x1b[32m"


def write(text: str, stream: typing.TextIO | None = None) -> None:
    """Writes text; never raises, and never waits for long. Text that can't be written is dropped; the next text is tried again.

    So a closed pipe, a lost terminal, a pager that is not read or a log file on a full disk never stops a run.
    """
    stream = stream or sys.stderr
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError, AttributeError):  # text in memory, a closed stream, no stream at all
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.write(text)
            stream.flush()
        return
    with contextlib.suppress(OSError, ValueError), _never_waiting(descriptor) as own:
        _write(own, text.encode(stream.encoding or "utf-8", "backslashreplace"), descriptor)


@contextlib.contextmanager
def _never_waiting(descriptor: int) -> Iterator[int]:
    """Yields a descriptor whose writes return at once; for a terminal a new one, since other processes share its flags."""
    # A terminal that reports room may have less than a line's, and would block the writer until it is read.
    own = -1
    if os.isatty(descriptor):
        with contextlib.suppress(OSError):
            path = f"/proc/self/fd/{descriptor}" if sys.platform == "linux" else os.ttyname(descriptor)
            own = os.open(path, os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        yield descriptor if own < 0 else own
    finally:
        if own >= 0:
            os.close(own)


def _write(descriptor: int, data: bytes, known_as: int) -> None:
    """Writes without Python's buffer: text left in it after an error would change the exit code at the end."""
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    end = time.monotonic() + (0 if known_as in _stuck else PATIENCE_MS / 1000)
    while data:
        if not poll.poll(max(0.0, end - time.monotonic()) * 1000):
            _stuck.add(known_as)
            return
        try:
            data = data[os.write(descriptor, data[: select.PIPE_BUF]) :]  # a pipe takes this much without blocking
        except BlockingIOError:
            if time.monotonic() >= end:
                _stuck.add(known_as)
                return
            time.sleep(_RETRY_S)
            continue
        _stuck.discard(known_as)
        end = time.monotonic() + PATIENCE_MS / 1000


def is_terminal(stream: typing.TextIO | None) -> bool:
    try:
        return stream.isatty()
    except (OSError, ValueError, AttributeError):
        return False


def is_live(stream: typing.TextIO | None) -> bool:
    return is_terminal(stream) and os.environ.get("TERM") != "dumb"


def has_colour(stream: typing.TextIO | None) -> bool:
    """True if colour may be used on the stream: it is a terminal, and NO_COLOR (no-color.org) is not set."""
    return is_live(stream) and not os.environ.get("NO_COLOR")


def columns(stream: typing.TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns or COLUMNS
    except (OSError, ValueError, AttributeError):
        return COLUMNS


class Part(typing.NamedTuple):
    """A part of a line. The parts with the largest `rank` are left out first where the terminal is narrow."""

    text: str
    rank: int
    style: str = ""


def fit(parts: Sequence[Part], width: int) -> list[Part]:
    """Returns the parts that fit into `width` columns, two blanks between them; a single part that is too long is cut."""
    left = [part for part in parts if part.text]
    while len(left) > 1 and len(joined(left, colour=False)) > width:
        left.remove(max(left, key=lambda part: part.rank))
    return [part._replace(text=part.text[:width]) for part in left]


def joined(parts: Sequence[Part], colour: bool) -> str:
    return "  ".join(f"{p.style}{p.text}{_RESET}" if colour and p.style else p.text for p in parts if p.text)


class Activity(typing.Protocol):
    """An activity that is shown while it runs.

    Attributes:
      stands: True if it stays on the live line in front of later activities; False if they replace it.
    """

    stands: bool

    def parts(self, alone: bool) -> list[Part]:
        """Returns the activity's parts of the live line; `alone`: True if no activity began later."""

    def line(self) -> str:
        """Returns the line that is due now on a stream without a live line; "" if none is due. Called twice a second."""


@dataclasses.dataclass
class _Screen:
    """The state of the output: activities, each with its stream; `drawn`: the live line in the terminal, "" for none."""

    activities: list[tuple[Activity, typing.TextIO]] = dataclasses.field(default_factory=list)
    drawn: str = ""
    drawn_on: typing.TextIO | None = None
    ticker: threading.Thread | None = None
    shared: bool = False
    group: int = 0


_screen = _Screen()
_lock = threading.RLock()  # a signal's handler may write while the main thread does


def share(group: int = 0) -> None:
    """Records that another process of the run writes on the same terminal, and may have left a live line.

    `group`: the process group that holds the terminal's foreground for this process; 0 for its own group.
    """
    _screen.shared, _screen.group = True, group


_COMMAND = re.compile(r"(?:^| )(?:--\w|(?:jaxlm|pip|hf|python|git) \S)")  # what is copied must have no newline inside


def say(text: str) -> None:
    """Writes a line on standard error, above the live line, and into the run's log.txt if there is one."""
    plain, stream = transcript.plain(text), sys.stderr
    _keep(folded(plain, columns(stream)) if is_live(stream) else plain, stream)
    transcript.note(text)


def folded(text: str, width: int) -> str:
    """Returns the text with lines over `width` columns folded between words. Lines with a command or a flag stay whole."""
    whole = {"expand_tabs": False, "replace_whitespace": False, "break_long_words": False, "break_on_hyphens": False}
    fold = textwrap.TextWrapper(width, "", "  ", **whole).fill
    lines = text.split("\n")
    return "\n".join(line if len(line) <= width or _COMMAND.search(line) else fold(line) for line in lines)


def say_parts(parts: Sequence[Part]) -> None:
    """Says a line of parts. A terminal shows the parts that fit, in colour; other streams and log.txt get the whole line."""
    stream = sys.stderr
    shown = fit(parts, columns(stream) - 1) if is_live(stream) else parts
    _keep(joined(shown, has_colour(stream)), stream)
    transcript.note(joined(parts, colour=False))


def say_marked(parts: Sequence[tuple[str, bool]], style: str) -> None:
    """Says text, perhaps of several lines, in which some parts are marked: by `style`, or without colour by [[ ]].

    `parts` are (text, True if the text is marked), in order.
    """
    plain, stream = [(transcript.plain(text), marked) for text, marked in parts], sys.stderr
    bracketed = "".join(f"[[{text}]]" if marked else text for text, marked in plain)
    coloured = "".join(f"{style}{text}{_RESET}" if marked else text for text, marked in plain)
    _keep(coloured if has_colour(stream) else bracketed, stream)
    transcript.note(bracketed)


def _keep(text: str, stream: typing.TextIO) -> None:
    with _lock:
        if stream is _screen.drawn_on and _screen.drawn:
            write(f"{_CLEAR}{text}\n{_screen.drawn}", stream)
        elif _screen.shared and is_live(stream) and _in_front(stream):
            write(f"{_CLEAR}{text}\n", stream)
        else:
            write(f"{text}\n", stream)


@contextlib.contextmanager
def shown(activity: Activity) -> Iterator[None]:
    """Shows an activity while the `with` block runs."""
    entry = (activity, sys.stderr)
    with _lock:
        _screen.activities.append(entry)
        _draw()
        if _screen.ticker is None:
            _screen.ticker = threading.Thread(target=_tick, name="screen", daemon=True)
            _screen.ticker.start()
    try:
        yield
    finally:
        with _lock:
            _screen.activities = [each for each in _screen.activities if each is not entry]
            _draw()


def end() -> None:
    """Removes the live line, even if activities go on: the process is about to end."""
    with _lock:
        _screen.activities = []
        _erase()


def standing() -> bool:
    return any(activity.stands for activity, _ in list(_screen.activities))


def _tick() -> None:
    """Redraws the live line until no activity is left."""
    while True:
        time.sleep(TICK_S)
        with _lock:
            if not _screen.activities:
                _screen.ticker = None
                return
            activity, stream = _screen.activities[-1]
            _draw()
            if not is_live(stream) and (line := activity.line()):
                _keep(line, stream)
                transcript.note(line)


def _draw() -> None:
    """Writes the live line as it is now, if it has changed."""
    stream = _screen.activities[-1][1] if _screen.activities else None
    if stream is None or not is_live(stream):
        _erase()
        return
    if not _in_front(stream):
        _screen.drawn = ""  # this process is in the background
        return
    last, parts = _screen.activities[-1][0], []
    for activity, on in _screen.activities:
        if on is stream and (activity is last or activity.stands):
            with contextlib.suppress(Exception):  # a figure must not stop a run
                parts += activity.parts(activity is last)
    text = joined(fit([_ascii(part) for part in parts], columns(stream) - _CTRL_C), has_colour(stream))
    if text != _screen.drawn or stream is not _screen.drawn_on:
        write(f"\r{text}\x1b[K", stream)
        _screen.drawn, _screen.drawn_on = text, stream


def _erase() -> None:
    if _screen.drawn:
        if _in_front(_screen.drawn_on):
            write(_CLEAR, _screen.drawn_on)
        _screen.drawn, _screen.drawn_on = "", None


def _ascii(part: Part) -> Part:
    return part._replace(text="".join(c if " " <= c <= "~" else "?" for c in part.text))


def _in_front(stream: typing.TextIO) -> bool:
    """True if this process's group, or the group given to `share`, is the terminal's foreground group, or it has none."""
    try:
        front = os.tcgetpgrp(stream.fileno())
    except (OSError, ValueError):
        return True  # a terminal without job control
    return front in (0, os.getpgrp(), _screen.group)
