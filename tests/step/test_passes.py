"""Steps of several updates that go over their batch several times: which rows, and how much memory."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models as tiny
from tiny_steps import B, T, make_batch, make_config, make_mesh

from jaxlm.devices import sharding
from jaxlm.step import parts
from jaxlm.step.objectives import base, lm

SMALL = tiny.model_config(n_layers=1, attention="xla")
WIDE = tiny.model_config(n_layers=1, d_model=256, n_heads=4, n_kv_heads=4, d_ff=1024, attention="xla")
LONG = 512  # floats a row that nothing reads but a metric: a batch that weighs more than the activations


def made(updates: int, passes: int = 1, model=SMALL, mesh=None, **train) -> parts.Parts:
    c = make_config(**{"batch_size": B, "microbatch_size": 2} | train)
    c = dataclasses.replace(c, model=model)
    many = {"minibatches": updates // passes, "passes": passes}
    return parts.make(c, mesh or make_mesh(), lambda *a: dataclasses.replace(lm.make(*a), **many))


@functools.cache
def plain() -> tuple:
    """(a step of one update on half of the rows, the state before it)."""
    found = made(1, batch_size=B // 2)
    return jax.jit(found.step()), found.create()[0]


def one_by_one(rows: list[slice]) -> tuple:
    """(parameters, mean loss, number of updates) of plain steps on these rows of the batch, one after the other."""
    (step, state), losses = plain(), []
    for chosen in rows:
        state = dataclasses.replace(state, step=jnp.int32(0))  # of one step: the rate stays
        state, metrics = step({}, state, jax.tree.map(lambda x, chosen=chosen: x[chosen], make_batch(1)))
        losses.append(float(metrics["loss"]))
    return state.params, np.mean(losses), int(state.opt_state[0].count)


HALVES = [slice(0, None, 2), slice(1, None, 2)]


def test_a_step_goes_over_its_minibatches_in_turn():
    at_once = made(4, 2, mesh=make_mesh(data=2, context=2))
    state, _ = at_once.create()
    with jax.set_mesh(at_once.mesh):
        batch = sharding.to_global(jax.tree.map(np.asarray, make_batch(1)), at_once.mesh, B)
        got, found = at_once.jit()({}, state, batch)
    params, loss, count = one_by_one(HALVES * 2)
    assert tiny.difference(jax.device_get(got.params), params) < 1e-4
    assert float(found["loss"]) == pytest.approx(loss, rel=1e-5)
    assert (int(got.step), int(got.opt_state[0].count)) == (1, count)
    for other in (HALVES[::-1] * 2, HALVES, [HALVES[0], HALVES[0], HALVES[1], HALVES[1]]):
        assert tiny.difference(one_by_one(other)[0], params) > 1e-3


def temporary(step_parts: parts.Parts) -> int:
    return step_parts.lower().compile().memory_analysis().temp_size_in_bytes


def test_two_passes_over_two_minibatches_hold_no_second_state():
    """Parameters and two moments are three times what `params` weighs; the updates of a scan may hold none of them twice."""
    one = made(1, model=WIDE)
    params = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(one.abstract.params))
    assert temporary(made(4, 2, model=WIDE)) < temporary(one) + 0.5 * params


def test_passes_hold_the_batch_once():
    def carrying(model, c, passes):
        tokens = lm.make(model, c)

        def sums(variables, batch, key):
            found = tokens.sums(variables, batch, key)
            return found._replace(metrics=found.metrics | {"told": jnp.sum(batch["more"])})

        def shapes(c, mesh):
            more = jax.ShapeDtypeStruct((B, T * LONG), jnp.float32, sharding=sharding.row_sharding(mesh))
            return base.token_shapes(c, mesh) | {"more": more}

        return dataclasses.replace(tokens, sums=sums, shapes=shapes, minibatches=2, passes=passes)

    def of(passes):
        c = make_config(batch_size=B, microbatch_size=B)
        c = dataclasses.replace(c, model=SMALL)
        return temporary(parts.make(c, make_mesh(), lambda *a: carrying(*a, passes)))

    assert of(8) < of(1) + 0.1 * 4 * B * T * LONG
