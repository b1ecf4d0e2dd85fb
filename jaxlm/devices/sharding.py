"""Makes meshes, and holds the only table from logical axes to mesh axes.

Each dimension of a parameter or an activation names a logical axis. `RULES` says which mesh axes split it; `jax.jit` with
NamedShardings does the rest. Without a mesh nothing here has an effect, so models also run without one.
"""

import collections
import math
import typing

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxlm.config import ConfigError, MeshConfig, ModelConfig

# In the order of their traffic, least first: neighbours along the last axis are the devices with the fastest links.
MESH_AXES = ("data", "fsdp", "context", "tensor")
BATCH_AXES = ("data", "fsdp")
CONTEXT_ATTENTION = ("xla", "blocked", "cudnn")  # in these backends a part of a row attends to all keys of the row

# Logical axis -> the mesh axes that split it; (): it is never split. Models name logical axes only, so how a model is
# laid out is changed here and nowhere else. `spec` drops a mesh axis that does not divide a dimension: 2 key-value heads
# on tensor=4 are then whole on every device, which costs memory but computes the same. Where it would cost too much (the
# batch, the heads, the MLP), the checks below refuse.
RULES = {
    "batch": BATCH_AXES,
    "seq": ("context",),
    "embed": ("fsdp",),  # d_model of a parameter
    "act_embed": (),  # d_model of an activation
    "vocab": ("tensor",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "head_dim": (),
    "mlp": ("tensor",),
    "norm": (),
    "position": (),
}


def mesh_shape(config: MeshConfig, n_devices: int) -> dict[str, int]:
    """Returns axis -> its size, with -1 replaced. Raises ConfigError if the sizes do not multiply to `n_devices`."""
    sizes = {axis: getattr(config, axis) for axis in MESH_AXES}
    rest = max(n_devices // math.prod(size for size in sizes.values() if size != -1), 1)
    sizes = {axis: rest if size == -1 else size for axis, size in sizes.items()}
    if math.prod(sizes.values()) != n_devices:
        axes = " x ".join(f"{axis}={size}" for axis, size in sizes.items())
        raise ConfigError(f"mesh {axes} does not make {n_devices} devices: their product must (-1: all that remain)")
    return sizes


def make_mesh(config: MeshConfig, devices: typing.Sequence[jax.Device] | None = None) -> Mesh:
    """Returns a mesh with the axes MESH_AXES over `devices` (all by default), ordered to suit the hardware.

    If some links are slower than others (several TPU slices, several hosts of GPUs or CPUs), only the outer axes cross
    the slow ones. Raises ConfigError if the axes do not fit the devices.
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
    """Returns "slice_index" or "process_index", the attribute that devices with fast links share; None if all links are fast.

    The hosts of one TPU slice share its network, so all its devices have fast links.
    """
    if len({getattr(device, "slice_index", None) for device in devices}) > 1:
        return "slice_index"
    # A GPU's slice is its host (or NVLink domain), so several processes on one host are one group.
    one_network = devices[0].platform == "tpu" or getattr(devices[0], "slice_index", None) is not None
    return None if one_network or len({device.process_index for device in devices}) == 1 else "process_index"


def hybrid_shape(sizes: dict[str, int], granules: typing.Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns (each mesh axis's size within a group of devices with fast links, each axis's size across the groups).

    Args:
      sizes: axis -> the number of devices on it, outermost axis first. The last axis (tensor) stays within a group.
      granules: the number of devices in each of these groups.

    Raises ConfigError if the groups differ in size, or the axes before tensor can't be split over the number of groups.
    """
    left, outer = len(granules), []
    for axis, size in sizes.items():
        outer.append(1 if axis == MESH_AXES[-1] else math.gcd(size, left))
        left //= outer[-1]
    if len(set(granules)) > 1:
        raise ConfigError(f"hosts (or slices) of {', '.join(map(str, granules))} devices: all must have as many")
    if left > 1:
        axes = " x ".join(f"{axis}={size}" for axis, size in sizes.items())
        groups = f"{len(granules)} hosts (or slices) of {granules[0]} devices"
        advice = f"make data x fsdp x context a multiple of {len(granules)}"
        raise ConfigError(f"mesh {axes} would split tensor over {groups}: {advice}")
    return tuple(size // ways for size, ways in zip(sizes.values(), outer, strict=True)), tuple(outer)


def check_batch(mesh: Mesh | AbstractMesh, key: str, size: int) -> None:
    """Raises ConfigError if data x fsdp does not divide the batch size of this config key."""
    if size % (ways := batch_ways(mesh)):
        raise ConfigError(f"{key}={size} is not divisible by the mesh's data x fsdp = {ways} devices")


def check_context(mesh: Mesh | AbstractMesh, seq_len: int, model: ModelConfig) -> None:
    """Raises ConfigError if rows of `seq_len` tokens, or this model, can't be split over the mesh's context axis."""
    ways = mesh.shape["context"]
    if seq_len % ways:
        raise ConfigError(f"train.seq_len={seq_len} is not divisible by the mesh's context={ways} devices")
    if ways > 1 and model.attention not in ("auto", *CONTEXT_ATTENTION):
        refused, others = f"model.attention={model.attention}", ", ".join(CONTEXT_ATTENTION)
        raise ConfigError(f"{refused} does not split rows over mesh.context={ways}; take {others}")
    if ways > 1 and model.fp8:
        raise ConfigError(f"model.fp8 does not split rows over mesh.context={ways}; leave one of them out")


def check_tensor(mesh: Mesh | AbstractMesh, model: ModelConfig) -> None:
    """Raises ConfigError if the tensor axis does not divide `n_heads` or `d_ff`: then each device would compute them all."""
    ways = mesh.shape["tensor"]
    for key in ("n_heads", "d_ff"):
        if getattr(model, key) % ways:
            raise ConfigError(f"mesh.tensor={ways} does not divide model.{key}={getattr(model, key)}")


def batch_ways(mesh: Mesh | AbstractMesh) -> int:
    """Returns the number of parts that a batch's rows are split into: data x fsdp."""
    return int(np.prod([mesh.shape[axis] for axis in BATCH_AXES]))


def padded_rows(mesh: Mesh, rows: int) -> int:
    """Returns `rows`, at least 1, rounded up to a multiple of `batch_ways`."""
    return -(-max(rows, 1) // batch_ways(mesh)) * batch_ways(mesh)


def axis_size(axis: str) -> int:
    """Returns the number of devices on an axis of the current mesh (`jax.set_mesh`); 1 if there is no mesh."""
    return jax.sharding.get_abstract_mesh().shape.get(axis, 1)


def spec(
    logical: typing.Sequence[str | None], shape: typing.Sequence[int], mesh: Mesh | AbstractMesh, *, ones: bool = False
) -> PartitionSpec:
    """Returns the PartitionSpec of an array, by RULES, given the logical axis of each dimension.

    A dimension stays whole if its mesh axes do not divide it. A mesh axis splits only one dimension, the first that
    names the axis. `ones` names mesh axes of size 1 too, which kernels in a `shard_map` need.
    """
    used, entries = set(), []
    for name, size in zip(logical, shape, strict=True):
        rule = RULES[name] if name else ()
        axes = tuple(axis for axis in rule if axis not in used and (ones or mesh.shape[axis] > 1))
        if not axes or size % int(np.prod([mesh.shape[a] for a in axes])):
            entries.append(None)
            continue
        used.update(axes)
        entries.append(axes[0] if len(axes) == 1 else axes)
    return PartitionSpec(*entries)


def tree_shardings(abstract: dict, logical: dict, mesh: Mesh | AbstractMesh) -> dict:
    """Returns the NamedSharding of each leaf, for a tree of shapes and an equal tree of logical axes (tuples)."""
    return jax.tree.map(lambda leaf, axes: NamedSharding(mesh, spec(axes, leaf.shape, mesh)), abstract, logical)


def constrain(x: jax.Array, *logical: str | None) -> jax.Array:
    """Returns `x` with its sharding fixed inside jit, by the logical axis of each dimension. Without a mesh returns `x`."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, spec(logical, x.shape, mesh))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of a batch's arrays: rows over data x fsdp; tokens over context if it has several devices."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES, *(("context",) if mesh.shape["context"] > 1 else ())))


def row_sharding(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def from_host(
    value: np.ndarray, shape: tuple[int, ...], dtype: jnp.dtype, sharding: jax.sharding.Sharding
) -> jax.Array:
    """Returns a host array sharded, cast shard by shard: the whole array is never copied."""
    return jax.make_array_from_callback(shape, sharding, lambda index: np.ascontiguousarray(value[index], dtype=dtype))


def local_rows(mesh: Mesh, batch_size: int) -> np.ndarray:
    """Returns the indices of the rows of a global batch that this process must load, ascending.

    Rows are loaded whole, even if the context axis gives some of their tokens to other processes: reading a row twice
    is cheap.
    """
    indices = row_sharding(mesh).addressable_devices_indices_map((batch_size,))
    return np.unique(np.concatenate([np.arange(batch_size)[index] for index in indices.values()]))


def to_global(
    batch: dict[str, np.ndarray], mesh: Mesh, batch_size: int, shardings: dict[str, NamedSharding] | None = None
) -> dict[str, jax.Array]:
    """Returns global arrays of `batch_size` rows, given the rows that `local_rows` lists for this process, in that order.

    Args:
      shardings: array -> its sharding, with rows over data x fsdp; None: `batch_sharding` for all, as for tokens.
    """
    rows = local_rows(mesh, batch_size)

    def place(x: np.ndarray, sharding: NamedSharding) -> jax.Array:
        def part(index: tuple[slice, ...]) -> np.ndarray:
            first, last, _ = index[0].indices(batch_size)
            # The rows of one device are contiguous in the global batch, so they are contiguous in `x` too.
            start = int(np.searchsorted(rows, first))
            return x[(slice(start, start + last - first), *index[1:])]

        return jax.make_array_from_callback((batch_size, *x.shape[1:]), sharding, part)

    shardings = shardings or dict.fromkeys(batch, batch_sharding(mesh))
    return {name: place(x, shardings[name]) for name, x in batch.items()}
