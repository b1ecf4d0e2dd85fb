"""The books of real runs: all their time and dollars, whatever happens to them and to their logs."""

import datetime
import json
import os
import signal
import subprocess
import time

import pytest
from faults.harness import STEPS, Place

from jaxlm.run import ledger, metrics
from jaxlm.run.clock import ACTIVITIES, DOWN, REPEATED, STEP

pytestmark = pytest.mark.faults


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Data, and a run that nothing happened to."""
    made = Place(tmp_path_factory.mktemp("place"))
    assert made.whole
    yield made
    made.close()


def last(folder) -> dict:
    """The last line of metrics.jsonl."""
    return list(metrics.records(folder / "metrics.jsonl"))[-1]


def test_the_seconds_of_a_run_add_up_to_its_life_and_each_start_has_its_price(place):
    begun = time.time()
    run = place.start("life", train__steps=200, checkpoint__every_steps=40, hardware__usd_per_hour=3600)
    run.wait_for_step(60)
    run.process.send_signal(signal.SIGKILL)
    run.process.wait()
    died = last(place.root / "life")
    time.sleep(3)
    place.run("life", train__steps=200, checkpoint__every_steps=40, hardware__usd_per_hour=36)
    found = last(place.root / "life")
    assert sum(found[f"time/{name}_s"] for name in ACTIVITIES) == pytest.approx(found["wall_s"], abs=1e-3)
    assert found["wall_s"] == pytest.approx(found["time"] - begun, rel=0.005)
    ended = ledger.read(place.root / "life")["starts"][-1]["ended"]
    assert 0 <= datetime.datetime.fromisoformat(ended["time"]).timestamp() - found["time"] < 1  # nothing follows unpaid
    assert found[f"time/{DOWN}_s"] >= 3
    assert found[f"time/{REPEATED}_s"] > 0
    assert found["goodput"] == pytest.approx(found[f"time/{STEP}_s"] / found["wall_s"], abs=1e-4)
    gap, second = found[f"time/{DOWN}_s"], found["wall_s"] - died["wall_s"] - found[f"time/{DOWN}_s"]
    assert found["cost_usd"] == pytest.approx(died["cost_usd"] + gap + second / 100, abs=0.05)
    assert died["cost_usd"] == pytest.approx(died["wall_s"], abs=0.01)
    starts = ledger.read(place.root / "life")["starts"]
    assert [s["usd_per_hour"] for s in starts] == [3600.0, 36.0]
    assert "ended" not in starts[0]
    assert {"code": 0, "step": 200}.items() <= starts[1]["ended"].items()
    place.run("life", train__steps=201, hardware__usd_per_hour=1e6, code=0)  # what was paid is not priced again
    again = last(place.root / "life")
    assert again[f"time/{DOWN}_s"] == found[f"time/{DOWN}_s"]  # a run that was done waits for nothing
    assert again["cost_usd"] > found["cost_usd"]
    opening = [r for r in metrics.records(place.root / "life/metrics.jsonl") if r["step"] == 200][-1]
    assert opening["cost_usd"] >= found["cost_usd"]


@pytest.mark.parametrize("lost", ["closed pipe", "terminal", "full disk"])
def test_a_run_outlives_where_it_prints(place, lost):
    name = f"lost-{lost.split()[0]}"
    if lost == "closed pipe":
        reader, writer = os.pipe()
    elif lost == "terminal":
        reader, writer = os.openpty()
    else:
        reader, writer = os.open(os.devnull, os.O_RDONLY), os.open("/dev/full", os.O_WRONLY)
    process = subprocess.Popen(
        place.command(name),
        env=place.environment(),
        stdout=writer,
        stderr=writer,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(writer)
    end = time.monotonic() + 120
    path = place.root / name / "metrics.jsonl"
    while time.monotonic() < end and not (path.is_file() and '"step": 3,' in path.read_text()):
        if lost != "full disk":
            os.read(reader, 65536)
        time.sleep(0.02)
    os.close(reader)
    assert process.wait(180) == 0
    place.assert_exact(name)


@pytest.mark.parametrize(("what", "name"), [("metrics.jsonl", "full-lines"), ("tensorboard/", "full-board")])
def test_a_full_disk_under_the_logs_costs_no_step_and_no_line(place, what, name):
    run = place.start(name, rules=(), log__tensorboard=True)
    run.wait_for_step(6)
    run.fault(f"write ENOSPC {what}")
    run.wait_for_words("can't be written (No space left on device)")
    run.fault()
    said = run.end()
    assert "nothing was lost" in said
    place.assert_exact(name)
    assert set(range(1, STEPS + 1)) <= {r["step"] for r in metrics.records(place.root / name / "metrics.jsonl")}


def test_damaged_metrics_and_a_damaged_ledger_are_gone_on_with(place):
    folder = place.root / "damage"
    place.run("damage", train__steps=8)
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(
            "\n".join(["half {", "\x00" * 200, "5", "[]", '{"wall_s": null}', '{"step": 8, "wall_s": "x"}', "7"]) + "\n"
        )
    (folder / "run.json").write_text('{"starts": 5}')
    said = place.run("damage", train__steps=9)
    assert "Traceback" not in said
    assert "run.json is damaged: moved to run.json.damaged.1" in said
    assert json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 9
    assert [start["step"] for start in ledger.read(folder)["starts"]] == [8]
