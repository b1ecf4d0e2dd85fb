"""log.txt: what a program said."""

import contextlib
import os
import pathlib
import re
import subprocess
import sys
import time

import pytest

from jaxlm.host import console, screen, transcript

STAMP = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  "


@pytest.fixture(autouse=True)
def forgotten():
    transcript.end()
    yield
    transcript.end()


def lines(path: pathlib.Path) -> list[str]:
    """The lines without their times."""
    found = path.read_text().splitlines()
    assert all(re.match(f"{STAMP}|{STAMP.rstrip()}$", line) for line in found), found
    return [line[21:] for line in found]


def test_it_holds_what_was_said_before_and_after_it_was_known(tmp_path):
    path = tmp_path / "log.txt"
    console.say("before")
    console.keep(path)
    console.say("after\ntwo lines")
    screen.say_parts([screen.Part("step 1", 0), screen.Part("loss 2", 1, screen.BOLD)])
    transcript.end()
    console.say("too late")
    head, *said = lines(path)
    assert head.startswith(f"process {os.getpid()}: ")
    assert said == ["before", "after", "two lines", "step 1  loss 2"]


def test_starts_are_appended_and_a_start_does_not_repeat_what_the_one_before_said(tmp_path):
    path = tmp_path / "log.txt"
    for word in ("one", "two"):
        console.keep(path)
        console.say(word)
        console.settle()
    assert [line for line in lines(path) if not line.startswith("process ")] == ["one", "two"]


def test_it_holds_no_secret_no_colour_and_no_control_character(tmp_path):
    path = tmp_path / "log.txt"
    console.keep(path)
    console.say("\x1b[31mred\x1b[0m\r api_key=abc123 https://me:pw@host/x?sig=1")
    transcript.end()
    assert lines(path)[-1] == "red api_key=*** https://***@host/x?sig=***"


def test_it_holds_the_whole_line_where_a_terminal_is_narrow(tmp_path):
    parts = "[screen.Part('y' * 30, i) for i in range(9)]"
    code = f"import pathlib; from jaxlm.host import console, screen; console.keep(pathlib.Path({str(tmp_path / 'log.txt')!r}));"
    code += f"screen.say_parts({parts}); console.settle()"
    ours, theirs = os.openpty()
    subprocess.run([sys.executable, "-c", code], stderr=theirs, check=True)
    os.close(theirs)
    assert len(os.read(ours, 65536).decode().splitlines()[0]) < 240
    os.close(ours)
    assert lines(tmp_path / "log.txt")[-1] == "  ".join(["y" * 30] * 9)


def test_a_disk_that_takes_nothing_loses_nothing_once_it_does(tmp_path):
    folder = tmp_path / "absent"
    console.keep(folder / "log.txt")
    console.say("one")
    time.sleep(0.1)
    folder.mkdir()
    console.say("two")
    transcript.end()
    assert lines(folder / "log.txt")[1:] == ["one", "two"]


def test_a_disk_that_hangs_delays_nobody(tmp_path, monkeypatch):
    """A named pipe that nobody reads: to open it waits for ever."""
    monkeypatch.setattr(transcript, "_CLOSE_S", 0.2)
    monkeypatch.setattr(transcript, "_KEEP", 5)
    path = tmp_path / "log.txt"
    os.mkfifo(path)
    began = time.monotonic()
    console.keep(path)
    for number in range(9):
        console.say(str(number))
    transcript.end()
    assert time.monotonic() - began < 2
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # now it goes on, with what it kept, and says what it lost
    deadline, found = time.monotonic() + 5, ""
    while "missing" not in found and time.monotonic() < deadline:
        time.sleep(0.05)
        with contextlib.suppress(BlockingIOError):  # the writer has opened it and not yet written
            found += os.read(reader, 65536).decode()
    os.close(reader)
    assert re.search(r"\[\d lines are missing here\]", found)
