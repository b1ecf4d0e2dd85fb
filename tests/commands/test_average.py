"""`jaxlm average`: the weights of each way, the table, and the run that it writes."""

import argparse
import json
import shutil
import types

import numpy as np
import pytest
import tiny_data
from tiny_keys import keys

from jaxlm.cli import cli
from jaxlm.commands import average
from jaxlm.config import ConfigError, config_files
from jaxlm.interop import inherit
from jaxlm.train import origin

TINY = keys("""
    model.n_layers=1 model.d_model=16 model.n_heads=2 model.d_ff=32 train.batch_size=8 train.seq_len=16 train.steps=3
    train.eval_every_steps=0 eval.max_mb=0.001 checkpoint.every_steps=1 checkpoint.keep_last=9 runs.supervise=off
    optim.warmup_steps=0 optim.lr=0.05 optim.schedule=constant log.tensorboard=False sample.prompts=()
""")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with at least two checkpoints: each step is a start of its own, so none is skipped."""
    folder = tmp_path_factory.mktemp("trunk")
    tiny_data.make(folder / "data", {"a": 1.0})
    all_keys = TINY | {"workdir": folder / "run", "data.dir": folder / "data"}
    given = [f"--config.{name}={value}" for name, value in all_keys.items()]
    for steps in (1, 2, 3):
        assert cli.main(["train", "base", *given, f"--config.train.steps={steps}"]) == 0
    return folder / "run"


def ways(folder, **flags):
    return average._ways(folder, argparse.Namespace(**{"last": None, "steps": "", "ema": None} | flags))


def test_the_weights_of_each_way(tmp_path):
    for step in (0, 5, 10, 15, 20):
        (tmp_path / f"checkpoints/{step}").mkdir(parents=True)
    for way in ways(tmp_path).values():
        assert sum(way.values()) == pytest.approx(1)
        assert 0 not in way  # the weights of an imported model
    assert set(ways(tmp_path)) == {"last 2", "last 3", "ema 0.5", "ema 0.8"}
    assert ways(tmp_path, last=2) == {"last 2": {15: 0.5, 20: 0.5}}
    assert ways(tmp_path, steps="20,5") == {"average": {5: 0.5, 20: 0.5}}
    moving = 5.0
    for step in (10, 15, 20):
        moving = 0.9 * moving + 0.1 * step
    shares = ways(tmp_path, ema=0.9)["ema 0.9"]
    assert sum(step * share for step, share in shares.items()) == pytest.approx(moving)


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ({"last": 5}, "--last=5: there are 4 checkpoints"),
        ({"last": 1}, "--last=1"),
        ({"steps": "5"}, "--steps=5: two or more of the checkpoints 5, 10, 15, 20"),
        ({"steps": "5,6"}, "--steps=5,6: two or more"),
        ({"steps": "5,x"}, "--steps=5,x: two or more"),
    ],
)
def test_what_is_wrong_is_said(tmp_path, flags, line):
    for step in (5, 10, 15, 20):
        (tmp_path / f"checkpoints/{step}").mkdir(parents=True)
    with pytest.raises(ConfigError, match=line):
        ways(tmp_path, **flags)


def test_one_checkpoint_is_no_average(tmp_path):
    (tmp_path / "checkpoints/5").mkdir(parents=True)
    with pytest.raises(ConfigError, match="has 1 checkpoint, an average needs two"):
        ways(tmp_path)


def test_the_average_is_written_beside_the_run_and_is_one(capsys, run):
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    assert cli.main(["average", str(run), "--steps=1,3", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["checkpoint"] for row in rows] == ["step 1", "step 3", "average"]
    assert len({row["loss"] for row in rows}) == 3
    assert {file: file.read_bytes() for file in before} == before
    leaves = [origin.open(folder, step).leaf("layers_0/mlp/down/kernel") for folder, step in ((run, 1), (run, 3))]
    mean = origin.open(run / "average").leaf("layers_0/mlp/down/kernel")
    np.testing.assert_allclose(mean, (leaves[0] + leaves[1]) / 2, rtol=1e-6, atol=1e-8)
    assert (mean != leaves[0]).any()
    assert cli.main(["eval", f"{run}@average", "--json"]) == 0
    out, err = capsys.readouterr()
    assert f"the average of {run}: average, of the steps 1, 3\n" in err
    measured = {row["metric"]: row["value"] for row in map(json.loads, out.splitlines())}
    halves = rows[-1]["loss_that_chooses"], rows[-1]["loss"]
    assert min(halves) < measured["val/loss"] < max(halves)
    assert cli.main(["average", str(run)]) == 0  # again, by the best of several ways
    assert "wrote" in capsys.readouterr().err


def test_a_full_disk_is_said_before_anything_is_measured(capsys, run, tmp_path, monkeypatch):
    shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("average"))
    monkeypatch.setattr(average, "_evaluator", lambda *given: pytest.fail)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(free=1000))
    before = {*(tmp_path / "run").iterdir()}
    assert cli.main(["average", str(tmp_path / "run"), "--last=2"]) == 1
    assert f"{tmp_path}/run/average needs about " in capsys.readouterr().err
    assert {*(tmp_path / "run").iterdir()} == before


@pytest.mark.parametrize(
    ("better", "said", "command"),
    [
        ("average", "wrote {run}/average: average, of the steps 1, 3\n", "@average"),
        (
            "step 1",
            "wrote {run}/average: average, of the steps 1, 3; it is worse than step 1 alone (2)\n",
            " --checkpoint=1",
        ),
    ],
)
def test_an_average_that_is_worse_than_a_checkpoint_is_said(capsys, run, monkeypatch, better, said, command):
    names = iter(["step 1", "step 3", "average"])
    losses = {True: {"val/even": 2.0, "val/odd": 2.0}, False: {"val/even": 3.0, "val/odd": 3.0}}
    monkeypatch.setattr(average, "_evaluator", lambda *given: lambda params: losses[next(names) == better])
    assert cli.main(["average", str(run), "--steps=1,3"]) == 0
    err = capsys.readouterr().err
    assert said.format(run=run) in err
    assert err.endswith(f"next: jaxlm eval {run}{command}\n")


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--last=2", "--ema=.9"], "--last, --ema and --steps are three ways"),
        (["--steps=1,3", "--ema=.9"], "--last, --ema and --steps are three ways"),
        (["--ema=1.5"], "--ema=1.5: between 0 and 1"),
        (["--ema=1"], "--ema=1: between 0 and 1"),
        (
            ["--config.program=sft"],
            "{run} was trained by sft: averages are chosen by held-out",
        ),
    ],
)
def test_what_can_not_be_averaged_is_one_line(capsys, run, flags, line):
    assert cli.main(["average", str(run), *flags]) == 2
    err = capsys.readouterr().err
    assert line.format(run=run) in err
    assert err.count("\n") == 1


def test_a_path_with_dots_is_as_good_as_another(run, tmp_path, monkeypatch):
    (tmp_path / "deep").mkdir()
    monkeypatch.chdir(tmp_path / "deep")
    shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("average"))
    assert cli.main(["average", "../run", "--last=2"]) == 0
    assert origin.open("../run/average").provenance == {"path": str(tmp_path / "run/average"), "step": 0}


@pytest.mark.parametrize(
    ("verb", "line"),
    [
        ("verify", "{run}/average is an average, and has no steps to replay: jaxlm verify {run}"),
        (
            "train",
            "{run}/average is an average, which has no optimizer: go on with jaxlm train {run}, or branch from",
        ),
    ],
)
def test_an_average_has_no_steps(capsys, run, verb, line):
    assert cli.main(["average", str(run), "--last=2"]) == 0
    capsys.readouterr()
    assert cli.main([verb, f"{run}@average"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert line.format(run=run) in err
    given = config_files.load("base", [f"origin={run}@average"])
    inherit.take(given, [], lambda line: None)
    assert given.origin == str(run / "average")


def test_a_name_with_at(tmp_path):
    assert config_files.at_step("runs/a@average") == ("runs/a/average", "")
    assert config_files.at_step("runs/a@20") == ("runs/a", "20")
    assert config_files.at_step("average") == ("average", "")
