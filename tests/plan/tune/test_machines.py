"""This machine's row: measured once, kept in a file, which may be damaged, missing or read-only, and never in the way."""

import dataclasses
import json
import os
import time

import jax
import pytest

from jaxlm import config
from jaxlm.config import config_files
from jaxlm.devices import sharding
from jaxlm.host import files
from jaxlm.host.child import Died
from jaxlm.models import hardware
from jaxlm.plan import flops, lower
from jaxlm.plan.tune import machines, tune

TINY = {"n_layers": 1, "d_model": 32, "n_heads": 2, "d_ff": 64, "vocab_size": 128, "attention": "xla"}


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))


def resolve(*overrides: str) -> config.Config:
    tiny = [f"model.{key}={value}" for key, value in TINY.items()]
    keys = ["data.path=x", "train.batch_size=16", "train.seq_len=16"]
    keys += ["hardware.compile_cache=", "hardware.usd_per_hour=2"]
    return config.resolve(config_files.load("base", [*keys, *tiny, *overrides]))


def test_a_process_of_its_own_measures_and_the_next_plan_is_instant(monkeypatch):
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "true")
    c = resolve()
    first = machines.row(c)
    assert (first["kind"], first["by"], first["what"], first["fits"]) == ("cpu", "plan", "", True)
    assert first["tokens_per_second"] > 0
    assert first["usd"] is None  # the config's price is not that of a CPU
    monkeypatch.setattr(machines, "Child", None)  # no process can be started any more
    assert machines.row(c)["tokens_per_second"] == first["tokens_per_second"]
    machines.record("cpu", first["count"], first["setting"], 123.0, "train")
    again = machines.row(c)
    assert (again["tokens_per_second"], again["by"], again["fits"]) == (123.0, "train", True)


def test_what_was_measured_before_is_not_measured_again():
    c = resolve()
    mesh = sharding.make_mesh(c.mesh)
    setting = machines.key(dataclasses.replace(c, model=hardware.for_platform(c.model, "cpu")), mesh.shape)
    machines.record("cpu", mesh.size, setting, 99.0, "train")
    (found,) = machines.measure(c)
    assert (found["setting"], found["tokens_per_second"]) == (setting, None)


@pytest.mark.parametrize("override", ["plan.measure=never", "distributed.coordinator=host:1"])
def test_where_it_is_not_asked_or_several_processes_run_nothing_starts(monkeypatch, override):
    monkeypatch.setattr(machines, "Child", None)
    extra = ["distributed.num_processes=2", "distributed.process_id=0"] if "coordinator" in override else []
    found = machines.row(resolve(override, *extra))
    assert set(found) == {"why"}
    assert ("several processes" in found["why"]) == bool(extra)


def test_a_gpu_that_computes_is_left_alone(monkeypatch, tmp_path):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 4242\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert machines.row(resolve()) == {"why": "its GPU is in use (process 4242)"}


FOUND = {"kind": "cpu", "count": 1, "setting": "s", "microbatch": 16, "memory": 1e9, "needed": 4e9, "by": "plan"}
FOUND |= {"tokens_per_second": 5.0, "what": "1 x 16 tokens", "time": 0.0}


def printed(monkeypatch, *found: dict, end: Exception | None = None) -> list[str]:
    """Lets the process that measures tell this, and end so; returns a list that grows by each start."""
    starts = []

    class Told:
        def __init__(self, function):
            starts.append(function)
            self.messages = iter(found)

        def send(self, config, timeout_s):
            pass

        def receive(self, timeout_s):
            for message in self.messages:
                return message
            raise end or Died(0, "")

        def end(self):
            pass

    monkeypatch.setattr(machines, "Child", Told)
    return starts


def test_a_cpus_memory_is_that_of_now(monkeypatch):
    starts = printed(monkeypatch, FOUND)
    c = resolve()
    for free, fits in ((2e9, False), (8e9, True), (3e9, False)):
        monkeypatch.setattr(lower, "available_bytes", lambda free=free: free)
        row = machines.row(c)
        assert (row["memory"], row["fits"]) == (tune.HEADROOM * free, fits)
    assert machines.row(resolve("tune.memory_gb=5"))["memory"] == 5e9
    assert len(starts) == 1


def test_a_gpus_memory_is_its_own(monkeypatch):
    printed(monkeypatch, FOUND | {"kind": "NVIDIA H200"})
    monkeypatch.setattr(lower, "available_bytes", lambda: 8e9)
    assert machines.row(resolve())["memory"] == 1e9


def test_a_damaged_entry_is_measured_anew(monkeypatch):
    starts = printed(monkeypatch, FOUND)
    c = resolve()
    machines.row(c)
    machines.remember(machines._key(c), {})
    assert machines.row(c)["tokens_per_second"] == 5.0
    assert len(starts) == 2


def test_it_says_what_it_is_about_to_do(monkeypatch, capsys):
    printed(monkeypatch, FOUND)
    machines.row(resolve())
    assert "--config.plan.measure=never leaves it out" in capsys.readouterr().err
    machines.row(resolve())
    assert capsys.readouterr().err == ""


def test_a_measurement_takes_half_of_what_is_free_on_a_cpu(monkeypatch):
    limits = []

    def timed(config, mesh, limit):
        limits.append(limit)
        return tune.Trial(tune.own(config, 1, "none"), tokens_per_second=1.0, predicted_bytes=1)

    monkeypatch.setattr(machines, "_timed", timed)
    monkeypatch.setattr(machines.tune, "product", lambda dtype: 1e12)
    monkeypatch.setattr(lower, "available_bytes", lambda: 8e9 * jax.local_device_count())
    *_, found = machines.measure(resolve("plan.measure=again"))
    assert found["memory"] == tune.HEADROOM * 8e9
    *_, found = machines.measure(resolve("plan.measure=again", "tune.memory_gb=2"))
    assert found["memory"] == tune.HEADROOM * 8e9
    assert limits == [4e9, 2e9]


def test_a_reason_is_kept_too(monkeypatch):
    """A measurement that failed would fail each time, and take its time."""
    c = resolve()
    printed(monkeypatch, end=Died(1, "Killed"))
    assert machines.row(c)["why"].startswith("measuring ended with code 1: Killed")
    monkeypatch.setattr(machines, "Child", None)
    assert "plan.measure=again" in machines.row(c)["why"]


def test_what_was_found_before_the_time_was_up_counts(monkeypatch):
    starts = printed(monkeypatch, FOUND, FOUND | {"needed": None}, end=TimeoutError())
    row = machines.row(resolve())
    assert (row["tokens_per_second"], row["fits"]) == (5.0, None)
    printed(monkeypatch, end=TimeoutError())
    assert machines.row(resolve("train.batch_size=8"))["why"].startswith("measuring took over 90 seconds")
    assert len(starts) == 1


def test_what_takes_too_long_is_made_smaller():
    c = resolve("train.microbatch_size=8", "train.seq_len=1024", "model.n_layers=8")
    step = flops.flops_per_token(c.model, 1024).causal * 16 * 1024
    assert machines.affordable(c, 1, step) is c
    half = machines.affordable(c, 1, step / 2)
    assert (half.train.batch_size, half.train.microbatch_size, half.model.n_layers) == (8, 8, 8)
    row = machines.affordable(c, 2, step / 16)
    assert (row.train.batch_size, row.train.microbatch_size) == (2, 2)
    least = machines.affordable(c, 1, 1)
    assert (least.train.batch_size, least.model.n_layers, least.train.seq_len) == (1, 2, machines.TOKENS)
    assert machines.described(least, c) == "2 of 8 layers, 1 x 256 tokens"


def test_memory_from_one_and_two_layers():
    c = resolve("model.n_layers=3")
    c = dataclasses.replace(c, model=hardware.for_platform(c.model, "cpu"))
    mesh = sharding.make_mesh(c.mesh, jax.devices()[:1])
    whole = lower.memory_of(lower.parts_of(c, mesh).lower().compile(compiler_options=lower.QUICK))
    assert machines.needed(c, mesh) == pytest.approx(whole, rel=0.05)


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


def test_the_median_of_what_was_measured(tmp_path):
    for speed, by in ((100.0, "tune"), (300.0, "train"), (110.0, "doctor")):
        machines.record("NVIDIA H200", 8, "k", speed, by)
    known = machines.known("NVIDIA H200", 8, "k")
    assert (known["tokens_per_second"], known["measurements"], known["by"]) == (110.0, 3, "doctor")
    assert abs(known["time"] - time.time()) < 60
    assert machines.known("NVIDIA H200", 4, "k") is None
    assert machines.known("NVIDIA H200", 8, "other") is None
    assert list(json.loads(machines.path().read_text())) == ["NVIDIA H200 x 8"]
    assert machines.path() == tmp_path / ".cache/jaxlm/machines.json"


def test_what_plan_measured_counts_where_nobody_else_did():
    for speed in (50.0, 60.0):
        machines.record("cpu", 1, "k", speed, "plan")
    known = machines.known("cpu", 1, "k")
    assert (known["tokens_per_second"], known["measurements"]) == (60.0, 1)  # the newer in place of the older
    machines.record("cpu", 1, "k", 100.0, "train")
    assert machines.known("cpu", 1, "k")["tokens_per_second"] == 100.0


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
    assert known["measurements"] == machines.MOST
    assert known["tokens_per_second"] == 10 + (machines.MOST + 1) / 2


@pytest.mark.parametrize("speed", [0.0, -1.0, float("nan"), float("inf")])
def test_no_speed_is_not_recorded(speed):
    machines.record("cpu", 1, "k", speed, "train")
    assert machines.known("cpu", 1, "k") is None


def test_a_speed_is_of_as_many_cores(monkeypatch):
    """A sweep's runs train on some of a CPU's cores each; what they measure is not the speed of a run on all."""
    machines.record("cpu", 1, "k", 7.0, "train")
    monkeypatch.setattr(files, "cores", lambda: 1 + os.cpu_count())
    assert machines.known("cpu", 1, "k") is None


DAMAGED = """
{
[]
{"H100 x 1": 5}
{"plans": 5}
{"H100 x 1": {"k": 5}}
{"H100 x 1": {"k": [5, {}, {"tokens_per_second": "x", "by": "train", "time": 1}]}}
{"H100 x 1": {"k": [{"tokens_per_second": NaN, "by": "train", "time": 1}]}}"""


@pytest.mark.parametrize("content", [*DAMAGED.split("\n"), "\0\0"])
def test_a_damaged_file_is_a_machine_that_is_not_known(content):
    machines.path().parent.mkdir(parents=True)
    machines.path().write_text(content)
    assert machines.known("H100", 1, "k") is None
    machines.record("H100", 1, "k", 7.0, "train")
    assert machines.known("H100", 1, "k")["tokens_per_second"] == 7.0


def test_a_home_that_can_not_be_written_is_no_error(tmp_path):
    (tmp_path / ".cache").write_text("a file in place of the folder")
    machines.record("cpu", 1, "k", 7.0, "train")
    assert machines.known("cpu", 1, "k") is None
    assert os.listdir(tmp_path) == [".cache"]


def test_the_key_is_of_what_makes_a_step_fast_or_slow():
    base = machines.key(resolve(), MESH)
    assert len(base) == 16
    same = resolve("optim.lr=1e-4", "train.steps=5000", "seed=3", "checkpoint.every_steps=7")
    assert machines.key(same, MESH) == base
    for changed in ("train.seq_len=256", "model.remat=full", "train.microbatch_size=8", "optim.name=muon"):
        assert machines.key(resolve(changed), MESH) != base, changed
    assert machines.key(resolve(), MESH | {"fsdp": 2}) != base
    assert machines.key(dataclasses.replace(resolve()), dict(reversed(MESH.items()))) == base
