"""Lowers the real train step for a mesh, from shapes alone, and reads its memory and the placement of parameters."""

import dataclasses
import math
from collections.abc import Callable

import jax
from jax.sharding import AbstractMesh, Mesh

from jaxlm import tree
from jaxlm.config import Config
from jaxlm.models import adapters
from jaxlm.objectives import dpo, lm, policy, reward
from jaxlm.plan.params import trained_rows
from jaxlm.step import parts

# Program -> the maker of what it minimises.
OBJECTIVES = {"reward": reward.make, "dpo": dpo.make}
OBJECTIVES |= dict.fromkeys(("pretrain", "sft"), lm.make) | dict.fromkeys(("ppo", "grpo"), policy.make)


@dataclasses.dataclass(frozen=True)
class Placement:
    """How a parameter is split over devices.

    Attributes:
      shape: the shape of the whole parameter.
      spec: the mesh axes that split each dimension, such as "fsdp, tensor, -"; "-" for none.
      per_device: the number of its elements on each device.
      replicated: True if every device holds the whole parameter.
    """

    name: str
    shape: tuple[int, ...]
    spec: str
    per_device: int
    replicated: bool


# Compiles fast, optimises little. Of XLA's CPU compiler: the machine code is slow, the memory that it takes is the same.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
Options = dict[str, int | bool] | None

MakeParts = Callable[[Config, Mesh | AbstractMesh], parts.Parts]


def parts_of(config: Config, mesh: Mesh | AbstractMesh) -> parts.Parts:
    """Returns the parts of the config's kind of training, from the config alone: there may be no origin and no data yet.

    Which tokens have rows of their own is taken to be the last of the vocabulary, as ChatML's are.
    """
    size = config.model.vocab_size
    rows = tuple(range(size - trained_rows(config.adapter), size))
    adapter = adapters.of(config.adapter, rows)
    faster = rows if adapter is None and config.program != "pretrain" else ()
    return parts.make(config, mesh, OBJECTIVES[config.program], adapter, faster)


def lower_step(
    config: Config, mesh: Mesh | AbstractMesh, make_parts: MakeParts = parts_of
) -> tuple[jax.stages.Lowered, list[Placement]]:
    """Lowers the train step of a config for a mesh.

    Args:
      config: the config, with `model.attention` and `model.dtype` set (not auto).
      mesh: the mesh; its devices may be absent.
      make_parts: makes the parts, if the run's own are there already.

    Returns:
      The lowered step (`.compile()` compiles it) and the placement of each parameter.
    """
    made = make_parts(config, mesh)
    variables, shardings = made.frozen | made.abstract.params, made.frozen_shardings | made.shardings.params
    return made.lower(), placements(tree.merge(variables), tree.merge(shardings))


def compile_lowered(lowered: jax.stages.Lowered, options: Options = None) -> jax.stages.Compiled | None:
    """Returns the compiled step; None if the compiler can't place it in the device's memory."""
    try:
        return lowered.compile(compiler_options=options)
    except RuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return None


def memory_of(compiled: jax.stages.Compiled) -> int:
    """Returns the bytes that a compiled step needs on each device: arguments, results and temporaries.

    Results that reuse an argument's memory are counted once. XLA's own `peak_memory_in_bytes` is too small. XLA
    allocates the temporaries as one block. Its GPU compiler does not count the gaps in that block, and its CPU compiler
    does not count the block at all.
    """
    m = compiled.memory_analysis()
    return m.argument_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes + m.temp_size_in_bytes


def placements(params: dict, shardings: dict) -> list[Placement]:
    """Returns the placement of each parameter, in tree order."""
    rows = []
    for (name, leaf), placed in zip(tree.named_leaves(params), jax.tree.leaves(shardings), strict=True):
        size = math.prod(placed.shard_shape(leaf.shape))
        spec = ", ".join("-" if entry is None else str(entry) for entry in placed.spec)
        rows.append(Placement(name, leaf.shape, spec, size, placed.is_fully_replicated))
    return rows
