"""More steps for a run whose learning rate has come down."""

import dataclasses
import json

import numpy as np
import pytest

from jaxlm import config
from jaxlm.config import config_files
from jaxlm.train import start


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
