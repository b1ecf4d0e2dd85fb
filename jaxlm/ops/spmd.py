"""Applies the embedding and the head on a mesh, each device to its own tokens. The compiler alone would gather too much.

Legend: B batch, T tokens, P devices that shard the tokens, M tokens of a device, D model, V vocabulary as stored.
"""

import math
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, PartitionSpec

from jaxlm.devices import sharding

Result = typing.TypeVar("Result")


def lookup(table_VxD: jax.Array, ids_BxT: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Returns `table_VxD[ids_BxT]` in `dtype`, [B, T, D].

    If fsdp shards both the rows of the batch and the columns of the table, each device looks up its own columns for the
    rows of all devices, and then the devices exchange the results (all-to-all). So only ids are gathered. The compiler
    alone would gather the table, or if context shards T, the vectors of the whole batch.
    """
    mesh = jax.sharding.get_abstract_mesh()
    tokens, axes = _token_axes(mesh, ids_BxT.shape)
    table = PartitionSpec() if mesh.empty else sharding.spec((None, "embed"), table_VxD.shape, mesh)
    if "fsdp" not in axes or "fsdp" not in table:
        return table_VxD[ids_BxT].astype(dtype)

    def on_device(table_VxD, ids_BxT):
        ids_BxT = jax.lax.all_gather(ids_BxT, "fsdp", axis=0, tiled=True)
        rows_BxTxD = table_VxD[ids_BxT].astype(dtype)
        return jax.lax.all_to_all(rows_BxTxD, "fsdp", split_axis=0, concat_axis=2, tiled=True)

    specs = {"in_specs": (table, tokens), "out_specs": tokens}
    return jax.shard_map(on_device, **specs, axis_names=set(axes), check_vma=False)(table_VxD, ids_BxT)


def _token_axes(mesh: AbstractMesh, shape: tuple[int, int]) -> tuple[PartitionSpec, tuple[str, ...]]:
    tokens = PartitionSpec(None, None) if mesh.empty else sharding.spec(("batch", "seq"), shape, mesh)
    return tokens, tuple(axis for entry in tokens for axis in _names(entry))


def _names(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else entry or ()


def over_tokens(
    function: Callable[..., Result], hidden_BxTxD: jax.Array, head_DxV: jax.Array, *tokens_BxT: jax.Array, summed: bool
) -> Result:
    """Applies `function(hidden_MxD, head_DxV, *tokens_M)` to the tokens of each device, and joins the results.

    If no mesh (`jax.set_mesh`) shards the tokens, `function` gets all tokens at once.

    Args:
      hidden_BxTxD, tokens_BxT: sharded like batches. `head_DxV`: sharded like its parameter.
      summed: True if `function` returns sums over its tokens (an array or a tree), which are added up over devices. False
        if it returns a number for each token, [M] (an array or a tree), which become [B, T].
    """
    mesh, (batch, length) = jax.sharding.get_abstract_mesh(), hidden_BxTxD.shape[:2]
    tokens, axes = _token_axes(mesh, (batch, length))
    if not axes:
        result = function(hidden_BxTxD.reshape(batch * length, -1), head_DxV, *map(jnp.ravel, tokens_BxT))
        return result if summed else jax.tree.map(lambda x_M: x_M.reshape(batch, length), result)
    # Why the devices become a dimension P: [B, T] is sharded along both axes, and no sharding of [M] expresses that, so
    # flattening would make the compiler gather the hidden states, and a loop over tiles of [M] would sum the head's gradient
    # over devices in every iteration. With P in front each device flattens and tiles its own tokens. The head is gathered
    # once, before the loop, and vmap sums its gradient over P once, after the loop.
    rows, columns = (math.prod(mesh.shape[axis] for axis in _names(entry)) for entry in tokens)
    dtype = head_DxV.dtype
    # Why the head's sharding is set twice: the head was cast from a float32 parameter. The first constraint keeps the cast
    # head sharded like the parameter, the second gathers it over fsdp. With the second alone the compiler gathers the float32
    # parameter before casting: twice the bytes. Then float32, so that the devices' gradients are summed in float32.
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

    def joined(x_PxM: jax.Array) -> jax.Array:
        return x_PxM.reshape(rows, columns, batch // rows, length // columns).swapaxes(1, 2).reshape(batch, length)

    return jax.tree.map(joined, result)
