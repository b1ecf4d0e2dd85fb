"""Time and dollars go on over starts: nothing is lost, counted twice or priced again; how long things usually take."""

import datetime
import json
import os
import subprocess
import sys
import time

import pytest

from jaxlm.run import clock, ledger, spent, supervised
from jaxlm.run.clock import ACTIVITIES, Clock


def record(folder, seconds, cost, step=10, age=100.0):
    """A record of metrics.jsonl that was written `age` seconds ago."""
    line = {"step": step, "time": time.time() - age, "wall_s": sum(seconds.values()), "cost_usd": cost}
    line |= {f"time/{name}_s": seconds.get(name, 0.0) for name in ACTIVITIES}
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps(line) + "\n")


def start(folder, age=200.0, price=36.0, **keys):
    """An entry of run.json for a start on this machine, `age` seconds ago."""
    begun = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=age)
    entry = {"time": begun.isoformat(), "hardware": ledger.machine(), "usd_per_hour": price} | keys
    ledger.append(folder, "starts", entry)


def carry_on(folder, monkeypatch, began=0.0, process=0.0, **environment):
    """(seconds of the clock, what `carry_on` returns): it began, and so did the process, so many seconds ago."""
    now = time.monotonic()
    monkeypatch.setattr(spent, "process_began", lambda: now - process)
    for name in (supervised.SINCE, supervised.LOST):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(f"JAXLM_{name}", value)
    counted = Clock(since=now - began)
    earlier = spent.carry_on(folder, counted)
    return counted, earlier


def about(found, **wanted):
    """True if these activities have these seconds, and the others none."""
    return found == pytest.approx(dict.fromkeys(ACTIVITIES, 0.0) | wanted, abs=0.5)


def test_a_first_start_carries_nothing(tmp_path, monkeypatch):
    counted, earlier = carry_on(tmp_path, monkeypatch, began=7.0, process=5.0)
    assert about(counted.seconds(), start=7.0)
    assert earlier == spent.Earlier(0.0, 0.0)
    assert counted.redo == 0


def test_the_time_since_the_start_before_died_is_down_at_that_start_s_price(tmp_path, monkeypatch):
    start(tmp_path)
    record(tmp_path, {"start": 5, "step": 50}, cost=1.0)
    counted, earlier = carry_on(tmp_path, monkeypatch, began=3.0, process=3.0)
    assert about(counted.seconds(), start=5 + 3, step=50, down=97)
    assert earlier.wall_s == pytest.approx(55 + 97, abs=0.5)
    assert earlier.cost_usd == pytest.approx(1.0 + 97 * 0.01, abs=0.01)
    assert counted.redo == 10


def test_what_the_supervisor_saw_hang_is_no_time_that_it_was_down(tmp_path, monkeypatch):
    start(tmp_path)
    record(tmp_path, {"step": 50}, cost=1.0)
    # The process before was ended 20 s ago; this one began 4 s ago, after a wait.
    counted, earlier = carry_on(tmp_path, monkeypatch, began=20.0, process=4.0, LOST="60.5")
    assert about(counted.seconds(), start=4, step=50, hung=60.5, down=35.5)
    assert earlier.wall_s == pytest.approx(50 + 96, abs=0.5)
    counted, _ = carry_on(tmp_path, monkeypatch, LOST="1e9")
    assert about(counted.seconds(), step=50, hung=100)
    for none in ("", "0.000"):
        counted, _ = carry_on(tmp_path, monkeypatch, LOST=none)
        assert about(counted.seconds(), step=50, down=100)


def test_a_supervisor_that_began_before_the_last_record_counts_nothing_twice(tmp_path, monkeypatch):
    start(tmp_path)
    record(tmp_path, {"step": 50}, cost=1.0)
    counted, earlier = carry_on(tmp_path, monkeypatch, began=150.0, process=2.0)
    assert about(counted.seconds(), start=2, step=50, down=98)
    assert earlier.wall_s == pytest.approx(148, abs=0.5)
    counted, earlier = carry_on(tmp_path, monkeypatch, began=150.0, process=150.0)  # several runs in one process
    assert about(counted.seconds(), start=100, step=50)
    assert earlier.wall_s == pytest.approx(50, abs=0.5)


@pytest.mark.parametrize(
    "keys",
    [
        {"hardware": {"host": "another", "boot_id": "other"}},
        {"hardware": ledger.machine() | {"boot_id": "other"}},
        {"hardware": 5},
        {"ended": {"code": 0}},
        {"ended": {"code": 2, "step": 10}, "step": 10},
    ],
    ids=["another machine", "booted since", "damaged", "done", "refused before its first step"],
)
def test_time_that_nobody_paid_for_is_left_out(tmp_path, monkeypatch, keys):
    start(tmp_path, **keys)
    record(tmp_path, {"step": 50}, cost=1.0)
    counted, earlier = carry_on(tmp_path, monkeypatch, began=3.0, process=3.0)
    assert about(counted.seconds(), start=3, step=50)
    assert earlier == spent.Earlier(50, 1.0)


@pytest.mark.parametrize("code", [1, 2, 3, 4, -9])
def test_a_machine_that_waits_for_a_start_to_go_on_is_paid_for(tmp_path, monkeypatch, code):
    start(tmp_path, step=9, ended={"code": code, "step": 10})
    record(tmp_path, {"step": 50}, cost=1.0)
    assert about(carry_on(tmp_path, monkeypatch)[0].seconds(), step=50, down=100)


def test_a_start_that_died_before_its_first_record_is_down_from_its_own_begin(tmp_path, monkeypatch):
    """The record before it may be from another machine."""
    start(tmp_path, age=5000.0, hardware={"host": "another"})
    record(tmp_path, {"step": 50}, cost=1.0, age=4000.0)
    start(tmp_path, age=30.0)
    counted, _ = carry_on(tmp_path, monkeypatch)
    assert about(counted.seconds(), step=50, down=30)


def test_records_without_seconds_of_activities_count_as_steps(tmp_path, monkeypatch):
    start(tmp_path, age=30.0)
    (tmp_path / "metrics.jsonl").write_text('{"step": 8, "wall_s": 7200.0, "cost_usd": 72.0}\n')
    counted, earlier = carry_on(tmp_path, monkeypatch)
    assert about(counted.seconds(), step=7200, down=30)
    assert earlier.cost_usd == pytest.approx(72 + 30 * 0.01, abs=0.01)


@pytest.mark.parametrize(
    "last", ["5", "[]", '{"wall_s": null}', '{"step": 9, "wall_s": null, "cost_usd": 1}', "\x00" * 99]
)
@pytest.mark.parametrize("more", ['{"step": 9, "wall_s": "x"}', '{"step": 9, "wall_s": NaN, "cost_usd": 1}', "half {"])
def test_a_damaged_last_line_leaves_what_was_counted_before(tmp_path, monkeypatch, last, more):
    record(tmp_path, {"step": 50, "save": 2}, cost=1.0)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write(f"{last}\n{more}\n")
    counted, earlier = carry_on(tmp_path, monkeypatch)
    assert about(counted.seconds(), step=50, save=2)
    assert earlier == spent.Earlier(52, 1.0)


def test_damaged_seconds_of_one_activity_count_as_steps(tmp_path, monkeypatch):
    record(tmp_path, {"step": 50, "save": 2}, cost=1.0)
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line | {"time/save_s": "x"}) + "\n")
    assert about(carry_on(tmp_path, monkeypatch)[0].seconds(), step=52)


def test_steps_that_were_done_before_are_repeated():
    counted = Clock()
    counted.redo = 3
    shown = []
    for step in (2, 3, 4, 5, 3, 5, 6):  # ... and those after a rollback
        counted.after(step)
        before = counted.seconds()
        time.sleep(0.002)
        shown.append(max(ACTIVITIES, key=lambda name, before=before: counted.seconds()[name] - before[name]))
    assert shown == [clock.REPEATED] * 2 + [clock.STEP] * 2 + [clock.REPEATED] * 2 + [clock.STEP]


def test_a_start_begins_with_its_process_or_its_supervisor():
    program = "import time; from jaxlm.run import spent as books; print(time.monotonic() - books.begun(), time.process_time())"
    begun = time.monotonic()
    clean = {name: value for name, value in os.environ.items() if name != supervised.SINCE}
    done = subprocess.run([sys.executable, "-c", program], env=clean, capture_output=True, text=True, check=True)
    took = time.monotonic() - begun
    age, processor = map(float, done.stdout.split())
    assert 0.5 * processor <= age <= took + 0.02
    env = os.environ | {supervised.SINCE: str(begun - 1000)}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    assert float(done.stdout.split()[0]) == pytest.approx(1000 + took, abs=took + 1)


@pytest.fixture
def counted(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    found = clock.Clock()

    def spend(activity: str, detail: str, seconds: float) -> str:
        with found.spend(activity, detail):
            now[0] += seconds
            return found.doing()

    return found, spend


def test_the_first_of_several_does_not_count_since_it_compiled(counted):
    found, spend = counted
    assert found.usual_s("held-out") == 0
    spend(clock.EVALUATE, "held-out", 30.0)
    assert found.usual_s("held-out") == 30
    spend(clock.EVALUATE, "held-out", 3.0)
    spend(clock.EVALUATE, "held-out", 5.0)
    assert found.usual_s("held-out") == 4
    assert found.usual_s("samples") == 0


def test_it_says_what_goes_on(counted):
    found, spend = counted
    assert found.doing() == "start"
    found.begin(clock.STEP)
    assert found.doing() == ""
    assert spend(clock.EVALUATE, "held-out", 1.0) == "evaluation"
    assert spend(clock.EVALUATE, "samples", 1.0) == "samples"
    assert spend(clock.SAVE, "checkpoint", 1.0) == "save"
    assert found.doing() == ""
