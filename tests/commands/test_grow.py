"""`jaxlm grow`: a larger model that begins at the smaller one's loss, trains on, and says where it is from."""

import json
import shutil

import numpy as np
import pytest
import tiny_data
from tiny_keys import keys

from jaxlm import config
from jaxlm.cli import cli
from jaxlm.config import config_files
from jaxlm.devices import tree
from jaxlm.models import growth
from jaxlm.run import lineage, metrics
from jaxlm.run.checkpoints import keep
from jaxlm.train import origin

TINY = keys("""
    model.n_layers=1 model.d_model=16 model.n_heads=2 model.n_kv_heads=1 model.d_ff=24 train.batch_size=8 train.seq_len=16
    train.eval_every_steps=0 eval.max_mb=0.0005 eval.at_start=True checkpoint.every_steps=0 runs.supervise=off
    optim.warmup_steps=0 optim.schedule=constant optim.lr=0.01 log.tensorboard=False sample.prompts=() model.qk_norm=True
""")
LARGER = keys("model.n_layers=2 model.d_model=18 model.n_heads=4 model.n_kv_heads=2 model.head_dim=8 model.d_ff=40")


def flags(**folders) -> list[str]:
    return [f"--config.{key}={value}" for key, value in (TINY | folders).items()]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The config and the data of a run, without a checkpoint: what is refused needs no more."""
    root = tmp_path_factory.mktemp("grow")
    tiny_data.make(root / "data", {"a": 1.0})
    given = [
        f"{key}={value}"
        for key, value in (
            TINY | {"model.vocab_size": 300, "workdir": root / "small", "data.dir": root / "data"}
        ).items()
    ]
    (root / "small").mkdir()
    (root / "small/config.json").write_text(config.to_json(config.resolve(config_files.load("base", given))))
    return root / "small"


def grow(small, out, **more) -> list[str]:
    return ["grow", "base", *flags(**LARGER | {"origin": small, "workdir": out} | more)]


def params_of(run, step: int) -> dict:
    opened = origin.open(run, step)
    names = opened.meta()["digests"]
    return {name: opened.leaf(name) for name in (n.removeprefix("params/") for n in names if n.startswith("params/"))}


@pytest.mark.recipe
def test_it_begins_at_the_loss_of_the_smaller_model_and_every_new_part_moves(small, tmp_path, capsys):
    run, small, out = small, tmp_path / "small", tmp_path / "large"
    shutil.copytree(run, small)
    assert cli.main(["train", str(small), "--config.train.steps=8"]) == 0
    assert cli.main(grow(small, out)) == 0
    said = capsys.readouterr().err
    assert "n_layers 1 -> 2, d_model 16 -> 18, n_heads 2 -> 4, n_kv_heads 1 -> 2, d_ff 24 -> 40" in said
    assert "to grow pays from" in said
    assert f"next: jaxlm train {out}" in said
    assert keep.imported(out / "checkpoints")
    assert json.loads((out / "run.json").read_text())["starts"][0]["ended"]["why"].startswith(
        f"grown from {small}, step 8: "
    )
    begun, moved = params_of(out, 0), tmp_path / "moved"
    shutil.move(out, moved)
    assert cli.main(["train", str(moved), "--config.train.steps=20", "--config.optim.rates=('new/.* 2','.* 0.5')"]) == 0
    assert "new/.*" in capsys.readouterr().err
    before = metrics.held_out_losses(small / "metrics.jsonl", [])
    after = metrics.held_out_losses(moved / "metrics.jsonl", [])
    assert after[0] == pytest.approx(before[8], abs=1e-4)
    trained = params_of(moved, 20)
    for name, old in growth.old_parts(tree.nested(trained.items()), (1, 16, 2, 1, 24, 300)).items():
        moves = np.abs(trained[name] - begun[name])
        moves[tuple(slice(size) for size in old or (0,))] = 0  # what is old
        assert moves.any() == (old != moves.shape), name
    assert [run.folder for run in lineage.origins(moved)] == [small]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model.d_ff", 16, "model.d_ff=16 is smaller than the 24 of"),
        ("model.n_kv_heads", 4, "a key-value head must serve as many query heads as in"),
        ("model.head_dim", 16, "config.model.head_dim=16, but the origin's model has 8: leave it out"),
        ("model.qk_norm", False, "config.model.qk_norm=False, but the origin's model has True"),
        ("origin_state", True, "grow takes the weights alone"),
        ("optim.lr", 0, "optim.lr=0 is the rule for new weights"),
        ("origin", "", "grow takes a config of the larger model, and the smaller run"),
        ("origin", "nowhere", "no folder nowhere"),
        ("workdir", "SMALL", "holds a run or a model already"),
    ],
)
def test_what_can_not_grow_is_one_line(small, tmp_path, capsys, key, value, message):
    value = small if value == "SMALL" else value
    assert cli.main(grow(small, tmp_path / "large", **{key: value})) == 2
    said = capsys.readouterr().err
    assert message in said
    assert "Traceback" not in said
    assert not (tmp_path / "large").exists()


def test_a_model_of_the_same_size_is_no_growth(small, tmp_path, capsys):
    assert cli.main(["grow", "base", *flags(origin=small, workdir=tmp_path / "same")]) == 2
    assert "is as large as that of" in capsys.readouterr().err
