"""What stands on a terminal after all that was written: a real one, whose lines and rewritten line a test reads back."""

import fcntl
import os
import select
import signal
import struct
import subprocess
import sys
import termios
import time

import pytest

from jaxlm.host import console, screen
from jaxlm.host.screen import Part

PARTS = [Part("step 5/10", 0), Part("loss 2.0", 1, screen.BOLD), Part("lr 1e-3", 3), Part("left 2m", 2)]


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        (37, "step 5/10  loss 2.0  lr 1e-3  left 2m"),
        (36, "step 5/10  loss 2.0  left 2m"),
        (27, "step 5/10  loss 2.0"),
        (9, "step 5/10"),
        (4, "step"),
    ],
)
def test_the_least_important_parts_go_first(width, shown):
    assert screen.joined(screen.fit(PARTS, width), colour=False) == shown
    assert screen.joined(PARTS[:2], colour=True) == "step 5/10  \x1b[1mloss 2.0\x1b[0m"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("written: data, model", "written: data, model"),
        ("written: data, models", "written: data,\n  models"),
        ("a\na_path/longer/than/the/line b", "a\na_path/longer/than/the/line\n  b"),
        # A command or a flag is copied.
        ("next: jaxlm sample runs/quickstart", "next: jaxlm sample runs/quickstart"),
        ("to the hub: hf upload me/it out --private", "to the hub: hf upload me/it out --private"),
        ("it is too large: give --config.a=1 --config.b=2", "it is too large: give --config.a=1 --config.b=2"),
        ("a\tb c d e f g h i j k l m", "a\tb c d e f g h i j\n  k l m"),
    ],
)
def test_a_line_is_folded_between_words(text, shown):
    assert screen.folded(text, 20) == shown


_BEGIN = """
import fcntl, os, sys, termios, time
from jaxlm.host import console, screen
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
"""


class Terminal:
    """A terminal of some columns in which Python code runs; `rows` are what a user sees."""

    def __init__(self, code: str, columns: int, **environment: str):
        self._ours, theirs = os.openpty()
        self.resize(columns)
        variables = {"TERM": "xterm", **environment}
        clean = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "TERM")}
        self.process = subprocess.Popen(
            [sys.executable, "-c", f"{_BEGIN}\n{code}"],
            **{"stdin": theirs, "stdout": theirs, "stderr": theirs},
            env=clean | variables,
            start_new_session=True,
        )
        os.close(theirs)
        self.raw, self._columns = "", columns

    def resize(self, columns: int) -> None:
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def type(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    def read(self, until: str = "", timeout: float = 30) -> "Terminal":
        """Reads until the text is there, or to the end."""
        end = time.monotonic() + timeout
        while not (until and until in self.raw):
            assert time.monotonic() < end, self.raw
            if select.select([self._ours], [], [], 0.1)[0]:
                try:
                    self.raw += os.read(self._ours, 65536).decode()
                except OSError:  # all have closed it
                    break
        return self

    def end(self) -> int:
        self.read()
        os.close(self._ours)
        return self.process.wait(30)

    @property
    def rows(self) -> list[str]:
        """The rows, and behind the last end of a line the one where the cursor stands. A row that is too wide fails."""
        rows, at, text = [""], 0, self.raw
        while text:
            if text.startswith("\x1b["):
                stop = next(i for i, c in enumerate(text[2:], 2) if c.isalpha())
                if text[stop] == "K":
                    rows[-1] = rows[-1][:at]
                else:
                    assert text[stop] == "m", text[: stop + 1]
                text = text[stop + 1 :]
                continue
            if text[0] == "\n":
                rows.append("")
            elif text[0] == "\r":
                at = 0
            else:
                rows[-1] = rows[-1][:at].ljust(at) + text[0] + rows[-1][at + 1 :]
                at += 1
                assert at <= self._columns, rows
            text = text[1:]
        return rows


RUN = """
class Run:
    stands = True
    def parts(self, alone):
        return [screen.Part("step 5/10", 0), screen.Part("x" * 25, 2), screen.Part("left 2m", 1)]
    def line(self):
        return ""
screen.TICK_S = 0.05
"""


@pytest.mark.parametrize(
    ("columns", "fits", "live"),
    [
        (140, 4, f"step 5/10  {'x' * 25}  left 2m"),
        (80, 2, f"step 5/10  {'x' * 25}  left 2m"),
        (40, 1, "step 5/10  left 2m"),
    ],
)
def test_lines_go_above_the_live_line_and_nothing_is_wider_than_the_terminal(columns, fits, live):
    code = RUN + "with screen.shown(Run()):\n  console.say('one')\n  console.say('two')\n"
    code += "  screen.say_parts([screen.Part('y' * 30, i) for i in range(9)])\n  os.kill(os.getpid(), 9)"
    terminal = Terminal(code, columns)
    assert terminal.end() == -signal.SIGKILL
    assert terminal.rows == ["one", "two", "  ".join(["y" * 30] * fits), live]
    assert "\x1b[?" not in terminal.raw  # no mode is changed, so none is left behind


WITH = RUN + "with screen.shown(Run()):\n  "
LIVE = f"step 5/10  {'x' * 25}  left 2m"
IN_BACKGROUND = RUN + "os.setpgid(0, 0) if os.fork() == 0 else (os.wait(), os._exit(0))\n"
IN_CHILD = (
    RUN + "group = os.getpgrp()\nif os.fork():\n  os.wait()\n  os._exit(0)\nos.setpgid(0, 0)\nscreen.share(group)\n"
)


@pytest.mark.parametrize(
    ("code", "ends", "rows", "drawn"),
    [
        (WITH + "time.sleep(0.2)\nconsole.say('done')", 0, ["done", ""], True),
        # A process that ends at once takes its live line away.
        (WITH + "console.say('at once')\n  screen.end()\n  os._exit(1)", 1, ["at once", ""], None),
        # What works inside a run is on the same line.
        (
            RUN + "with screen.shown(Run()), console.working('held-out loss', 12, 'batches') as tell:\n"
            "  tell(3)\n  time.sleep(0.5)\n  os.kill(os.getpid(), 9)",
            -signal.SIGKILL,
            [f"{LIVE}  held-out loss  3 of 12 batches"],
            True,
        ),
        # The supervisor speaks after its child was killed, which had a live line.
        ("screen.share()\nos.write(2, b'step 5/10  left')\nconsole.say('again')", 0, ["again", ""], True),
        # A child of the supervisor has the terminal too, a job in the background has not.
        (IN_CHILD + "with screen.shown(Run()):\n  time.sleep(0.2)", 0, None, True),
        (IN_BACKGROUND + "with screen.shown(Run()):\n  console.say('one')\n  time.sleep(0.2)", 0, ["one", ""], False),
    ],
)
def test_when_the_live_line_is_there_and_when_it_goes(code, ends, rows, drawn):
    terminal = Terminal(code, 80)
    assert terminal.end() == ends
    assert rows is None or terminal.rows == rows
    assert drawn is None or ("step 5/10" in terminal.raw) == drawn


def test_a_dumb_terminal_gets_lines_alone():
    terminal = Terminal(WITH + "console.say('one')", 80, TERM="dumb")
    terminal.end()
    assert terminal.raw == "one\r\n"


def test_ctrl_c_leaves_no_half_line():
    code = RUN + "try:\n  with screen.shown(Run()):\n    time.sleep(60)\n"
    code += "except KeyboardInterrupt:\n  console.say('stopped')"
    terminal = Terminal(code, 80).read(until="left 2m")
    time.sleep(0.2)
    terminal.type(b"\x03")
    assert terminal.end() == 0
    assert terminal.rows == ["stopped", ""]
    assert "^C" in terminal.raw


def test_the_live_line_follows_the_width():
    terminal = Terminal(RUN + "with screen.shown(Run()):\n  time.sleep(60)", 80).read(until="xxx  left 2m")
    terminal.resize(30)
    terminal.read(until="step 5/10  left 2m")
    terminal.process.kill()
    terminal.end()


@pytest.mark.parametrize(
    ("environment", "coloured"),
    [({}, True), ({"NO_COLOR": "1"}, False), ({"NO_COLOR": ""}, True), ({"TERM": "dumb"}, False)],
)
def test_colour_is_for_terminals_that_want_it(environment, coloured):
    terminal = Terminal("screen.say_parts([screen.Part('loss', 0, screen.BOLD)])", 80, **environment)
    terminal.end()
    assert ("\x1b[1m" in terminal.raw) == coloured
    assert terminal.raw.replace("\x1b[1m", "").replace("\x1b[0m", "") == "loss\r\n"


def test_what_is_marked_is_in_colour_or_in_brackets(capsys):
    parts = [("one\n", False), ("two \x1b[2J", True), (" three", False)]
    screen.say_marked(parts, screen.GREEN)
    assert capsys.readouterr().err == "one\n[[two ]] three\n"
    for environment, shown in (({}, "\x1b[32mtwo \x1b[0m three"), ({"NO_COLOR": "1"}, "[[two ]] three")):
        terminal = Terminal(f"screen.say_marked({parts!r}, screen.GREEN)", 60, **environment)
        terminal.end()
        assert terminal.raw == f"one\r\n{shown}\r\n"


def test_control_characters_of_a_text_do_nothing(capsys):
    console.say("a\x1b[2Jb\rc\x07\td\ne")
    assert capsys.readouterr().err == "abc\td\ne\n"


@pytest.mark.parametrize("ends", [os.openpty, os.pipe])
def test_one_that_nobody_reads_holds_nobody_and_one_that_is_gone_stops_nothing(monkeypatch, ends):
    """A terminal says that it has room as long as it has a little, and would hold whoever writes more."""
    monkeypatch.setattr(screen, "PATIENCE_MS", 50)
    ours, theirs = ends()
    with open(theirs, "w") as stream:
        start = time.monotonic()
        for _ in range(2000):  # 200 kB into a pipe that holds 64
            screen.write("x" * 99 + "\n", stream)
        assert time.monotonic() - start < 5
        while select.select([ours], [], [], 0.1)[0]:
            os.read(ours, 65536)
        screen.write("read again\n", stream)
        assert b"read again" in os.read(ours, 65536)
        os.close(ours)
        screen.write("gone", stream)  # EIO of a terminal, EPIPE of a pipe
        screen.write("gone", stream)
