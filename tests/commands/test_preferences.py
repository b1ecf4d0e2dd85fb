"""DPO and reward models, from the command to what they leave behind; scores by a reward model and by its export."""

import json
import math
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_chats
from tiny_keys import keys

from jaxlm.cli import cli
from jaxlm.config import ConfigError, MeshConfig
from jaxlm.devices.sharding import make_mesh
from jaxlm.interop import hf_folder, peft
from jaxlm.run import metrics
from jaxlm.train import origin
from jaxlm.train.rl import rewards

SMALL = keys("""
    train.steps=4 train.batch_size=8 train.seq_len=192 train.eval_every_steps=2 eval.batch_size=8
    eval.max_examples=30 optim.warmup_steps=1 optim.lr=0.001 sample.prompts=() runs.supervise=off
    log.tensorboard=False log.every_steps=1 data.val_fraction=0.2
""")

MESH = make_mesh(MeshConfig(data=1, fsdp=1, tensor=1, context=1), jax.devices()[:1])
CHATS = [
    [{"role": "user", "content": "one two"}, {"role": "assistant", "content": answer}]
    for answer in ("sun", "the sea", "a b c d e f g", "", "sun sun sun sun sun", "x", "y", "z", "w", "sea")
]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tiny_chats.base(tmp_path_factory.mktemp("base"), n_layers=1)
    tiny_chats.pairs(folder / "pairs.jsonl", 60)
    return folder


def train(kind: str, base, **changed) -> int:
    given = SMALL | {"origin": base, "data.path": base / "pairs.jsonl"}
    given |= {name.replace("__", "."): value for name, value in changed.items()}
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


@pytest.fixture(scope="module")
def rewarded(base):
    folder = base.parent / "reward"
    assert train("reward", base, workdir=folder, optim__lr=1e-2) == 0
    return folder


def test_reward(rewarded):
    folder = rewarded
    found = metrics.read(folder / "metrics.jsonl")
    assert found[0]["val/accuracy"] == 0.5
    assert found[1]["train/margin"] == 0
    assert found[1]["train/loss"] > math.log(2)  # the pairs have margins
    assert found[4]["val/margin"] != 0
    assert {"val/loss", "val/accuracy", "val/margin"} <= found[4].keys()
    last = (folder / "log.txt").read_text().splitlines()[-1]  # it scores, so there is nothing to sample
    assert f"next: jaxlm train ppo --config.origin=SFT_RUN --config.reward.model={folder} " in last


SAME = {"prompt": "a", "chosen": "b c", "rejected": "b c"}


@pytest.mark.parametrize(
    ("kind", "lines", "said"),
    [
        ("dpo", [SAME] * 3, "3 of 3 pairs are left out: chosen and rejected"),
        ("reward", [{"prompt": "a", "response": "b"}], "chosen"),
        ("dpo", [], "none of its 0 pairs can be trained on: it is empty"),
    ],
)
def test_what_can_not_be_trained_on_is_one_line(base, tmp_path, capsys, kind, lines, said):
    path = tmp_path / "bad.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert train(kind, base, workdir=tmp_path / "run", data__path=path) == 2
    assert said in "".join(capsys.readouterr())


def scorer(folder, found_by, tokens=64):
    return rewards.Scorer(origin.open(folder, "latest", found_by), MESH, tokens)


@pytest.fixture(scope="module")
def scored(rewarded):
    """(the scores of CHATS by the run, its scorer)."""
    made = scorer(rewarded, peft.READERS)
    with jax.set_mesh(MESH):
        return made(CHATS), made


def test_a_run_and_its_export_give_the_same_scores(rewarded, scored, tmp_path):
    assert cli.main(["export", str(rewarded), "--to=hf", f"--out={tmp_path / 'out'}", "--dtype=f32"]) == 0
    ours, made = scored[0], scorer(tmp_path / "out", (hf_folder.read_scores,))
    with jax.set_mesh(MESH):
        theirs = made(CHATS)
    assert ours.shape == (len(CHATS),)
    assert len({*np.round(ours, 4).tolist()}) == len(CHATS)
    np.testing.assert_allclose(theirs, ours, rtol=1e-4, atol=1e-5)
    assert made.kernel.shape == (32,)


def test_a_score_is_that_of_the_token_that_ends_the_answer(rewarded, scored):
    """By hand: the hidden state at <|im_end|>, times the head."""
    found, made = scored
    ids = made._ids(CHATS[1])
    tokenizer = origin.open(rewarded).tokenizer()
    assert (ids[0], ids[-1]) == (tokenizer.eos_id, tokenizer.id_of("<|im_end|>"))
    model, variables = made.model, made._variables
    hidden = jax.jit(model.apply)(variables, jnp.asarray([ids]), jnp.arange(len(ids))[None])
    assert found[1] == pytest.approx(float(hidden[0, -1] @ made.kernel), abs=1e-5)


def test_what_is_too_long_loses_its_beginning(rewarded):
    ids = scorer(rewarded, peft.READERS, tokens=12)._ids(CHATS[2])
    assert len(ids) == 12
    assert ids[0] == origin.open(rewarded).tokenizer().eos_id


def test_a_model_without_a_head_is_refused(base, tmp_path):
    with pytest.raises(ConfigError, match="gives no scores"):
        scorer(base, peft.READERS)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(ConfigError, match="LlamaForCausalLM is not supported"):
        scorer(tmp_path, (hf_folder.read_scores,))
