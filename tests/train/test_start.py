"""What a start writes into the books, and what it says of more steps for a run whose learning rate has come down."""

import dataclasses
import json
import time
import types

import numpy as np
import pytest

from jaxlm import config
from jaxlm.config import ConfigError, MeshConfig, RunError, config_files
from jaxlm.devices import sharding
from jaxlm.plan import settle
from jaxlm.run import clock, ledger, metrics, spent
from jaxlm.run.metrics import Scores
from jaxlm.train import recorder, start

DATA = types.SimpleNamespace(sha256="0")


def test_a_start_is_in_the_books_from_its_begin_to_its_close(tmp_path):
    c = config.resolve(config_files.load("quickstart", [f"workdir={tmp_path}", "hardware.usd_per_hour=3600"]))
    mesh = sharding.make_mesh(MeshConfig(data=1, fsdp=-1, tensor=1, context=1))
    for done in (0, 20):
        spent = clock.Clock()
        with start.Log(tmp_path, spent, c.train, c.hardware) as log:
            assert spent.redo == (30 if done else 0)
            recorder = log.begin(settle.Settled(c, c), DATA, mesh, done, Scores(c.checkpoint))
            for step in range(done + 1, 31):
                spent.after(step)
                recorder.add(step, "made up", {"train/loss": 1.0})
            closing = spent.seconds()
        records = list(metrics.records(tmp_path / "metrics.jsonl"))
        assert records[-1]["time/step_s"] >= round(closing["step"], 3)
        assert records[-1]["step"] == 30
    assert [r["step"] for r in records] == [0, 0, *range(1, 31), 30, 30, 20, *range(21, 31), 30]
    assert [r["wall_s"] for r in records] == sorted(r["wall_s"] for r in records)
    assert records[-1]["cost_usd"] == pytest.approx(records[-1]["wall_s"], abs=1e-3)
    assert records[-1]["time/repeated_s"] > 0
    assert [s["step"] for s in ledger.read(tmp_path)["starts"]] == [0, 20]
    assert len(list((tmp_path / "tensorboard").iterdir())) == 2


def test_a_start_that_dies_before_its_first_step_is_paid_for(tmp_path):
    """It makes data or compiles, and is killed: no entry in run.json, and no step."""
    c = config.resolve(config_files.load("quickstart", [f"workdir={tmp_path}", "hardware.usd_per_hour=3600"]))
    start.Log(tmp_path, clock.Clock(since=time.monotonic() - 50.0), c.train, c.hardware)
    (record,) = metrics.records(tmp_path / "metrics.jsonl")
    assert (record["step"], record["tokens"]) == (0, 0)
    assert record["cost_usd"] == pytest.approx(50, abs=1)
    record["time"] -= 100.0  # that long ago
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    free = dataclasses.replace(c.hardware, usd_per_hour=0.0)
    wall_s, usd = start.Log(tmp_path, clock.Clock(), c.train, free).spent()
    assert wall_s == pytest.approx(150, abs=1)
    assert usd == pytest.approx(150, abs=1)
    assert not ledger.read(tmp_path)["starts"]


def test_what_changed_is_said_and_kept(tmp_path, capsys):
    mesh = sharding.make_mesh(MeshConfig(data=1, fsdp=-1, tensor=1, context=1))
    for keys in ([], ["optim.lr=0.0001", "hardware.usd_per_hour=2"]):
        c = config.resolve(config_files.load("quickstart", [f"workdir={tmp_path}", *keys]))
        with start.Log(tmp_path, clock.Clock(), c.train, c.hardware) as log:
            log.begin(settle.Settled(c, c), DATA, mesh, 0, Scores(c.checkpoint))
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("changed")]
    assert said == ["changed since the last start: optim.lr was 0.01, is 0.0001; hardware.usd_per_hour was 0, is 2"]
    kept = [s["changed"] for s in ledger.read(tmp_path)["starts"]]
    assert kept[0] == []
    assert {"name": "optim.lr", "was": 0.01, "is": 0.0001} in kept[1]


@pytest.mark.parametrize(
    ("keys", "says"), [(("model.tie_embeddings=False",), True), ((), False), (("model.tie_embeddings=False",), False)]
)
def test_a_run_of_an_older_version_is_told_that_its_mfu_steps(tmp_path, says, keys):
    before = {} if says or not keys else {"flops_per_token": 1e9}
    (tmp_path / "run.json").write_text(
        json.dumps({"starts": [before], "phases": [], "passed_over": [], "rollbacks": []})
    )
    c = config.resolve(
        config_files.load("quickstart", ["workdir=w", "hardware.peak_tflops=1", "model.vocab_size=512", *keys])
    )
    line = recorder.recounted(tmp_path, c)
    assert line.startswith("MFU steps down here") is says
    assert bool(line) is says


@pytest.mark.parametrize(
    ("error", "steps", "counts"),
    [(ConfigError, 0, False), (ConfigError, 1, True), (RunError, 0, True), (None, 0, True)],
    ids=["refused", "refused while it trained", "failed", "died"],
)
def test_the_time_after_a_refused_try_is_not_the_run_s(tmp_path, error, steps, counts):
    c = config.resolve(config_files.load("base", ["data.path=x"]))
    counted = clock.Clock()
    log = start.Log(tmp_path, counted, c.train, c.hardware)
    counted.step = steps
    log.closed_by(error)
    path = tmp_path / "metrics.jsonl"
    past = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(record | {"time": record["time"] - 1000.0}) + "\n" for record in past))
    earlier = spent.carry_on(tmp_path, clock.Clock())
    assert (earlier.wall_s > 900) == counts


@pytest.fixture
def run(tmp_path):
    """(folder of a run of 4,000 steps with a loss that falls as a power law, its config) by schedule."""

    def make(schedule: str, **optim):
        keys = [f"workdir={tmp_path}", "data.path=x", "train.steps=4000", f"optim.schedule={schedule}"]
        keys += [f"optim.{key}={value}" for key, value in optim.items()]
        c = config.resolve(config_files.load("base", keys))
        (tmp_path / "config.json").write_text(config.to_json(c))
        rng = np.random.default_rng(0)
        rates = start.rate(c.optim, 4000)(np.arange(1, 4001)) / c.optim.lr
        losses = 2.5 + 4 * np.cumsum(rates) ** -0.3 + 0.1 * rates + 0.005 * rng.normal(size=4000)
        lines = [json.dumps({"step": step, "train/loss": losses[step - 1]}) for step in range(10, 4001, 10)]
        (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        return tmp_path, c

    return make


def longer(c: config.Config, steps: int) -> config.Config:
    return dataclasses.replace(c, train=dataclasses.replace(c.train, steps=steps))


def test_a_cosine_that_is_stretched_says_by_how_much_rate_and_loss_rise(run):
    folder, c = run("cosine")
    line = start.jump(folder, longer(c, 8000), 4000)
    assert line.startswith(
        "train.steps was 4,000 and is 8,000: cosine is stretched, and the learning rate jumps from 0.0001 to "
    )
    now, peak = (float(word) for word in line.split("the loss rises from ")[1].split(", ")[0].split(" to "))
    assert 0.01 < peak - now < 0.2
    assert "optim.schedule=wsd" in line
    assert "--branch=decay" in line
    assert "\n" not in line


def test_a_rate_that_has_come_down_to_zero_jumps_too(run):
    folder, c = run("linear", final_lr_ratio=0.0)
    line = start.jump(folder, longer(c, 8000), 4000)
    assert "linear is stretched, and the learning rate jumps from 0 to " in line
    now, peak = (float(word) for word in line.split("the loss rises from ")[1].split(", ")[0].split(" to "))
    assert 0.01 < peak - now < 0.5


def test_what_does_not_jump_says_nothing(run):
    folder, c = run("cosine")
    assert start.jump(folder, c, 4000) == ""
    assert start.jump(folder, longer(c, 3900), 3000) == ""
    assert start.jump(folder, longer(c, 5000), 0) == ""
    assert start.jump(folder / "new", longer(c, 5000), 4000) == ""
    kept = dataclasses.replace(longer(c, 5000), optim=dataclasses.replace(c.optim, schedule_steps=4000))
    assert start.jump(folder, kept, 4000) == ""
    folder, c = run("wsd")
    assert start.jump(folder, longer(c, 5000), 3000) == ""  # before its decay
    assert "wsd is stretched" in start.jump(folder, longer(c, 5000), 4000)
    folder, c = run("constant")
    assert start.jump(folder, longer(c, 5000), 4000) == ""


def test_without_losses_the_rate_alone_is_told(run):
    folder, c = run("cosine")
    (folder / "metrics.jsonl").unlink()
    assert "forecast" not in start.jump(folder, longer(c, 5000), 4000)
