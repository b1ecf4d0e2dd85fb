"""The speed configs from end to end: trained, small, exported as Qwen3, and read by transformers."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_data
import tiny_models as tiny
from tiny_keys import keys

from jaxlm import config
from jaxlm.cli import cli
from jaxlm.config import config_files
from jaxlm.eval import model as model_lib
from jaxlm.run import metrics

pytestmark = pytest.mark.parity

# Heads of 128 stay, as a reader of Qwen3 expects.
SMALL = keys("""
    model.n_layers=2 model.d_model=64 model.n_heads=2 model.n_kv_heads=1 model.head_dim=128 model.d_ff=128
    model.vocab_size=300 train.steps=100 train.batch_size=8 train.microbatch_size=8 train.seq_len=32
    train.eval_every_steps=0 eval.batch_size=8 checkpoint.every_steps=0 optim.warmup_steps=10 sample.prompts=()
    runs.supervise=off log.tensorboard=False
""")


def test_speed_35m_trains_and_transformers_agrees(tmp_path):
    import torch
    import transformers

    torch.set_num_threads(1)
    tiny_data.make(tmp_path / "data", {"a": 1.0})
    run, out = tmp_path / "run", tmp_path / "out"
    given = SMALL | {"workdir": run, "data.dir": tmp_path / "data"}
    assert cli.main(["train", "speed_35m", *(f"--config.{name}={value}" for name, value in given.items())]) == 0
    losses = [r["train/loss"] for r in metrics.records(run / "metrics.jsonl") if "train/loss" in r]
    assert losses[-1] < losses[0] - 0.5
    assert cli.main(["export", str(run), "--to=hf", "--dtype=f32", f"--out={out}"]) == 0
    assert json.loads((out / "config.json").read_text())["model_type"] == "qwen3"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    assert theirs.config.head_dim == 128
    c = config.resolve(config_files.of_run(run, []))
    mine = model_lib.restore(c, "latest")
    ids = [mine.tokenizer.eos_id, *mine.tokenizer.encode("one two three red green blue")]
    with jax.set_mesh(mine.mesh):
        score = tiny.jit(lambda variables, tokens: tiny.logits(mine.model, variables["params"], tokens))
        ours = np.asarray(score(mine.variables, jnp.asarray([ids])))[0]
    with torch.no_grad():
        scores = theirs(torch.tensor([ids])).logits[0].numpy()
    assert np.abs(ours[:, : scores.shape[-1]] - scores).max() < 1e-4 * np.abs(scores).max()
