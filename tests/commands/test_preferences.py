"""DPO and reward models, from the command to what they leave behind."""

import json
import math
import shutil

import numpy as np
import pytest
import tiny_chats

from jaxlm.cli import cli
from jaxlm.run import metrics

SMALL = {
    "train.steps": 4,
    "train.batch_size": 8,
    "train.seq_len": 192,
    "train.eval_every_steps": 2,
    "eval.batch_size": 8,
    "eval.max_examples": 30,
    "optim.warmup_steps": 1,
    "optim.lr": 1e-3,
    "sample.prompts": "()",
    "runs.supervise": "off",
    "log.tensorboard": False,
    "log.every_steps": 1,
    "data.val_fraction": 0.2,
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tiny_chats.base(tmp_path_factory.mktemp("base"))
    tiny_chats.pairs(folder / "pairs.jsonl", 60)
    return folder


def train(kind: str, base, **keys) -> int:
    given = SMALL | {"origin": base, "data.path": base / "pairs.jsonl"}
    given |= {name.replace("__", "."): value for name, value in keys.items()}
    return cli.main(["train", kind, *(f"--config.{key}={value}" for key, value in given.items())])


def test_dpo(base):
    folder = base.parent / "dpo"
    assert train("dpo", base, workdir=folder) == 0
    found = metrics.read(folder / "metrics.jsonl")
    assert found[1]["train/loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert found[1]["train/margin"] == pytest.approx(0, abs=1e-4)
    assert found[0]["val/accuracy"] == 0.5 or abs(found[0]["val/margin"]) < 1e-4  # rounding decides
    assert found[0]["val/loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert found[4]["val/margin"] != pytest.approx(0, abs=1e-4)
    names = {"accuracy", "chosen_logp", "rejected_logp", "chosen_reward", "rejected_reward", "length_margin", "nll"}
    assert {f"train/{name}" for name in names} <= found[4].keys()
    with np.load(folder / "reference.npz") as file:
        assert file["train"].shape[1] == 2
        assert len(file["train"]) + len(file["val"]) == 60
        assert json.loads(str(file["about"])).keys() == {"pairs", "model", "sha256"}


def test_a_run_with_a_loss_that_there_was_is_read_and_not_trained_on(base, tmp_path, capsys):
    loss = "hinge"
    folder = tmp_path / "run"
    shutil.copytree(base.parent / "dpo", folder)
    saved = json.loads((folder / "config.json").read_text())
    saved["dpo"]["loss"] = loss
    (folder / "config.json").write_text(json.dumps(saved))
    assert cli.main(["sample", str(folder), "x", "--config.sample.max_new_tokens=2"]) == 0
    assert cli.main(["report", str(folder)]) == 0
    assert cli.main(["diff", str(folder), str(base.parent / "dpo")]) == 0
    assert loss in capsys.readouterr().out
    there_is = "was removed: choose one of sigmoid, ipo, robust, orpo, simpo"
    for command in (["train", str(folder)], ["plan", str(folder)]):
        assert cli.main(command) == 2
        assert f"config.dpo.loss={loss} {there_is}" in "".join(capsys.readouterr())
    assert cli.main(["train", "dpo", f"--config.dpo.loss={loss}"]) == 2
    assert f"config.dpo.loss={loss} {there_is}" in "".join(capsys.readouterr())


def test_dpo_by_adapter_needs_no_file(base):
    folder = base.parent / "dpo-lora"
    assert train("dpo", base, workdir=folder, adapter__kind="lora", adapter__rank=2, dpo__loss="ipo") == 0
    found = metrics.read(folder / "metrics.jsonl")
    assert found[1]["train/loss"] == pytest.approx(25, abs=1e-3)
    assert found[4]["val/margin"] != 0
    assert not (folder / "reference.npz").exists()
    assert "the margins of these pairs are not used" in (folder / "log.txt").read_text()
    (kept,) = (base / "checkpoints").glob("*.needed")  # the adapter is nothing without it
    assert str(folder) in kept.read_text()


def test_reward(base):
    folder = base.parent / "reward"
    assert train("reward", base, workdir=folder) == 0
    found = metrics.read(folder / "metrics.jsonl")
    assert found[0]["val/accuracy"] == 0.5
    assert found[1]["train/margin"] == 0
    assert found[1]["train/loss"] > math.log(2)  # the pairs have margins
    assert found[4]["val/margin"] != 0
    assert {"val/loss", "val/accuracy", "val/margin"} <= found[4].keys()
    last = (folder / "log.txt").read_text().splitlines()[-1]  # it scores, so there is nothing to sample
    assert f"next: jaxlm train ppo --config.origin=SFT_RUN --config.reward.model={folder} " in last


@pytest.mark.parametrize(
    ("kind", "lines", "said"),
    [
        (
            "dpo",
            [{"prompt": "a", "chosen": "b c", "rejected": "b c"}] * 3,
            "3 of 3 pairs are left out: chosen and rejected",
        ),
        ("reward", [{"prompt": "a", "response": "b"}], "chosen"),
        ("dpo", [], "none of its 0 pairs can be trained on: it has none"),
    ],
)
def test_what_can_not_be_trained_on_is_one_line(base, tmp_path, capsys, kind, lines, said):
    path = tmp_path / "bad.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert train(kind, base, workdir=tmp_path / "run", data__path=path) == 2
    assert said in "".join(capsys.readouterr())
