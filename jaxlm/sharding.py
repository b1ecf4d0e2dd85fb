"""Meshes, and the one table from logical axes to mesh axes.

Parameters and activations name logical axes (`embed`, `heads`, `mlp`, ...); `RULES` says over which mesh axes each is
split; `jax.jit` with NamedShardings does the rest. Outside a mesh everything here is a no-op, so models also run bare.
"""

import typing

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxlm.config import ConfigError, MeshConfig

MESH_AXES = ("data", "fsdp", "tensor")
BATCH_AXES = ("data", "fsdp")

# Logical axis -> mesh axis. A dimension that its mesh axis does not divide stays whole (see `spec`).
RULES = {
    "batch": BATCH_AXES,
    "seq": None,
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
    """A mesh with the axes data, fsdp, tensor over all devices, in the order that suits the hardware."""
    devices = list(jax.devices() if devices is None else devices)
    sizes = mesh_shape(config, len(devices))
    return jax.make_mesh(
        tuple(sizes.values()), MESH_AXES, devices=devices, axis_types=(AxisType.Auto,) * len(MESH_AXES)
    )


def check_batch(mesh: Mesh, **batch_sizes: int) -> None:
    """Refuses batch sizes that the mesh does not divide. Raises ConfigError."""
    ways = batch_ways(mesh)
    for key, size in batch_sizes.items():
        if size % ways:
            raise ConfigError(f"{key}={size} is not divisible by the mesh's data x fsdp = {ways} devices")


def batch_ways(mesh: Mesh) -> int:
    """Over how many devices the batch axis is split."""
    return int(np.prod([mesh.shape[axis] for axis in BATCH_AXES]))


def spec(logical: typing.Sequence[str | None], shape: typing.Sequence[int], mesh: Mesh) -> PartitionSpec:
    """The PartitionSpec of an array whose dimensions have these logical axes.

    A mesh axis of size 1, one already used, or one that does not divide the dimension is left out.
    """
    used, entries = set(), []
    for name, size in zip(logical, shape, strict=True):
        rule = RULES[name] if name else None
        axes = tuple(
            a for a in ((rule,) if isinstance(rule, str) else rule or ()) if a not in used and mesh.shape[a] > 1
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
    """Sharding of arrays whose first dimension is the batch."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def replicated(mesh: Mesh) -> NamedSharding:
    """Sharding of arrays that every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def local_rows(mesh: Mesh, batch_size: int) -> np.ndarray:
    """Which rows of a global batch this process must load, ascending int array."""
    indices = batch_sharding(mesh).addressable_devices_indices_map((batch_size,))
    return np.unique(np.concatenate([np.arange(batch_size)[index] for index in indices.values()]))


def to_global(batch: typing.Any, mesh: Mesh, batch_size: int) -> typing.Any:
    """This process's rows (numpy, first dimension `len(local_rows)`) as global arrays of `batch_size` rows."""
    sharding = batch_sharding(mesh)
    return jax.tree.map(
        lambda x: jax.make_array_from_process_local_data(sharding, x, (batch_size, *x.shape[1:])), batch
    )
