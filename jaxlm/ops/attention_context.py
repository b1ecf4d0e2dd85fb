"""Self-attention with the tokens of each row split over the mesh's `context` axis.

Each device keeps its own queries and gathers all keys and values from the others (Llama 3, arXiv:2407.21783, section
3.3.2). With grouped heads these are few bytes compared to the work of the queries. In the backward pass the gather
becomes a sum over devices, after which each device has the gradients of its own keys. Every device computes the scores
of all its queries and all keys, even the masked ones. Skipping these would save no time, since the device with the last
tokens, of whose scores few are masked, would take as long as before.

Legend: B batch, T tokens (of a row, and within a device of its part), S tokens of the whole row, N query heads,
K key-value heads, H head dim.
"""

import typing

import jax

from jaxlm import sharding

Pair = tuple[jax.Array | None, jax.Array | None]


def splits(tokens: int) -> bool:
    """True if the current mesh splits rows of `tokens` tokens over `context`. False if the axis does not divide `tokens`."""
    ways = sharding.axis_size("context")
    return ways > 1 and tokens % ways == 0


def over_context(
    run: typing.Callable[..., jax.Array], q_BxTxNxH: jax.Array, k_BxTxKxH: jax.Array, v_BxTxKxH: jax.Array, *pairs: Pair
) -> jax.Array:
    """Runs `run` on every device, with the device's own queries and all keys.

    Args:
      run: a function `(q_BxTxNxH, k_BxSxKxH, v_BxSxKxH, *pairs, offset) -> out_BxTxNxH`. Query t of the device is token
        offset + t of its row.
      q_BxTxNxH, k_BxTxKxH, v_BxTxKxH: queries, keys and values of whole rows; the context axis divides T.
      pairs: pairs of arrays [B, T], one for queries and one for keys, or (None, None), in the order in which `run`
        takes them.

    Returns:
      [B, T, N, H], split as the queries are.
    """
    mesh = jax.sharding.get_abstract_mesh()
    tokens = sharding.spec(("batch", "seq"), q_BxTxNxH.shape[:2], mesh, ones=True)
    # Queries follow the key-value heads, which tensor may not divide.
    heads = sharding.spec(("batch", "seq", "kv_heads", None), k_BxTxKxH.shape, mesh, ones=True)

    def gather(x: jax.Array) -> jax.Array:
        return jax.lax.all_gather(x, "context", axis=1, tiled=True)

    def on_device(q_BxTxNxH, k_BxTxKxH, v_BxTxKxH, *own):
        whole = [(mine, None if others is None else gather(others)) for mine, others in own]
        return run(q_BxTxNxH, gather(k_BxTxKxH), gather(v_BxTxKxH), *whole, _offset(q_BxTxNxH.shape[1]))

    specs = (heads, heads, heads, *(tokens for _ in pairs))
    split = jax.shard_map(on_device, in_specs=specs, out_specs=heads, check_vma=False)
    return split(q_BxTxNxH, k_BxTxKxH, v_BxTxKxH, *pairs)


def _offset(tokens: int) -> jax.Array:
    """The index in its row of this device's first token."""
    return jax.lax.axis_index("context") * tokens
