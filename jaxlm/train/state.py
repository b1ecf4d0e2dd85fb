"""What training carries from step to step, and where each part of it lives."""

import dataclasses
import functools
import typing

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from jaxlm import models, sharding


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class TrainState:
    """A pytree: `step` updates done (int32), float32 parameters, optimizer state, and skipped (non-finite) steps.

    `skipped` counts all of them, `skipped_in_a_row` those since the last good step.
    """

    step: jax.Array
    params: typing.Any
    opt_state: typing.Any
    skipped: jax.Array
    skipped_in_a_row: jax.Array


def init(params: typing.Any, tx: optax.GradientTransformation) -> TrainState:
    """The state before the first step."""
    zero = functools.partial(jnp.zeros, (), jnp.int32)
    return TrainState(step=zero(), params=params, opt_state=tx.init(params), skipped=zero(), skipped_in_a_row=zero())


def abstract(model: typing.Any, tx: optax.GradientTransformation) -> TrainState:
    """Shapes and types of the state, without taking memory."""
    return jax.eval_shape(lambda params: init(params, tx), models.abstract_params(model))


def shardings(
    abstract_state: TrainState, model: typing.Any, tx: optax.GradientTransformation, mesh: Mesh
) -> TrainState:
    """NamedShardings for every leaf: optimizer moments live where their parameter does, scalars everywhere."""
    params = sharding.tree_shardings(abstract_state.params, models.logical_axes(model), mesh)
    whole = sharding.replicated(mesh)
    opt_state = optax.tree_map_params(
        tx, lambda _, s: s, abstract_state.opt_state, params, transform_non_params=lambda _: whole
    )
    return TrainState(step=whole, params=params, opt_state=opt_state, skipped=whole, skipped_in_a_row=whole)


def create(model: typing.Any, tx: optax.GradientTransformation, mesh: Mesh, seed: int) -> TrainState:
    """Initial state, born sharded: no device ever holds more than its part."""
    where = shardings(abstract(model, tx), model, tx, mesh)
    make = jax.jit(lambda key: init(models.init_params(model, key), tx), out_shardings=where)
    with jax.set_mesh(mesh):
        return make(jax.random.key(seed))
