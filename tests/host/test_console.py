"""Tables and figures for people."""

import contextlib
import json
import logging
import subprocess
import sys
import time
import types
import warnings
from collections.abc import Iterator

import pytest

from jaxlm.host import console, screen
from jaxlm.train.recorder import Progress


def test_print_table(capsys):
    rows = [{"name": "a", "loss": 1.23456}, {"name": "long", "loss": 2.0}]
    console.print_table(rows, as_json=False)
    assert capsys.readouterr().out == "name  loss\na     1.235\nlong  2\n"
    console.print_table(rows, as_json=True)
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == rows
    console.print_table([], as_json=False)
    assert capsys.readouterr().out == ""


def test_columns_are_aligned_to_the_side_that_is_asked_for():
    assert console.table([["a", "7", "x"], ["long", "1,000", ""]], right=[1]) == "a         7  x\nlong  1,000"


@pytest.mark.parametrize(
    ("shown", "numbers", "words"),
    [
        (console.human, (7, 1500, 2.36e10, 1.04e9, -1234567), "7 1.5k 23.6B 1.04B -1.23M"),
        (console.count, (7, 1234567, 1e6), "7 1,234,567 1,000,000"),
        (console.dollars, (1e-5, 0.003241, 0.996, 0.5, 0, 43.21), "<$0.0001 $0.0032 $1.00 $0.50 $0.00 $43.21"),
        (console.dollars, (4321.0, float("inf")), "$4,321.00 never ends"),
        (console.duration, (95, 3725, 90000), "1m35s 1h02m 1d01h"),
        (console.gigabytes, (1.234e9, 7.5e10), "1.23 75.0"),
        (console.hours, (240.0, 2.5, 0.2, 0.001, float("inf")), "10 days 2.5 h 12 min <1 min never ends"),
        (console.hours, (17_532, 27_000, 2e6), "2 years 3.1 years 228 years"),
        (console.size, (0, 999, 999.6, 1234, 123_456, 5e15), "0 B 999 B 1 kB 1.23 kB 123 kB 5000 TB"),
        (lambda share: console.share(*share), ((0, 10), (10, 10), (1, 3), (0, 0)), "0% 100% 33.3% "),
        (lambda share: console.share(*share), ((1, 100_000), (99_999, 100_000)), "<0.1% >99.9%"),
        (lambda digits: console.gigabytes(7.55e10, digits), (0, 2), "76 75.50"),
    ],
)
def test_figures_are_short_and_never_round_to_none_or_all(shown, numbers, words):
    assert " ".join(shown(number) for number in numbers) == words


def test_a_full_disk_under_a_log_stops_nothing_and_is_tried_again(tmp_path):
    with open("/dev/full", "w") as full:
        screen.write("lost\n", full)
        screen.write("lost\n", full)
    with open(tmp_path / "log", "w") as log:
        screen.write("kept\n", log)
    assert (tmp_path / "log").read_text() == "kept\n"


def test_characters_that_the_terminal_lacks_are_shown_as_their_codes(tmp_path):
    with open(tmp_path / "log", "w", encoding="ascii") as log:
        screen.write("p\u00e9\n", log)
    assert (tmp_path / "log").read_text() == "p\\xe9\n"


def test_the_exit_code_stands_although_standard_error_is_gone():
    code = "import logging, sys; from jaxlm.host import console; logging.basicConfig(handlers=[console.LogHandler()]);"
    code += "sys.stdin.read(); console.say('a'); logging.error('%s', 'b'); logging.error('%d', 'c');"
    code += "console.settle(); sys.exit(3)"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stderr.close()
    process.stdin.close()
    assert process.wait(60) == 3


def test_what_is_logged_is_shown(capsys):
    handler = console.LogHandler()
    handler.setFormatter(logging.Formatter("jaxlm: %(message)s"))
    handler.emit(logging.makeLogRecord({"msg": "no %s", "args": ("room",)}))
    assert capsys.readouterr().err == "jaxlm: no room\n"


class Kept(list):
    """Takes the place of `screen.shown`: keeps what goes on, and nobody but a test looks at it."""

    @contextlib.contextmanager
    def __call__(self, activity) -> Iterator[None]:
        self.append(activity)
        yield


@pytest.fixture
def clock(monkeypatch):
    """Takes the place of `time` in console: goes on only when a test says so."""
    clock = types.SimpleNamespace(now=1000.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(console, "time", clock)
    return clock


@pytest.fixture
def shown(monkeypatch):
    found = Kept()
    monkeypatch.setattr(screen, "shown", found)
    return found


def test_what_takes_long_says_so_now_and_then_and_when_it_ends(clock, shown, capsys):
    with console.working("reading", 4, "documents") as tell:
        (work,) = shown
        tell(1)
        clock.now += 1.9
        assert work.line() == ""
        clock.now += 0.1
        assert [work.line(), work.line()] == ["reading ...", ""]
        tell(3, "7 MB")
        clock.now += 28
        assert work.line() == ""
        clock.now += 3
        assert [work.line(), work.line()] == ["reading: 3 of 4 documents, 7 MB, 0m33s, 0m11s left", ""]
    with console.working("a moment"):
        clock.now += 1.9
    assert capsys.readouterr().err == "reading: 3 of 4 documents, 7 MB in 0m33s\n"


def test_what_is_known_to_be_short_or_told_by_others_says_less(clock, shown, capsys):
    with console.working("loading", quiet=True):
        clock.now += 29
        assert shown[0].line() == ""
    with console.working("reading", end=False):
        clock.now += 29
        assert shown[1].line() == "reading ..."
    assert capsys.readouterr().err == ""


def test_while_training_runs_only_what_takes_very_long_says_so(clock, monkeypatch, capsys):
    progress = Progress(10, 0, lambda: "evaluating")
    monkeypatch.setattr(screen, "shown", Kept())
    with console.working("held-out loss", 7):
        clock.now += 29
    assert capsys.readouterr().err == ""
    with console.working("held-out loss", 7):
        clock.now += 31
    assert capsys.readouterr().err == "held-out loss: 0 of 7 in 0m31s\n"
    progress.close()


def test_what_fails_does_not_say_that_it_is_done(clock, shown, capsys):
    def fail() -> None:
        with console.working("reading"):
            clock.now += 60
            raise OSError

    with pytest.raises(OSError, match=r"^$"):
        fail()
    assert capsys.readouterr().err == ""


def test_the_innermost_of_what_goes_on_speaks(monkeypatch, capsys):
    """On the real screen, whose thread looks: waits for its first word, however late it comes."""
    monkeypatch.setattr(console, "WORKING_S", 0.0)
    monkeypatch.setattr(screen, "TICK_S", 0.01)
    with console.working("outside", end=False), console.working("inside", end=False):
        deadline, said = time.monotonic() + 10, ""
        while "\n" not in said and time.monotonic() < deadline:
            time.sleep(0.01)
            said += capsys.readouterr().err
    assert said == "inside ...\n"


def test_items_are_counted():
    told = []
    assert list(console.told("abc", told.append)) == ["a", "b", "c"]
    assert told == [1, 2, 3]


def test_an_abandoned_coroutine_is_not_told(monkeypatch):
    """Orbax leaves one behind when the disk is full."""

    async def abandoned() -> None:
        pass

    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        console.drop_leftovers()
        abandoned()
    assert told == []
