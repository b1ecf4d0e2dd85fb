"""The pretraining objective: sums over counted targets, z-loss, tiles."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import tiny_models as tiny

from jaxlm import config, models
from jaxlm.config import config_files
from jaxlm.step.objectives import lm

CONFIG = tiny.model_config()
MODEL = models.build(CONFIG, "xla")
PARAMS = tiny.random_params(MODEL)
BATCH = tiny.packed_batch(CONFIG)
WEIGHTS = jnp.asarray(np.random.default_rng(0).integers(0, 2, BATCH["tokens"].shape), jnp.float32)


def run(tile=0, z_loss=0.0, **changes):
    return objective(tile, z_loss).sums({"params": PARAMS}, BATCH | {"weights": WEIGHTS} | changes, None)


def objective(tile=0, z_loss=0.0, model=MODEL):
    keys = ["data.path=x", f"loss.tile_tokens={tile}", f"loss.z_loss={z_loss}"]
    return lm.make(model, dataclasses.replace(config.resolve(config_files.load("base", keys)), model=model.config))


def logits():
    return tiny.logits(MODEL, PARAMS, BATCH["tokens"], BATCH["positions"], BATCH["segment_ids"])


def test_it_is_the_weighted_sum_of_cross_entropies():
    log_z = jax.nn.logsumexp(logits(), axis=-1)
    nll = log_z - jnp.take_along_axis(logits(), BATCH["targets"][..., None], axis=-1)[..., 0]
    loss, weight, sums = run()
    np.testing.assert_allclose(loss, jnp.sum(nll * WEIGHTS), rtol=1e-5)
    np.testing.assert_allclose(weight, jnp.sum(WEIGHTS))
    hits = jnp.sum((jnp.argmax(logits(), -1) == BATCH["targets"]) * WEIGHTS)
    np.testing.assert_allclose(sums["accuracy"], hits)
    with_z, _, sums = run(z_loss=0.01)
    np.testing.assert_allclose(with_z - loss, 0.01 * jnp.sum(WEIGHTS * log_z**2), rtol=1e-3)
    np.testing.assert_allclose(sums["nll"], loss, rtol=1e-6)


def test_tiles_change_nothing():
    np.testing.assert_allclose(run(tile=7)[0], run()[0], rtol=1e-6)


def test_a_target_of_weight_zero_does_not_count():
    ignored = jnp.where(WEIGHTS > 0, BATCH["targets"], 5)
    assert float(run(targets=ignored)[0]) == float(run()[0])
    counted = jnp.where(WEIGHTS > 0, 5, BATCH["targets"])
    assert float(run(targets=counted)[0]) != float(run()[0])


def test_dropout_is_on_only_with_a_key():
    model = models.build(dataclasses.replace(CONFIG, dropout=0.5), "xla")
    batch = BATCH | {"weights": WEIGHTS}
    plain = float(run().loss)
    assert float(objective(model=model).sums({"params": PARAMS}, batch, None).loss) == plain
    assert float(objective(model=model).sums({"params": PARAMS}, batch, jax.random.key(0)).loss) != plain
