"""Schedules and AdamW."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxlm import config, config_files
from jaxlm.config import ConfigError
from jaxlm.train import optim


def optim_config(**changes):
    c = config.resolve(config_files.load("base", ["data.path=x", "train.steps=1000"])).optim
    return dataclasses.replace(c, lr=1.0, warmup_steps=100, **changes)


@pytest.mark.parametrize(
    ("schedule", "at"),
    [
        ("cosine", {50: 0.5, 100: 1.0, 550: 0.55, 1000: 0.1}),
        ("linear", {50: 0.5, 100: 1.0, 550: 0.55, 1000: 0.1}),
        ("wsd", {50: 0.5, 100: 1.0, 800: 1.0, 900: 0.55, 1000: 0.1}),
        ("constant", {50: 0.5, 100: 1.0, 1000: 1.0}),
    ],
)
def test_schedule_values(schedule, at):
    lr = optim.schedule(optim_config(schedule=schedule), 1000)
    for step, value in at.items():
        np.testing.assert_allclose(lr(step), value, rtol=1e-5)


def test_no_warmup_starts_at_the_peak():
    assert float(optim.schedule(dataclasses.replace(optim_config(), warmup_steps=0), 1000)(0)) == 1.0


PARAMS = {"embed": {"embedding": jnp.ones((4, 3))}, "layers_0": {"attn": {"q": {"kernel": jnp.full((3, 3), 2.0)}}}}


def test_adamw_is_optax_adamw_with_decay_on_kernels_only():
    c = optim_config()
    tx = optim.make(c, PARAMS)
    reference = optax.adamw(
        1.0, c.b1, c.b2, c.eps, weight_decay=c.weight_decay, mask=lambda p: {"embed": False, "layers_0": True}
    )
    state, expected_state = tx.init(PARAMS), reference.init(PARAMS)
    for seed in range(3):
        grads = jax.tree.map(lambda p, s=seed: jax.random.normal(jax.random.key(s), p.shape), PARAMS)
        updates, state = tx.update(grads, state, PARAMS)
        expected, expected_state = reference.update(grads, expected_state, PARAMS)
        jax.tree.map(lambda u, e: np.testing.assert_allclose(-u, e, rtol=1e-6), updates, expected)


def test_every_parameter_must_be_named():
    with pytest.raises(ConfigError, match="embed/embedding matches neither"):
        optim.make(optim_config(no_decay=()), PARAMS)
