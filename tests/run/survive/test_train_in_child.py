"""A run in a process of its own: what came of it, and what it said. The process itself: tests/commands/test_ladder.py."""

import json
import math
import pathlib

import pytest

from jaxlm import config
from jaxlm.config import ConfigError, config_files
from jaxlm.run import metrics
from jaxlm.run.survive import train_in_child

MIXTURE = {"web": 3.0, "code": 1.0}


def resolve(folder: pathlib.Path, *overrides: str) -> config.Config:
    return config.resolve(config_files.load("quickstart", [f"workdir={folder}", *overrides]))


def write(folder: pathlib.Path, *records: dict) -> None:
    lines = metrics.JsonLines(folder / "metrics.jsonl")
    for record in records:
        lines.write(record)
    lines.close()


def last(step: int = 460, loss: float = 4.5) -> dict:
    found = {"step": step, "val/loss": loss, "wall_s": 360.0}
    for source, nats, length in (("web", 4.0, 3.0), ("code", 6.0, 2.0)):
        found |= {f"val/{source}/loss": nats, f"val/{source}/bits_per_byte": nats / math.log(2) / length}
    return found


def test_a_run_that_is_done_has_its_loss_its_bytes_and_its_hours(tmp_path):
    c = resolve(tmp_path)
    assert train_in_child.result(c, MIXTURE) is None
    write(tmp_path, {"step": 230, "val/loss": 5.0, "wall_s": 180.0})
    assert train_in_child.result(c, MIXTURE) is None  # half of its steps
    write(tmp_path, last())
    found = train_in_child.result(c, MIXTURE)
    assert (found.loss, found.hours) == (4.5, 0.1)
    assert found.bytes_per_token == pytest.approx((3 * 3.0 + 1 * 2.0) / 4)
    assert found.bits_per_byte.keys() == MIXTURE.keys()


def test_a_loss_that_is_not_finite_is_none(tmp_path):
    write(tmp_path, last(loss=math.nan))
    assert train_in_child.result(resolve(tmp_path), MIXTURE).loss is None


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("optim.lr=1e-3", "optim.lr=0.01 where now it is 0.001"),
        ("model.qk_norm=False", "model.qk_norm=True where now it is False"),
        ("loss.z_loss=1e-4", "loss.z_loss=0.0 where now it is 0.0001"),
        ("train.steps=600", "train.steps=460 where now it is 600"),
        ("seed=3", "seed=0 where now it is 3"),
    ],
)
def test_the_folder_of_another_run_is_refused(tmp_path, override, said):
    (tmp_path / "config.json").write_text(config.to_json(resolve(tmp_path)))
    write(tmp_path, last())
    assert train_in_child.result(resolve(tmp_path), MIXTURE)
    other = resolve(tmp_path, override)
    for ask in (train_in_child.train, lambda c: train_in_child.result(c, MIXTURE)):
        with pytest.raises(ConfigError, match=rf"holds another run, with {said}: delete it"):
            ask(other)


def test_what_changes_no_loss_or_is_left_to_the_rule_that_the_run_followed_is_no_other_run(tmp_path):
    (tmp_path / "config.json").write_text(config.to_json(resolve(tmp_path)))
    write(tmp_path, last())
    for keys in (["optim.offload=True", "model.remat=full", "log.every_steps=7"], ["optim.b2=0", "optim.lr=0"]):
        assert train_in_child.result(resolve(tmp_path, *keys), MIXTURE)


def test_a_run_from_before_a_key_existed_has_its_default(tmp_path):
    saved = json.loads(config.to_json(resolve(tmp_path)))
    del saved["optim"]["rates"], saved["model"]["qkv_bias"]
    (tmp_path / "config.json").write_text(json.dumps(saved))
    write(tmp_path, last())
    assert train_in_child.result(resolve(tmp_path), MIXTURE)
    with pytest.raises(ConfigError, match=r"with optim\.lr=0\.01"):
        train_in_child.result(resolve(tmp_path, "optim.lr=9"), MIXTURE)


def test_the_last_words_are_the_last_line(tmp_path):
    assert train_in_child.last_words(tmp_path) == ""
    (tmp_path / train_in_child.OUTPUT).write_text("x" * 5000 + "\nbefore\njaxlm: out of memory\n\n")
    assert train_in_child.last_words(tmp_path) == "jaxlm: out of memory"


@pytest.mark.parametrize("text", ["", '{"train"', "[]"])
def test_a_config_that_was_never_written_down_is_no_other_run(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    write(tmp_path, last())
    assert train_in_child.result(resolve(tmp_path), MIXTURE).loss == 4.5
