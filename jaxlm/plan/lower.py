"""The real train step, traced and lowered for a mesh from shapes alone: no parameter is ever made.

Legend: B batch, T tokens.
"""

import dataclasses
import math
import typing

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxlm import sharding, tree
from jaxlm.config import Config
from jaxlm.train import pretraining


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where a parameter lives: `per_device` elements of its `shape` on each device, split as `spec` says."""

    name: str
    shape: tuple[int, ...]
    spec: str
    per_device: int
    replicated: bool


def abstract_batch(config: Config, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of a training batch with their sharding."""
    shape, where = (config.train.batch_size, config.train.seq_len), sharding.batch_sharding(mesh)
    integers = ("tokens", "targets", "segment_ids", "positions")
    batch = {name: jax.ShapeDtypeStruct(shape, jnp.int32, sharding=where) for name in integers}
    return batch | {"weights": jax.ShapeDtypeStruct(shape, jnp.float32, sharding=where)}


def lower_step(config: Config, mesh: Mesh) -> tuple[jax.stages.Lowered, list[Placement]]:
    """Lowers the pretraining step of a config for a mesh.

    Args:
      config: with `model.attention` and `model.dtype` set (not auto).
      mesh: of real or fake devices.

    Returns:
      The lowered step (`.compile()` compiles it) and where each parameter lives.
    """
    made = pretraining.make(config, mesh)
    jitted = made.jit()  # out here: it makes a key, which can't be where the mesh's devices are absent
    with jax.set_mesh(mesh):
        lowered = jitted.lower(made.abstract, abstract_batch(config, mesh))
    return lowered, placements(made.abstract.params, made.shardings.params)


def memory_of(compiled: typing.Any) -> int:
    """Bytes that a compiled step needs on each device: arguments, results that take no argument's place, temporaries.

    The temporaries are one block, which has to be found whole; so this, and not `peak_memory_in_bytes` (XLA's GPU compiler
    leaves gaps in the block out of it, its CPU compiler all temporaries), is what must be free.
    """
    m = compiled.memory_analysis()
    return m.argument_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes + m.temp_size_in_bytes


def placements(params: typing.Any, shardings: typing.Any) -> list[Placement]:
    """One row per parameter, in tree order."""
    rows = []
    for (name, leaf), where in zip(tree.named_leaves(params), jax.tree.leaves(shardings), strict=True):
        size = math.prod(where.shard_shape(leaf.shape))
        spec = ", ".join("-" if entry is None else str(entry) for entry in where.spec)
        rows.append(Placement(name, leaf.shape, spec, size, where.is_fully_replicated))
    return rows
