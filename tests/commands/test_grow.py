"""`jaxlm grow`: a larger model that begins at the smaller one's loss, trains on, and says where it is from."""

import json
import shutil

import numpy as np
import pytest
import tiny_data
from tiny_keys import keys

from jaxlm import config
from jaxlm.cli import cli
from jaxlm.commands import grow as grow_command
from jaxlm.config import config_files
from jaxlm.devices import tree
from jaxlm.models import growth
from jaxlm.ops import quantize
from jaxlm.run import lineage, metrics
from jaxlm.run.checkpoints import keep, store
from jaxlm.train import origin

TINY = keys("""
    model.n_layers=1 model.d_model=16 model.n_heads=2 model.n_kv_heads=1 model.d_ff=24 train.batch_size=8 train.seq_len=16
    train.eval_every_steps=0 eval.max_mb=0.0005 eval.at_start=True checkpoint.every_steps=0 runs.supervise=off
    optim.warmup_steps=0 optim.schedule=constant optim.lr=0.01 log.tensorboard=False sample.prompts=() model.qk_norm=True
""")
EIGHT = ("codes", "exponents")
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
def test_it_begins_at_the_loss_of_the_smaller_model_and_every_new_part_moves(small, tmp_path, capsys, monkeypatch):
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
    monkeypatch.chdir(small)
    assert cli.main(grow("../small", "../dotted")) == 0
    assert "grown: " in capsys.readouterr().err
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


def test_the_data_of_the_origin_is_named_where_the_config_has_none(small, tmp_path):
    """Not where the config's own folder is there, or texts for it are named."""

    def next_flag(*more: str) -> str:
        return grow_command._data_of_origin(config.resolve(config_files.load("base", [f"origin={small}", *more])))

    assert next_flag(f"data.dir={tmp_path}/none") == f" --config.data.dir={small.parent}/data"
    assert not next_flag(f"data.dir={tmp_path}")
    assert not next_flag(f"data.dir={tmp_path}/none", "data.path=x.txt")


MOMENTS = {"adamw": "0/mu", "adamw8bit": "0/mu", "muon": "0/inner_states/muon/inner_state/0/mu"}
UP = "layers_0/mlp/up/kernel"  # from 16 x 128 to 18 x 192; in eight bits in blocks of 128 and 192


@pytest.mark.recipe
@pytest.mark.parametrize(("name", "beta"), [("adamw", 0.9), ("adamw8bit", 0.9), ("muon", 0.95)])
def test_moments_of_the_old_part_are_carried_over(small, tmp_path, name, beta):
    """After a first step they are `beta` times the smaller run's, more than those of a run that begins empty."""
    run, small, own = small, tmp_path / "small", {"optim.name": name}
    shutil.copytree(run, small)
    wide = [f"--config.{key}={value}" for key, value in (own | {"model.d_ff": 128, "train.steps": 8}).items()]
    assert cli.main(["train", str(small), *wide]) == 0
    own |= {"model.d_ff": 192}
    assert cli.main(grow(small, tmp_path / "carried", origin_state=True, **own)) == 0
    assert cli.main(grow(small, tmp_path / "empty", **own)) == 0
    saved = config_files.from_run(tmp_path / "carried/config.json")
    assert (saved.origin_state, saved.optim.grown_from) == (False, (1, 16, 2, 1, 128, 300))

    def moment(run, step: int, item: str, of: str = MOMENTS[name]) -> np.ndarray:
        read = store.reader(tmp_path / run / "checkpoints" / str(step), item)
        if name != "adamw8bit" or not of.endswith("mu"):
            return read(f"opt_state/{of}" + f"/{UP}" * of.endswith("mu"))
        return np.array(quantize.decode(quantize.Blocked(*(read(f"opt_state/{of}/{UP}/{x}") for x in EIGHT))))

    old, carried = moment("small", 8, "train"), moment("carried", 0, "moments")
    assert old.any()
    np.testing.assert_allclose(carried[:16, :128], old, atol=2**-14 * np.abs(old).max(), rtol=0)
    carried[:16, :128] = 0
    assert not carried.any()
    for folder in ("carried", "empty"):
        assert cli.main(["train", str(tmp_path / folder), "--config.train.steps=1"]) == 0
    count = MOMENTS[name].removesuffix("mu") + "count"
    assert [int(moment(folder, 1, "train", count)) for folder in ("carried", "empty")] == [9, 1]
    more = moment("carried", 1, "train") - moment("empty", 1, "train")
    wanted = np.zeros((18, 192), np.float32)
    wanted[:16, :128] = beta * old
    coarse = 2**-3 if name == "adamw8bit" else 1e-4
    np.testing.assert_allclose(more, wanted, atol=coarse * np.abs(moment("carried", 1, "train")).max(), rtol=0)
    # Other programs read the weights alone.
    assert origin.open(tmp_path / "carried", 0).trained() == {}


@pytest.mark.recipe
def test_moments_of_another_form_are_refused(small, tmp_path, capsys):
    run, small = small, tmp_path / "small"
    shutil.copytree(run, small)
    assert cli.main(["train", str(small), "--config.train.steps=1"]) == 0
    assert cli.main(grow(small, tmp_path / "weights")) == 0
    more = keys("model.d_ff=48 origin_state=True")
    for origin_, name, message in (
        (small, "muon", "holds an optimizer with name=adamw, now optim.name=muon"),
        (small, "adafactor", "adafactor sums over rows that are old and new in one"),
        (tmp_path / "weights", "adamw", "holds weights and no moments to carry over: leave config.origin_state out"),
    ):
        assert cli.main(grow(origin_, tmp_path / "large", **more | {"optim.name": name})) == 2
        assert message in capsys.readouterr().err
        assert not (tmp_path / "large").exists()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model.d_ff", 16, "model.d_ff=16 is smaller than the 24 of"),
        ("model.n_kv_heads", 4, "a key-value head must serve as many query heads as in"),
        ("model.head_dim", 16, "config.model.head_dim=16, but the origin's model has 8: leave it out"),
        ("model.qk_norm", False, "config.model.qk_norm=False, but the origin's model has True"),
        ("model.vocab_size", 299, "model.vocab_size=299 is smaller than the 300 of"),
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
