"""Weights in int8: one program of integers, whether it decodes or scores; what is merged; a row alone and among others."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny_models as tiny
import tiny_peft

from jaxlm import config, models
from jaxlm.devices import sharding, tree
from jaxlm.models import quantized
from jaxlm.models.decode import schedule
from jaxlm.models.decode.engine import Engine
from jaxlm.models.decode.schedule import Ask
from jaxlm.models.transformer import in_int8
from jaxlm.ops.int8 import Int8
from jaxlm.step.objectives import base

RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(0, 101, size).tolist() for size in (3, 19, 7, 30, 1, 12, 5, 23)]
VARIANTS = [{"qk_norm": True, "tie_embeddings": False}, {"family": "gpt2"}]


@functools.cache
def built(**overrides):
    model = models.build(tiny.model_config(**overrides), "xla")
    return model, tiny.random_params(model)


def coded(model, params, more: dict | None = None) -> dict:
    return quantized.in_int8(model, {"params": tree.map_named(lambda _, leaf: leaf, params)} | (more or {}))


def draw(model, variables, prompts=PROMPTS, rows: int = 8, **settings) -> list[list[int]]:
    engine = Engine(model, variables, rows=rows, chunk=8, shortest=64, prefix_bytes=0)
    asks = [Ask(tuple(ids), 10, **({"temperature": 0.0} | settings)) for ids in prompts]
    return [[token.id for token in tokens] for tokens in schedule.tokens_of(engine, asks, rows)]


def token_logp(model, variables, batch: dict) -> np.ndarray:
    return np.asarray(jax.jit(lambda v, b: base.token_logp(model, v, b))(variables, batch))


@pytest.mark.parametrize("variant", VARIANTS)
def test_decoding_in_int8_is_scoring_in_int8(variant):
    model, params = built(**variant)
    variables = coded(model, params)
    engine = Engine(model, variables, rows=1, chunk=8, shortest=64, prefix_bytes=0)
    ask = Ask(tuple(PROMPTS[1]), 10, temperature=0.0, logprobs=0)
    (tokens,) = schedule.tokens_of(engine, [ask])
    ids = [*ask.ids, *(token.id for token in tokens)]
    batch = {"tokens": jnp.asarray([ids[:-1]]), "positions": None, "targets": jnp.asarray([ids[1:]])}
    logp = token_logp(model, variables, batch)[0, len(ask.ids) - 1 :]
    # Rounding of floats may move a number across the middle between two levels.
    np.testing.assert_allclose([token.logp for token in tokens], logp, atol=5e-3)
    in_floats = token_logp(model, {"params": params}, batch)[0, len(ask.ids) - 1 :]
    assert 1e-3 < np.abs(logp - in_floats).max() < 0.15


def test_a_row_is_the_same_alone_and_among_seven_others():
    model, params = built()
    variables = coded(model, params)
    together = draw(model, variables)
    assert [draw(model, variables, [prompt])[0] for prompt in PROMPTS] == together
    assert [draw(model, variables, [prompt], rows=1)[0] for prompt in PROMPTS] == together
    assert together != draw(model, {"params": params})  # it is another model


def test_weights_are_held_once_and_in_a_quarter_of_the_bytes():
    model, params = built(tie_embeddings=False)
    given = {"params": tree.map_named(lambda _, leaf: leaf, params)}
    variables = quantized.in_int8(model, given)
    assert given == {}
    assert in_int8(variables)
    assert all(name.endswith("_norm/scale") for name, _ in tree.named_leaves(variables["params"]))
    matrices = jax.tree.leaves(variables["packed"], is_leaf=lambda x: isinstance(x, Int8))
    sizes = sum(matrix.codes_OxI.size for matrix in matrices)
    assert sizes == sum(leaf.size for _, leaf in tree.named_leaves(params) if leaf.ndim > 1)
    assert all(matrix.codes_OxI.dtype == jnp.int8 for matrix in matrices)
    for of in (variables, {"params": params}):
        weights = Engine(model, of, rows=1, chunk=8, shortest=64).weights
        held = {id(leaf): leaf.size for leaf in jax.tree.leaves(weights) if leaf.ndim > 1}
        assert sum(held.values()) == sizes


def test_adapters_are_merged_before_the_weights_are_quantised():
    model, params = built(n_layers=1)
    given = tiny_peft.adapted(params, (5, 42))
    merged = tree.map_named(lambda _, leaf: jnp.asarray(leaf), tiny_peft.merged(params, given))
    variables = coded(given.adapter.attach(model), params, dict(given.variables))
    assert set(variables) == {"params", "packed"}
    expected = coded(model, merged)
    gaps = jax.tree.map(lambda x, y: np.abs(x.astype(np.float32) - y.astype(np.float32)).max(), variables, expected)
    assert max(jax.tree.leaves(gaps["packed"])) <= 1  # a level, where a last bit crosses the middle
    assert draw(model, variables) == draw(model, expected) != draw(model, coded(model, params))


def test_a_mesh_changes_no_answer():
    model, params = built()
    expected = draw(model, coded(model, params))
    mesh = sharding.make_mesh(config.MeshConfig(data=1, fsdp=8, tensor=1, context=1))
    placed = sharding.tree_shardings(models.abstract_params(model), models.logical_axes(model), mesh)
    with jax.set_mesh(mesh):
        assert draw(model, coded(model, jax.device_put(params, placed))) == expected


def test_a_trained_model_loses_at_most_three_thousandths_of_its_loss():
    model = models.build(tiny.model_config(d_model=64, d_ff=128), "xla")
    rng = np.random.default_rng(1)
    cycle = rng.permutation(101)

    def batch(rows: int) -> dict:
        """Walks along a cycle of all ids, of which one step in eight goes anywhere: a loss that can't become 0."""
        tokens = np.zeros((rows, 33), np.int32)
        tokens[:, 0] = rng.integers(0, 101, rows)
        for at in range(32):
            strays = rng.random(rows) < 0.125
            tokens[:, at + 1] = np.where(strays, rng.integers(0, 101, rows), cycle[tokens[:, at]])
        return {"tokens": jnp.asarray(tokens[:, :-1]), "targets": jnp.asarray(tokens[:, 1:])}

    optimizer = optax.adam(1e-2)

    @jax.jit
    def step(params, state, batch):
        loss, grads = jax.value_and_grad(lambda params: tiny.loss(model, params, batch))(params)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state, loss

    params = models.init_params(model, jax.random.key(0))
    state, losses = optimizer.init(params), []
    for _ in range(120):
        params, state, loss = step(params, state, batch(16))
        losses.append(float(loss))
    held_out = batch(64) | {"positions": None}
    before = -token_logp(model, {"params": params}, held_out).mean()
    after = -token_logp(model, coded(model, params), held_out).mean()
    assert before < 1.6 < losses[0] - 2  # it has learnt the cycle
    assert abs(after / before - 1) < 0.003
