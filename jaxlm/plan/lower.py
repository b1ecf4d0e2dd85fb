"""The real train step, lowered for a mesh from shapes alone, and what its program says of memory and placement."""

import dataclasses
import math
import typing

import jax
from jax.sharding import Mesh

from jaxlm import tree
from jaxlm.config import Config
from jaxlm.objectives import base, lm
from jaxlm.step import parts


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where a parameter lives: `per_device` elements of its `shape` on each device, split as `spec` says."""

    name: str
    shape: tuple[int, ...]
    spec: str
    per_device: int
    replicated: bool


def lower_step(
    config: Config, mesh: Mesh, objective: base.Maker = lm.make
) -> tuple[jax.stages.Lowered, list[Placement]]:
    """Lowers the train step of a config for a mesh.

    Args:
      config: with `model.attention` and `model.dtype` set (not auto).
      mesh: of real, fake or absent devices.
      objective: makes what is minimised; next-token prediction by default.

    Returns:
      The lowered step (`.compile()` compiles it) and where each parameter lives.
    """
    made = parts.make(config, mesh, objective)
    return made.lower(), placements(made.abstract.params["params"], made.shardings.params["params"])


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
