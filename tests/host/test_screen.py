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


def test_the_least_important_parts_go_first():
    def shown(width: int) -> str:
        return screen.joined(screen.fit(PARTS, width), colour=False)

    assert shown(37) == "step 5/10  loss 2.0  lr 1e-3  left 2m"
    assert shown(36) == "step 5/10  loss 2.0  left 2m"
    assert shown(27) == "step 5/10  loss 2.0"
    assert shown(9) == "step 5/10"
    assert shown(4) == "step"
    assert screen.joined(PARTS[:2], colour=True) == "step 5/10  \x1b[1mloss 2.0\x1b[0m"


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


def test_the_live_line_is_gone_at_the_end():
    terminal = Terminal(RUN + "with screen.shown(Run()):\n  time.sleep(0.2)\nconsole.say('done')", 80)
    assert terminal.end() == 0
    assert terminal.rows == ["done", ""]
    assert "step 5/10" in terminal.raw


def test_a_process_that_ends_at_once_takes_its_live_line_away():
    code = RUN + "with screen.shown(Run()):\n  console.say('stopped at once')\n  screen.end()\n  os._exit(1)"
    terminal = Terminal(code, 80)
    assert terminal.end() == 1
    assert terminal.rows == ["stopped at once", ""]


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


def test_what_works_inside_a_run_is_on_the_same_line():
    code = RUN + "with screen.shown(Run()), console.working('held-out loss', 12, 'batches') as tell:\n"
    code += "  tell(3)\n  time.sleep(0.5)\n  os.kill(os.getpid(), 9)"
    terminal = Terminal(code, 80)
    terminal.end()
    assert terminal.rows == [f"step 5/10  {'x' * 25}  left 2m  held-out loss  3 of 12 batches"]


@pytest.mark.parametrize(
    ("environment", "coloured"),
    [({}, True), ({"NO_COLOR": "1"}, False), ({"NO_COLOR": ""}, True), ({"TERM": "dumb"}, False)],
)
def test_colour_is_for_terminals_that_want_it(environment, coloured):
    terminal = Terminal("screen.say_parts([screen.Part('loss', 0, screen.BOLD)])", 80, **environment)
    terminal.end()
    assert ("\x1b[1m" in terminal.raw) == coloured
    assert terminal.raw.replace("\x1b[1m", "").replace("\x1b[0m", "") == "loss\r\n"


def test_a_dumb_terminal_gets_lines_alone():
    terminal = Terminal(RUN + "with screen.shown(Run()):\n  console.say('one')", 80, TERM="dumb")
    terminal.end()
    assert terminal.raw == "one\r\n"


def test_a_background_job_draws_no_live_line():
    code = RUN + "os.setpgid(0, 0) if os.fork() == 0 else (os.wait(), os._exit(0))\n"
    code += "with screen.shown(Run()):\n  console.say('one')\n  time.sleep(0.2)"
    terminal = Terminal(code, 80)
    terminal.end()
    assert terminal.raw == "one\r\n"


def test_what_another_process_of_the_run_left_is_taken_away():
    """The supervisor speaks after its child was killed, which had a live line."""
    code = "screen.share()\nos.write(2, b'step 5/10  left')\nconsole.say('starting again')"
    terminal = Terminal(code, 80)
    terminal.end()
    assert terminal.rows == ["starting again", ""]


def test_a_child_of_the_supervisor_has_the_terminal_too():
    code = RUN + "group = os.getpgrp()\nif os.fork():\n  os.wait()\n  os._exit(0)\n"
    code += "os.setpgid(0, 0)\nscreen.share(group)\nwith screen.shown(Run()):\n  time.sleep(0.2)"
    terminal = Terminal(code, 80)
    terminal.end()
    assert "step 5/10" in terminal.raw


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


def test_a_terminal_that_nobody_reads_holds_nobody(monkeypatch):
    """It says that it has room as long as it has a little, and would hold whoever writes more."""
    monkeypatch.setattr(screen, "PATIENCE_MS", 50)
    ours, theirs = os.openpty()
    with open(theirs, "w") as stream:
        start = time.monotonic()
        for _ in range(1000):
            screen.write("x" * 99 + "\n", stream)
        assert time.monotonic() - start < 5
        while select.select([ours], [], [], 0.1)[0]:
            os.read(ours, 65536)
        screen.write("read again\n", stream)
        assert b"read again" in os.read(ours, 65536)
    os.close(ours)


def test_a_terminal_that_is_gone_stops_nothing():
    ours, theirs = os.openpty()
    with open(theirs, "w") as stream:
        screen.write("here", stream)
        assert os.read(ours, 4) == b"here"
        os.close(ours)
        screen.write("gone", stream)  # EIO
        screen.write("gone", stream)
