"""The two ends of a model, embedding and head, by each device for its own tokens: what the compiler would do badly.

Legend: B batch, T tokens, M tokens of a device, D model, V vocabulary as stored.
"""

import math
import typing

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, PartitionSpec

from jaxlm import sharding


def lookup(table_VxD: jax.Array, ids_BxT: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """`table_VxD[ids_BxT]` in a dtype.

    Where devices split both the rows of the batch and the columns of the table over fsdp, each looks up its columns for
    the rows of all of them, and they trade: ids are gathered, but neither the table nor the vectors of the whole batch
    (which the compiler gathers where context splits T).
    """
    mesh = jax.sharding.get_abstract_mesh()
    tokens, axes = _token_axes(mesh, ids_BxT.shape)
    table = PartitionSpec() if mesh.empty else sharding.spec((None, "embed"), table_VxD.shape, mesh)
    if "fsdp" not in axes or "fsdp" not in table:
        return table_VxD[ids_BxT].astype(dtype)

    def on_device(table_VxD, ids_BxT):
        ids_BxT = jax.lax.all_gather(ids_BxT, "fsdp", axis=0, tiled=True)
        found_BxTxD = table_VxD[ids_BxT].astype(dtype)
        return jax.lax.all_to_all(found_BxTxD, "fsdp", split_axis=0, concat_axis=2, tiled=True)

    specs = {"in_specs": (table, tokens), "out_specs": tokens}
    return jax.shard_map(on_device, **specs, axis_names=set(axes), check_vma=False)(table_VxD, ids_BxT)


def _token_axes(mesh: AbstractMesh, shape: tuple[int, int]) -> tuple[PartitionSpec, tuple[str, ...]]:
    """How arrays [B, T] are split over a mesh, and over which of its axes."""
    tokens = PartitionSpec(None, None) if mesh.empty else sharding.spec(("batch", "seq"), shape, mesh)
    return tokens, tuple(axis for entry in tokens for axis in _names(entry))


def _names(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else entry or ()


def over_tokens(
    function: typing.Callable[..., typing.Any],
    hidden_BxTxD: jax.Array,
    head_DxV: jax.Array,
    *tokens_BxT: jax.Array,
    summed: bool,
) -> typing.Any:
    """`function(hidden_MxD, head_DxV, *tokens_M)` on the tokens of each device of the mesh (`jax.set_mesh`), if any.

    Flattening [B, T] to rows would make the compiler gather the hidden states of devices that split T; and a loop over
    tiles of rows that are split over devices adds up the head's gradient over devices in every turn. Here the devices
    are a dimension of their own (P): each flattens and tiles its tokens, the head is gathered once, and its gradients
    are added up once, in float32.

    Args:
      function: as above. It is given the head in its own dtype.
      hidden_BxTxD, tokens_BxT: split as batches are.
      head_DxV: split as its parameter is.
      summed: True: the results are sums over tokens, and the sums over all devices are returned; False: the result has
        one number for each token, and is returned as [B, T].
    """
    mesh, (batch, length) = jax.sharding.get_abstract_mesh(), hidden_BxTxD.shape[:2]
    tokens, axes = _token_axes(mesh, (batch, length))
    if not axes:
        result = function(hidden_BxTxD.reshape(batch * length, -1), head_DxV, *map(jnp.ravel, tokens_BxT))
        return result if summed else result.reshape(batch, length)
    rows, columns = (math.prod(mesh.shape[axis] for axis in _names(entry)) for entry in tokens)
    dtype = head_DxV.dtype
    # Pinned twice: the compiler would gather what the head is cast from, in float32.
    head_DxV = sharding.constrain(sharding.constrain(head_DxV, "embed", "vocab"), None, "vocab").astype(jnp.float32)

    def split(x_BxT: jax.Array) -> jax.Array:
        x = x_BxT.reshape(rows, batch // rows, columns, length // columns, *x_BxT.shape[2:]).swapaxes(1, 2)
        return jax.lax.with_sharding_constraint(x.reshape(rows * columns, -1, *x_BxT.shape[2:]), PartitionSpec(axes))

    def on_device(hidden_MxD, head_DxV, *tokens_M):
        return function(hidden_MxD, head_DxV.astype(dtype), *tokens_M)

    over = jax.vmap(on_device, in_axes=(0, None, *(0 for _ in tokens_BxT)))
    result = over(split(hidden_BxTxD), head_DxV, *map(split, tokens_BxT))
    if summed:
        return jax.tree.map(lambda x_P: jnp.sum(x_P, axis=0), result)
    return result.reshape(rows, columns, batch // rows, length // columns).swapaxes(1, 2).reshape(batch, length)
