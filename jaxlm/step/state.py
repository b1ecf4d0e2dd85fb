"""What training carries from step to step, and where each part of it lives."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from jaxlm import sharding, tree
from jaxlm.objectives.base import Running, Variables


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class TrainState:
    """A pytree, all there is to save of a run.

    Attributes:
      step: steps done, int32.
      params: what is trained, float32, by collection. What is frozen is not part of the state.
      opt_state: the optimizer's, over all trained collections merged into one tree (`tree.merge`).
      running: scalars that the objective adapts; {} for most.
      skipped: updates that were skipped because they were not finite.
      skipped_in_a_row: those since the last good update.
    """

    step: jax.Array
    params: Variables
    opt_state: optax.OptState
    running: Running
    skipped: jax.Array
    skipped_in_a_row: jax.Array


def init(params: Variables, tx: optax.GradientTransformation, running: dict[str, float] | None = None) -> TrainState:
    """The state before the first step."""
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
    """NamedShardings for every leaf: the optimizer's arrays live where their parameter does, scalars everywhere.

    Args:
      abstract: the state as shapes.
      logical: logical axes (tuples as leaves) of every parameter, by collection.
      offload: the optimizer's arrays live in the host's memory instead of the device's.
    """
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
    """Logical axes of a leaf of any optimizer's state: those of the parameter whose name is a part of the leaf's.

    A leaf with as many dimensions as its parameter has the parameter's axes (moments, codes, blocks of the last one). One
    with fewer has the axes of the same size, in order (sums by row or column). A leaf of no parameter has none.

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
