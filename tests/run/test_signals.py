"""Requests to stop: by a signal, by the run itself, and of several processes together."""

import contextlib
import signal

import pytest
import tiny_stops
from tiny_stops import HUP, INT, TERM

from jaxlm.run import clock, signals, supervised
from jaxlm.run.survive import farewell, supervisor
from jaxlm.train import loop


@pytest.fixture(autouse=True)
def handlers():
    """The handlers of this process, put back afterwards."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def ended(monkeypatch):
    """The exit codes with which the process would have ended at once, and the time, which a test moves on."""
    codes, now = [], [100.0]
    monkeypatch.setattr(signals.os, "_exit", codes.append)
    monkeypatch.setattr(supervised.time, "monotonic", lambda: now[0])
    return codes, now


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_asks_to_stop_and_says_after_what(number, capfd, ended):
    doing = [clock.EVALUATE]
    with signals.StopSignal(lambda: doing[0]) as stop:
        assert not stop.requested(1)
        signal.raise_signal(number)
        assert stop.requested(1)
        assert stop.alone()
        assert stop.why() is None
    said = capfd.readouterr().err
    assert "jaxlm: stopping after this evaluation, once the state is saved; again to stop at once" in said
    assert ended[0] == []


@pytest.fixture
def notice(monkeypatch):
    """What a cloud's notice does in this process."""
    monkeypatch.setattr(supervised, "announced", False)
    acts = []
    monkeypatch.setattr(farewell, "watch_for_notices", lambda clouds, act, say: acts.append(act))
    supervisor._ask_for_notices(("gce",))
    return acts[0]


def test_the_second_request_ends_the_process_at_once(ended, capfd, notice, draw, trials):
    """Whole: pytest -n0 tests/run/test_signals.py -k second_request --trials=40 --draw=34"""
    codes, now = ended
    for pair in tiny_stops.pairs(trials(len(tiny_stops.KINDS)), draw):
        codes.clear()
        supervised.announced = False
        with signals.StopSignal() as stop:
            for name, later in ((pair.first, 0.0), (pair.second, pair.apart)):
                now[0] += later
                notice() if name == tiny_stops.NOTICE else signal.raise_signal(name)
            assert stop.requested(1)
        assert codes == [1] * pair.ends, pair
        assert ("stopped at once" in capfd.readouterr().err) == pair.ends


def test_a_child_is_asked_again_by_its_supervisor_alone(ended, monkeypatch):
    """All processes get SIGTERM where a machine goes down, and the child gets it when its supervisor dies."""
    codes, now = ended
    monkeypatch.setenv(supervised.PARENT, "1")
    with signals.StopSignal():
        for number, expected in ((signal.SIGTERM, []), (signal.SIGTERM, []), (signal.SIGINT, [1])):
            signal.raise_signal(number)
            now[0] += 5.0
            assert codes == expected


def test_what_means_the_same_request_interrupts_no_end(ended, monkeypatch):
    """Before the first step, and while the farewell is said, a signal raises KeyboardInterrupt: once a request."""
    _, now = ended
    monkeypatch.setattr(supervised, "requests", supervised.Requests())
    supervised.stop_at_once_until_training()
    for number, raises in ((TERM, True), (HUP, False), (TERM, False), (INT, True)):
        now[0] += 0.1
        with pytest.raises(KeyboardInterrupt) if raises else contextlib.nullcontext():
            signal.raise_signal(number)


def test_nohup_stays_in_force(ended):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with signals.StopSignal() as stop:
        signal.raise_signal(signal.SIGHUP)
        assert not stop.requested(1)


def test_a_line_that_nobody_reads_does_not_stop_the_request(ended, monkeypatch):
    def broken(descriptor, text):
        raise BrokenPipeError

    monkeypatch.setattr(signals.os, "write", broken)
    with signals.StopSignal() as stop:
        signal.raise_signal(signal.SIGTERM)
        assert stop.requested(1)


def test_the_run_itself_can_ask(ended):
    full = loop.Ending(loop.FAILED, "disk full", cause="disk")
    with signals.StopSignal() as stop:
        stop.ask(full)
        stop.ask(loop.Ending(loop.FAILED, "later"))
        assert stop.requested(3)
        assert stop.why() == full


@pytest.mark.parametrize("asks", [True, False])
def test_several_processes_end_alike_at_the_same_step(monkeypatch, asks):
    """This is process 0; the ending that process 1 asked for is what ends both. A signal gives no ending."""
    monkeypatch.setattr(signals.jax, "process_count", lambda: 2)
    sent, other = [], signals.StopSignal()
    monkeypatch.setattr(signals.os, "kill", lambda pid, number: sent.append(number))
    monkeypatch.setattr(signals.multihost_utils, "reached_preemption_sync_point", lambda step: step >= 7)
    if asks:
        other.ask(loop.Ending(loop.FAILED, "disk full", cause="disk"))
        assert sent == [signal.SIGTERM]  # which JAX takes, and tells all
    rows = []

    def gather(row):
        rows.append(row)
        return rows

    monkeypatch.setattr(signals.multihost_utils, "process_allgather", gather)
    monkeypatch.setattr(signals.jax, "process_index", lambda: 1)
    assert not other.requested(6)
    assert other.requested(7)
    monkeypatch.setattr(signals.jax, "process_index", lambda: 0)
    mine = signals.StopSignal()
    assert mine.requested(7)
    assert mine.requested(7)
    assert len(rows) == 2  # once on each
    expected = loop.Ending(loop.FAILED, "process 1: disk full", cause="disk") if asks else None
    assert mine.why() == other.why() == expected
    assert not mine.alone()
