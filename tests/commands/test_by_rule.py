"""A run whose rate and b2 are by rule: it says them, writes them down, and keeps them when it goes on or branches."""

import json
import re

import pytest
import tiny_data
from tiny_keys import keys

from jaxlm.cli import cli
from jaxlm.run import metrics

TINY = keys("""
    model.n_layers=1 model.d_model=16 model.n_heads=2 model.d_ff=16 train.batch_size=8 train.seq_len=16
    train.eval_every_steps=0 eval.max_mb=0.0005 checkpoint.every_steps=2 runs.supervise=off optim.warmup_steps=0
    optim.schedule=constant optim.lr=0.0 optim.b2=0.0 log.every_steps=1 log.tensorboard=False sample.prompts=()
""")


def train(capsys, *argv: str) -> str:
    assert cli.main(["train", *argv]) == 0
    return capsys.readouterr().err


def rates(run) -> tuple[float, float]:
    optim = json.loads((run / "config.json").read_text())["optim"]
    return optim["lr"], optim["b2"]


def test_by_rule_and_kept(tmp_path, capsys):
    tiny_data.make(tmp_path / "data", {"a": 1.0})
    run = tmp_path / "run"
    all_keys = TINY | {"workdir": run, "data.dir": tmp_path / "data"}
    given = ["--config=base", *(f"--config.{name}={value}" for name, value in all_keys.items())]
    said = train(capsys, *given, "--config.train.steps=4")
    assert "too high" not in said
    lr, b2 = rates(run)
    assert f"by rule: optim.lr {lr:g} (Step Law" in said
    assert f"by rule: optim.b2 {b2:g} (" in said
    choices = json.loads((run / "run.json").read_text())["starts"][0]["choices"]
    assert (choices["lr"], choices["b2"]) == (lr, b2)
    used = [r["train/lr"] for r in metrics.records(run / "metrics.jsonl") if "train/lr" in r]
    assert used == pytest.approx([lr] * 4)
    # 500 times the tokens, for which the rule would be another one.
    said = train(capsys, *given, "--config.train.steps=6", "--config.optim.schedule_steps=2000")
    assert f"by rule, as this run began: optim.lr {lr:.4g}, optim.b2 {b2:.4g}" in said
    assert "optim.lr was" not in said
    assert rates(run) == (lr, b2)
    train(capsys, str(run), "--branch=decay", "--steps=2")
    assert rates(tmp_path / "run-decay-6") == (lr, b2)


def test_a_rate_far_above_its_rule_is_told_once_where_a_run_begins(tmp_path, capsys):
    tiny_data.make(tmp_path / "data", {"a": 1.0})
    all_keys = TINY | {"workdir": tmp_path / "run", "data.dir": tmp_path / "data", "optim.lr": 5.0}
    given = ["--config=base", *(f"--config.{name}={value}" for name, value in all_keys.items())]
    said = train(capsys, *given, "--config.train.steps=4")
    assert re.search(r"optim\.lr=5: [0-9.]+ times too high for adamw by Step Law, .* and the run may diverge", said)
    assert "too high" not in train(capsys, *given, "--config.train.steps=6")


def test_a_run_that_would_learn_nothing_is_refused_before_there_is_data(capsys, tmp_path):
    given = TINY | {"optim.lr": 0.01, "optim.schedule": "linear", "optim.final_lr_ratio": 0.0, "train.steps": 1}
    argv = [f"--config.{key}={value}" for key, value in (given | {"workdir": tmp_path / "run"}).items()]
    assert cli.main(["train", "quickstart", *argv]) == 2
    assert "jaxlm: no step from 1 to train.steps=1 has a learning rate above 0" in capsys.readouterr().err
    assert not (tmp_path / "run/data").exists()
