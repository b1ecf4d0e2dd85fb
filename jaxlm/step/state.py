"""Defines the train state, which training carries from step to step, and the sharding of each of its leaves."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from jaxlm.devices import sharding, tree
from jaxlm.step.objectives.base import Running, Variables


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class TrainState:
    """The train state: a pytree with everything of a run that a checkpoint must save.

    Attributes:
      params: the trained variables, float32, by collection. Frozen variables are not part of the state.
      opt_state: of all trained collections merged into one tree (`tree.merge`).
      running: the scalars that the objective adapts.
      skipped, skipped_in_a_row: the number of non-finite updates: in all, and since the last finite one.
      average: the moving average of `params` (`train.average`); {} without one. The train step never sees it.
    """

    step: jax.Array
    params: Variables
    opt_state: optax.OptState
    running: Running
    skipped: jax.Array
    skipped_in_a_row: jax.Array
    average: Variables = dataclasses.field(default_factory=dict)


def init(params: Variables, tx: optax.GradientTransformation, running: dict[str, float] | None = None) -> TrainState:

    zero = functools.partial(jnp.zeros, (), jnp.int32)
    return TrainState(
        step=zero(),
        params=params,
        opt_state=tx.init(tree.merge(params)),
        running={name: jnp.float32(value) for name, value in (running or {}).items()},
        skipped=zero(),
        skipped_in_a_row=zero(),
    )


def shardings(
    abstract: TrainState, logical: dict[str, dict], mesh: Mesh | AbstractMesh, offload: bool = False
) -> TrainState:
    """Returns the NamedSharding of every leaf: the optimizer's arrays are sharded like their parameter, scalars replicated."""
    params = tree.merge(abstract.params)
    names, leaves = zip(*tree.named_leaves(params), strict=True)
    axes = jax.tree.structure(params).flatten_up_to(tree.merge(logical))
    owners = {name: (leaf.shape, leaf_axes) for name, leaf, leaf_axes in zip(names, leaves, axes, strict=True)}
    whole = sharding.replicated(mesh)

    def place(name: str, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        spec = sharding.spec(optimizer_axes(name, leaf.shape, owners), leaf.shape, mesh)
        placed = NamedSharding(mesh, spec)
        return placed.with_memory_kind("pinned_host") if offload and leaf.shape else placed

    return TrainState(
        step=whole,
        params=sharding.tree_shardings(abstract.params, logical, mesh),
        opt_state=tree.map_named(place, abstract.opt_state),
        running=jax.tree.map(lambda _: whole, abstract.running),
        skipped=whole,
        skipped_in_a_row=whole,
    )


def optimizer_axes(
    name: str, shape: tuple[int, ...], owners: dict[str, tuple[tuple[int, ...], tuple[str | None, ...]]]
) -> tuple[str | None, ...]:
    """Returns the logical axes of a leaf of any optimizer's state: those of the parameter whose name is in the leaf's name.

    A leaf with fewer dimensions (Adafactor's sums by row or column) gets the axes of the parameter's dimensions of the same
    sizes. If no parameter's name is in the leaf's name, all axes are None.

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
