"""What is known of a machine: kept in one file, which may be damaged, missing or read-only."""

import dataclasses
import json
import os
import time

import pytest

from jaxlm import config
from jaxlm.config import config_files
from jaxlm.plan.tune import machines

MESH = {"data": 1, "fsdp": 1}
PLAN = {
    "kind": "cpu",
    "count": 1,
    "setting": "k",
    "microbatch": 4,
    "memory": 1e9,
    "needed": 5e8,
    "by": "plan",
    "what": "",
}
PLAN |= {"tokens_per_second": 5.0, "time": 0.0, "load": 0.5}


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))


def resolve(*overrides: str) -> config.Config:
    return config.resolve(config_files.load("base", ["data.path=x", *overrides]))


def test_nothing_is_known_at_first():
    assert machines.known("NVIDIA H200", 1, "k") is None


def test_the_median_of_what_was_measured(tmp_path):
    for speed, by in ((100.0, "tune"), (300.0, "train"), (110.0, "doctor")):
        machines.record("NVIDIA H200", 8, "k", speed, by)
    known = machines.known("NVIDIA H200", 8, "k")
    assert (known.tokens_per_second, known.measurements, known.by) == (110.0, 3, "doctor")
    assert abs(known.time - time.time()) < 60
    assert machines.known("NVIDIA H200", 4, "k") is None
    assert machines.known("NVIDIA H200", 8, "other") is None
    assert list(json.loads(machines.path().read_text())) == ["NVIDIA H200 x 8"]
    assert machines.path() == tmp_path / ".cache/jaxlm/machines.json"


def test_what_plan_measured_counts_where_nobody_else_did():
    for speed in (50.0, 60.0):
        machines.record("cpu", 1, "k", speed, "plan")
    known = machines.known("cpu", 1, "k")
    assert (known.tokens_per_second, known.measurements) == (60.0, 1)  # the newer in place of the older
    machines.record("cpu", 1, "k", 100.0, "train")
    assert machines.known("cpu", 1, "k").tokens_per_second == 100.0


def test_what_plan_found_is_kept_for_this_host():
    assert machines.planned("asked") is None
    machines.remember("asked", PLAN)
    machines.record("cpu", 1, "k", 7.0, "train")
    assert machines.planned("asked") == PLAN
    for n in range(machines.MOST_PLANS):
        machines.remember(str(n), {"why": f"reason {n}"})
    assert machines.planned("asked") is None
    assert machines.planned("0") == {"why": "reason 0"}


def test_what_plan_found_is_forgotten_unless_it_is_whole():
    machines.remember("asked", PLAN | {"needed": None, "tokens_per_second": None})
    assert machines.planned("asked")
    for key, value in PLAN.items():
        for damaged in ({k: v for k, v in PLAN.items() if k != key}, PLAN | {key: [value]}):
            machines.remember("asked", damaged)
            assert machines.planned("asked") is None, damaged
    for damaged in ({}, [], "x", {"why": 5}, PLAN | {"count": 0}, PLAN | {"memory": None}):
        machines.remember("asked", damaged)
        assert machines.planned("asked") is None, damaged


def test_the_oldest_are_forgotten():
    for speed in range(1, machines.MOST + 11):
        machines.record("cpu", 1, "k", float(speed), "train")
    known = machines.known("cpu", 1, "k")
    assert known.measurements == machines.MOST
    assert known.tokens_per_second == 10 + (machines.MOST + 1) / 2


@pytest.mark.parametrize("speed", [0.0, -1.0, float("nan"), float("inf")])
def test_no_speed_is_not_recorded(speed):
    machines.record("cpu", 1, "k", speed, "train")
    assert machines.known("cpu", 1, "k") is None


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\0\0",
        b"[]",
        b'{"cpu x 1": 5}',
        b'{"plans": 5}',
        b'{"cpu x 1": {"k": 5}}',
        b'{"cpu x 1": {"k": [5, {}, {"tokens_per_second": "x", "by": "train", "time": 1}]}}',
        b'{"cpu x 1": {"k": [{"tokens_per_second": NaN, "by": "train", "time": 1}]}}',
    ],
)
def test_a_damaged_file_is_a_machine_that_is_not_known(content):
    machines.path().parent.mkdir(parents=True)
    machines.path().write_bytes(content)
    assert machines.known("cpu", 1, "k") is None
    machines.record("cpu", 1, "k", 7.0, "train")
    assert machines.known("cpu", 1, "k").tokens_per_second == 7.0


def test_a_home_that_can_not_be_written_is_no_error(tmp_path):
    (tmp_path / ".cache").write_text("a file in place of the folder")
    machines.record("cpu", 1, "k", 7.0, "train")
    assert machines.known("cpu", 1, "k") is None
    assert os.listdir(tmp_path) == [".cache"]


def test_the_key_is_of_what_makes_a_step_fast_or_slow():
    base = machines.key(resolve(), MESH)
    assert len(base) == 16
    assert (
        machines.key(resolve("optim.lr=1e-4", "train.steps=5000", "seed=3", "checkpoint.every_steps=7"), MESH) == base
    )
    for changed in ("train.seq_len=256", "model.remat=full", "train.microbatch_size=8", "optim.name=muon"):
        assert machines.key(resolve(changed), MESH) != base, changed
    assert machines.key(resolve(), MESH | {"fsdp": 2}) != base
    assert machines.key(dataclasses.replace(resolve()), dict(reversed(MESH.items()))) == base
