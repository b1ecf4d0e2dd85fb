"""Training with the MLP in float8 against training without: nearly the same losses."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models as tiny

from jaxlm import config, models
from jaxlm.config import config_files
from jaxlm.ops import products as fp8
from jaxlm.step import optim, state, step
from jaxlm.step.objectives import lm

STEPS = 30


def losses(**model) -> np.ndarray:
    """Of each of 30 steps of a small model on three batches in turn."""
    c = config.resolve(config_files.load("base", ["data.path=x", "train.batch_size=4", "train.seq_len=24"]))
    optimizer = dataclasses.replace(c.optim, warmup_steps=5, lr=3e-3)
    c = dataclasses.replace(c, model=tiny.model_config(n_layers=1, init_std=0.1, **model), optim=optimizer)
    built = models.build(c.model, "xla")
    tx = optim.make(c.optim, models.abstract_params(built))
    now = state.init({"params": tiny.random_params(built)}, tx)
    fn = tiny.jit(step.make(c, lm.make(built, c), tx, optim.rates(c.optim, 200)))
    batches = [tiny.packed_batch(c.model, seed=seed) | {"weights": jnp.ones((4, 24))} for seed in range(3)]
    found = []
    for i in range(STEPS):
        now, metrics = fn({}, now, batches[i % 3])
        found.append(float(metrics["loss"]))
    assert int(now.skipped) == 0
    return np.asarray(found)


def test_losses_stay_within_one_and_a_half_percent(monkeypatch):
    """Measured: 0.95% at most, where the model has learned its three batches half by heart and is 32 wide."""
    want = losses()
    assert want[-3:].mean() < want[:3].mean() - 1.0  # it learns, so that there is something to lose
    got = losses(fp8=True)
    assert (got != want).all()
    np.testing.assert_allclose(got, want, rtol=0.015)
    monkeypatch.setattr(fp8, "quantize", lambda x, dtype: ((x * 1e-2).astype(dtype), jnp.float32(1e2)))
    assert np.abs(losses(fp8=True) / want - 1).max() > 0.05  # mutation: a scale that does not fit


@pytest.mark.parametrize(("family", "in_mlp"), [("llama", 3), ("gpt2", 2)])
def test_only_the_mlp_is_in_float8(family, in_mlp):
    """Besides those of the MLP: q, k, v, o, the scores, their product with v, and the head."""
    cfg = tiny.model_config(family=family, fp8=True, fuse_projections=False, n_layers=1)
    model = models.build(cfg, "xla")
    batch = tiny.packed_batch(cfg)
    lowered = jax.jit(lambda p: tiny.loss(model, p, batch)).lower(models.abstract_params(model))
    products = [line for line in lowered.as_text().splitlines() if "dot_general" in line]
    assert sum("f8E4M3FN" in line for line in products) == in_mlp
    assert sum("f8" not in line for line in products) == 7
