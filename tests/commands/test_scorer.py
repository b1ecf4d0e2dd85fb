"""Scores by a reward model: from a run, and from its export as a Hugging Face model."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_chats

from jaxlm.cli import cli
from jaxlm.config import ConfigError, MeshConfig
from jaxlm.devices.sharding import make_mesh
from jaxlm.interop import hf_weights, peft
from jaxlm.train import origin
from jaxlm.train.rl import rewards

KEYS = {
    "train.steps": 2,
    "train.batch_size": 8,
    "train.seq_len": 192,
    "train.eval_every_steps": 0,
    "eval.at_start": False,
    "eval.max_mb": 0.005,
    "optim.warmup_steps": 1,
    "optim.lr": 1e-2,
    "sample.prompts": "()",
    "runs.supervise": "off",
    "log.tensorboard": False,
    "data.val_fraction": 0.2,
}
CHATS = [
    [{"role": "user", "content": "one two"}, {"role": "assistant", "content": answer}]
    for answer in ("sun", "the sea", "a b c d e f g", "", "sun sun sun sun sun", "x", "y", "z", "w", "sea")
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """(base, a run of `reward`, its export)."""
    base = tiny_chats.base(tmp_path_factory.mktemp("base"))
    tiny_chats.pairs(base / "pairs.jsonl", 60)
    run = base.parent / "rm"
    given = KEYS | {"origin": base, "data.path": base / "pairs.jsonl", "workdir": run}
    assert cli.main(["train", "reward", *(f"--config.{key}={value}" for key, value in given.items())]) == 0
    assert cli.main(["export", str(run), "--to=hf", f"--out={run}-hf", "--dtype=f32"]) == 0
    return base, run, base.parent / "rm-hf"


def scores(folder, found_by, tokens=64):
    mesh = make_mesh(MeshConfig(data=1, fsdp=1, tensor=1, context=1), jax.devices()[:1])
    with jax.set_mesh(mesh):
        made = rewards.Scorer(origin.open(folder, "latest", found_by), mesh, tokens)
        return made(CHATS), made


def test_a_run_and_its_export_give_the_same_scores(folders):
    _, run, exported = folders
    (ours, _), (theirs, made) = scores(run, peft.READERS), scores(exported, (hf_weights.read_scores,))
    assert ours.shape == (len(CHATS),)
    assert len({*np.round(ours, 4).tolist()}) == len(CHATS)
    np.testing.assert_allclose(theirs, ours, rtol=1e-4, atol=1e-5)
    assert made.kernel.shape == (32,)


def test_a_score_is_that_of_the_token_that_ends_the_answer(folders):
    """By hand: the hidden state at <|im_end|>, times the head."""
    _, run, _ = folders
    (found, made) = scores(run, peft.READERS)
    ids = made._ids(CHATS[1])
    tokenizer = origin.open(run).tokenizer()
    assert (ids[0], ids[-1]) == (tokenizer.eos_id, tokenizer.id_of("<|im_end|>"))
    model, variables = made.model, made._variables
    hidden = model.apply(variables, jnp.asarray([ids]), jnp.arange(len(ids))[None])
    assert found[1] == pytest.approx(float(hidden[0, -1] @ made.kernel), abs=1e-5)


def test_what_is_too_long_loses_its_beginning(folders):
    _, run, _ = folders
    _, made = scores(run, peft.READERS, tokens=12)
    ids = made._ids(CHATS[2])
    assert len(ids) == 12
    assert ids[0] == origin.open(run).tokenizer().eos_id


def test_a_model_without_a_head_is_refused(folders, tmp_path):
    base, _, _ = folders
    with pytest.raises(ConfigError, match="gives no scores"):
        scores(base, peft.READERS)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(ConfigError, match="LlamaForCausalLM is not supported"):
        scores(tmp_path, (hf_weights.read_scores,))
