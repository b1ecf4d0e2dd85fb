"""What a run says when it starts."""

import dataclasses
import json
import time

import jax
import pytest

from jaxlm import config, config_files, models, sharding
from jaxlm.config import MeshConfig
from jaxlm.models import hardware
from jaxlm.train import clock, ledger, metrics, start


def test_a_start_names_model_devices_and_length(capsys):
    keys = ["workdir=w", "model.n_layers=3", "train.steps=1000", "train.batch_size=8", "train.seq_len=128"]
    c = config.resolve(config_files.load("quickstart", keys))
    model = hardware.for_platform(c.model, "cpu")
    params = models.abstract_params(models.build(model, model.attention))
    mesh = sharding.make_mesh(MeshConfig(data=1, fsdp=-1, tensor=1, context=1))
    start.announce(dataclasses.replace(model, remat="none"), c.train, {"params": params}, mesh, done=7)
    said = capsys.readouterr().err
    assert (
        "parameters; 8 x cpu (data 1 x fsdp 8 x context 1 x tensor 1); attention blocked, float32, remat none" in said
    )
    assert "resuming at step 7, to step 1000: 1.02M tokens, 1,024 a step" in said
    assert "layers/attn" in said
    assert "layers_0" not in said


def test_layers_are_stacked():
    leaf = jax.ShapeDtypeStruct((4, 2), "float32")
    stacked = start.stacked_shapes({"embed": leaf, "layers_0": {"w": leaf}, "layers_1": {"w": leaf}})
    assert stacked == {"embed": leaf, "layers": {"w": jax.ShapeDtypeStruct((2, 4, 2), "float32")}}


def test_a_start_is_in_the_books_from_its_begin_to_its_close(tmp_path):
    c = config.resolve(config_files.load("quickstart", [f"workdir={tmp_path}", "hardware.usd_per_hour=3600"]))
    mesh = sharding.make_mesh(MeshConfig(data=1, fsdp=-1, tensor=1, context=1))
    for done in (0, 20):
        spent = clock.Clock()
        with start.Log(tmp_path, spent, c.train, c.hardware) as log:
            assert spent.redo == (30 if done else 0)
            recorder = log.begin(c, c, "0", mesh, done, [])
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
    wall_s, usd = start.Log(tmp_path, clock.Clock(), c.train, free).spent(0.0)
    assert wall_s == pytest.approx(150, abs=1)
    assert usd == pytest.approx(150, abs=1)
    assert not ledger.read(tmp_path)["starts"]
