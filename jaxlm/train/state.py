"""What training carries from step to step, and where each part of it lives."""

import dataclasses
import functools
import typing

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding

from jaxlm import models, sharding, tree


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


def shardings(abstract_state: TrainState, model: typing.Any, mesh: Mesh, offload: bool = False) -> TrainState:
    """NamedShardings for every leaf: the optimizer's arrays live where their parameter does, scalars everywhere.

    Args:
      offload: the optimizer's arrays live in the host's memory instead of the device's.
    """
    logical = models.logical_axes(model)
    names, leaves = zip(*tree.named_leaves(abstract_state.params), strict=True)
    axes = jax.tree.structure(abstract_state.params).flatten_up_to(logical)
    owners = {name: (leaf.shape, leaf_axes) for name, leaf, leaf_axes in zip(names, leaves, axes, strict=True)}
    whole = sharding.replicated(mesh)

    def place(name: str, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        where = NamedSharding(mesh, sharding.spec(optimizer_axes(name, leaf.shape, owners), leaf.shape, mesh))
        return where.with_memory_kind("pinned_host") if offload and leaf.shape else where

    return TrainState(
        step=whole,
        params=sharding.tree_shardings(abstract_state.params, logical, mesh),
        opt_state=tree.map_named(place, abstract_state.opt_state),
        skipped=whole,
        skipped_in_a_row=whole,
    )


def optimizer_axes(
    name: str, shape: tuple[int, ...], owners: dict[str, tuple[tuple[int, ...], tuple[str, ...]]]
) -> tuple[str | None, ...]:
    """Logical axes of a leaf of any optimizer's state: those of the parameter whose name is a part of the leaf's.

    As many dimensions are the parameter's (moments, codes, blocks of the last one); fewer are those of the same size, in
    order (sums by row or column). What belongs to no parameter has none.

    Args:
      owners: parameter name -> its shape and logical axes.
    """
    owner = max((other for other in owners if f"/{other}/" in f"/{name}/"), key=len, default=None)
    if owner is None:
        return (None,) * len(shape)
    dimensions, axes = owners[owner]
    if len(shape) == len(dimensions):
        return axes
    left = iter(zip(dimensions, axes, strict=True))
    return tuple(next((axis for n, axis in left if n == size), None) for size in shape)


def create(model: typing.Any, tx: optax.GradientTransformation, where: TrainState, seed: int) -> TrainState:
    """Initial state, born as `where` (its shardings) says: no device ever holds more than its part."""
    make = jax.jit(lambda key: init(models.init_params(model, key), tx), out_shardings=where)
    with jax.set_mesh(where.step.mesh):
        return make(jax.random.key(seed))
