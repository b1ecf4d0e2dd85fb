"""The pretraining objective: sums over counted targets, z-loss, tiles."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import tiny_models as tiny

from jaxlm import config, models
from jaxlm.config import config_files
from jaxlm.step.objectives import lm

CONFIG = tiny.model_config(n_layers=1)
MODEL = models.build(CONFIG, "xla")
VARIABLES = {"params": tiny.random_params(MODEL)}
WEIGHTS = jnp.asarray(np.random.default_rng(0).integers(0, 2, (4, 24)), jnp.float32)
BATCH = tiny.packed_batch(CONFIG) | {"weights": WEIGHTS}


def sums(tile=0, z_loss=0.0, model=MODEL):
    """(batch, dropout's key or None) -> the sums."""
    keys = ["data.path=x", f"loss.tile_tokens={tile}", f"loss.z_loss={z_loss}"]
    c = dataclasses.replace(config.resolve(config_files.load("base", keys)), model=model.config)
    return tiny.jit(lambda batch, key=None: lm.make(model, c).sums(VARIABLES, batch, key))


def test_it_is_the_weighted_sum_of_cross_entropies_with_or_without_tiles():
    given = BATCH["tokens"], BATCH["positions"], BATCH["segment_ids"]
    logits = np.asarray(tiny.jit(lambda: tiny.logits(MODEL, VARIABLES["params"], *given))(), np.float64)
    log_z = np.log(np.exp(logits).sum(-1))
    nll = log_z - np.take_along_axis(logits, np.asarray(BATCH["targets"])[..., None], -1)[..., 0]
    loss, weight, told = sums()(BATCH)
    np.testing.assert_allclose(loss, np.sum(nll * WEIGHTS), rtol=1e-5)
    np.testing.assert_allclose(weight, WEIGHTS.sum())
    np.testing.assert_allclose(told["accuracy"], np.sum((logits.argmax(-1) == BATCH["targets"]) * WEIGHTS))
    with_z, _, told = sums(tile=7, z_loss=0.01)(BATCH)
    np.testing.assert_allclose(with_z - loss, 0.01 * np.sum(WEIGHTS * log_z**2), rtol=1e-3)
    np.testing.assert_allclose(told["nll"], loss, rtol=1e-6)


def test_a_target_of_weight_zero_does_not_count():
    run = sums()
    ignored = jnp.where(WEIGHTS > 0, BATCH["targets"], 5)
    assert float(run(BATCH | {"targets": ignored}).loss) == float(run(BATCH).loss)
    counted = jnp.where(WEIGHTS > 0, 5, BATCH["targets"])
    assert float(run(BATCH | {"targets": counted}).loss) != float(run(BATCH).loss)


def test_dropout_is_on_only_with_a_key():
    run = sums(model=models.build(dataclasses.replace(CONFIG, dropout=0.5), "xla"))
    plain = float(sums()(BATCH).loss)
    assert float(run(BATCH).loss) == plain
    assert float(run(BATCH, jax.random.key(0)).loss) != plain
