"""Meshes, and the one table from logical axes to mesh axes.

Parameters and activations name logical axes (`embed`, `heads`, `mlp`, ...); `RULES` says over which mesh axes each is
split; `jax.jit` with NamedShardings does the rest. Outside a mesh everything here is a no-op, so models also run bare.
"""

import collections
import math
import typing

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxlm.config import ConfigError, MeshConfig, ModelConfig

# From the axis that says least between devices to the one that says most: neighbours in a mesh are near each other.
MESH_AXES = ("data", "fsdp", "context", "tensor")
BATCH_AXES = ("data", "fsdp")
CONTEXT_ATTENTION = ("xla", "blocked", "cudnn")  # backends that attend from a part of a row to all of its keys

# Logical axis -> mesh axis. A dimension that its mesh axis does not divide stays whole (see `spec`).
RULES = {
    "batch": BATCH_AXES,
    "seq": "context",
    "embed": "fsdp",  # d_model of a parameter
    "act_embed": None,  # d_model of an activation
    "vocab": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    "head_dim": None,
    "mlp": "tensor",
    "norm": None,
    "position": None,
}


def mesh_shape(config: MeshConfig, n_devices: int) -> dict[str, int]:
    """Devices on each axis, with -1 filled in. Raises ConfigError when the product is not `n_devices`."""
    sizes = {axis: getattr(config, axis) for axis in MESH_AXES}
    fixed = int(np.prod([size for size in sizes.values() if size != -1]))
    for axis, size in sizes.items():
        if size == -1:
            sizes[axis] = max(n_devices // fixed, 1)
    if int(np.prod(list(sizes.values()))) != n_devices:
        asked = " x ".join(f"{axis}={size}" for axis, size in sizes.items())
        raise ConfigError(
            f"mesh {asked} does not make {n_devices} devices; the product must be their number (-1: all that remain)"
        )
    return sizes


def make_mesh(config: MeshConfig, devices: typing.Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh with the axes MESH_AXES over all devices, in the order that suits the hardware.

    Where links between some devices are slower (several TPU slices, several hosts of GPUs or CPUs), the outer axes go
    over those. Raises ConfigError when the axes do not fit the devices.
    """
    devices = list(jax.devices() if devices is None else devices)
    sizes = mesh_shape(config, len(devices))
    axis_types = (AxisType.Auto,) * len(MESH_AXES)
    key = granule_key(devices)
    if key is None:
        return jax.make_mesh(tuple(sizes.values()), MESH_AXES, devices=devices, axis_types=axis_types)
    counts = collections.Counter(getattr(device, key) for device in devices)
    inner, outer = hybrid_shape(sizes, sorted(counts.values()))
    by_process = key == "process_index"
    grid = mesh_utils.create_hybrid_device_mesh(inner, outer, devices, process_is_granule=by_process)
    return Mesh(grid, MESH_AXES, axis_types=axis_types)


def granule_key(devices: typing.Sequence[jax.Device]) -> str | None:
    """The attribute that tells apart the groups of devices with fast links inside: `slice_index` where there are several,
    else `process_index` (off TPUs, where a slice is one network over all its hosts); None when all are one group.
    """
    if len({getattr(device, "slice_index", None) for device in devices}) > 1:
        return "slice_index"
    # A GPU's slice is its host (or NVLink domain), so several processes on one host are one group.
    one_network = devices[0].platform == "tpu" or getattr(devices[0], "slice_index", None) is not None
    return None if one_network or len({device.process_index for device in devices}) == 1 else "process_index"


def hybrid_shape(sizes: dict[str, int], granules: typing.Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """How each axis is made of devices within a group and of groups.

    Args:
      sizes: devices on each axis, outermost first; the last (tensor) stays within a group.
      granules: the number of devices in each group.

    Returns:
      Sizes within a group and over groups; their product is `sizes`.

    Raises:
      ConfigError: groups of unequal size, or as many of them as the outer axes can't be split over.
    """
    left, outer = len(granules), []
    for axis, size in sizes.items():
        outer.append(1 if axis == MESH_AXES[-1] else math.gcd(size, left))
        left //= outer[-1]
    where = f"{len(granules)} hosts (or slices) of {granules[0]} devices"
    if len(set(granules)) > 1:
        raise ConfigError(f"hosts (or slices) of {', '.join(map(str, granules))} devices: all must have as many")
    if left > 1:
        asked = " x ".join(f"{axis}={size}" for axis, size in sizes.items())
        raise ConfigError(
            f"mesh {asked} would split tensor over {where}: make data x fsdp x context a multiple of {len(granules)}"
        )
    return tuple(size // ways for size, ways in zip(sizes.values(), outer, strict=True)), tuple(outer)


def check_batch(mesh: Mesh | AbstractMesh, **batch_sizes: int) -> None:
    """Refuses batch sizes that the mesh does not divide. Raises ConfigError."""
    ways = batch_ways(mesh)
    for key, size in batch_sizes.items():
        if size % ways:
            raise ConfigError(f"{key}={size} is not divisible by the mesh's data x fsdp = {ways} devices")


def check_context(mesh: Mesh | AbstractMesh, seq_len: int, model: ModelConfig) -> None:
    """Refuses what can't split the tokens of rows over the mesh's context axis. Raises ConfigError."""
    ways = mesh.shape["context"]
    if seq_len % ways:
        raise ConfigError(f"train.seq_len={seq_len} is not divisible by the mesh's context={ways} devices")
    if ways > 1 and model.attention not in ("auto", *CONTEXT_ATTENTION):
        raise ConfigError(
            f"model.attention={model.attention} does not split rows over mesh.context={ways}; set model.attention to one of "
            f"{', '.join(CONTEXT_ATTENTION)}"
        )
    if ways > 1 and model.fp8:
        raise ConfigError(f"model.fp8 does not split rows over mesh.context={ways}; leave one of them out")


def check_tensor(mesh: Mesh | AbstractMesh, model: ModelConfig) -> None:
    """Refuses a tensor axis that would leave the model's products whole on every device. Raises ConfigError."""
    ways = mesh.shape["tensor"]
    for key in ("n_heads", "d_ff"):
        if getattr(model, key) % ways:
            raise ConfigError(f"mesh.tensor={ways} does not divide model.{key}={getattr(model, key)}")


def batch_ways(mesh: Mesh | AbstractMesh) -> int:
    """Over how many devices the batch axis is split."""
    return int(np.prod([mesh.shape[axis] for axis in BATCH_AXES]))


def axis_size(axis: str) -> int:
    """Devices on this axis of the mesh that the caller runs under (`jax.set_mesh`); 1 without one."""
    return jax.sharding.get_abstract_mesh().shape.get(axis, 1)


def spec(
    logical: typing.Sequence[str | None], shape: typing.Sequence[int], mesh: Mesh, *, ones: bool = False
) -> PartitionSpec:
    """The PartitionSpec of an array whose dimensions have these logical axes.

    A mesh axis already used, or one that does not divide the dimension, is left out; and one of size 1, but for `ones`
    (kernels in a `shard_map` want every axis named).
    """
    used, entries = set(), []
    for name, size in zip(logical, shape, strict=True):
        rule = RULES[name] if name else None
        axes = tuple(
            a
            for a in ((rule,) if isinstance(rule, str) else rule or ())
            if a not in used and (ones or mesh.shape[a] > 1)
        )
        if not axes or size % int(np.prod([mesh.shape[a] for a in axes])):
            entries.append(None)
            continue
        used.update(axes)
        entries.append(axes[0] if len(axes) == 1 else axes)
    return PartitionSpec(*entries)


def tree_shardings(abstract: typing.Any, logical: typing.Any, mesh: Mesh) -> typing.Any:
    """NamedShardings for a tree of shapes and the like tree of logical axes (tuples as leaves)."""
    return jax.tree.map(lambda leaf, axes: NamedSharding(mesh, spec(axes, leaf.shape, mesh)), abstract, logical)


def constrain(x: jax.Array, *logical: str | None) -> jax.Array:
    """Pins an activation's sharding inside jit; without a mesh (`jax.set_mesh`) returns it as it is."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, spec(logical, x.shape, mesh))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Sharding of a batch's arrays: the first dimension is rows; the second, where context splits it, is tokens."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES, *(("context",) if mesh.shape["context"] > 1 else ())))


def replicated(mesh: Mesh) -> NamedSharding:
    """Sharding of arrays that every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def local_rows(mesh: Mesh, batch_size: int) -> np.ndarray:
    """Which rows of a global batch this process must load, ascending int array.

    Whole rows, also where other processes hold some of their tokens: reading them twice is cheap.
    """
    rows = NamedSharding(mesh, PartitionSpec(BATCH_AXES))
    indices = rows.addressable_devices_indices_map((batch_size,))
    return np.unique(np.concatenate([np.arange(batch_size)[index] for index in indices.values()]))


def to_global(batch: typing.Any, mesh: Mesh, batch_size: int) -> typing.Any:
    """This process's rows (numpy, first dimension `len(local_rows)`) as global arrays of `batch_size` rows."""
    sharding, rows = batch_sharding(mesh), local_rows(mesh, batch_size)

    def place(x: np.ndarray) -> jax.Array:
        def part(index: tuple[slice, ...]) -> np.ndarray:
            first, last, _ = index[0].indices(batch_size)
            # The rows of one device follow each other, here too.
            start = int(np.searchsorted(rows, first))
            return x[(slice(start, start + last - first), *index[1:])]

        return jax.make_array_from_callback((batch_size, *x.shape[1:]), sharding, part)

    return jax.tree.map(place, batch)
