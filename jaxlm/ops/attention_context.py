"""Self-attention with the tokens of each row split over the mesh's `context` axis.

Queries stay where they are and meet all keys and values, gathered from the other devices: few bytes beside the queries'
work where heads are grouped (Llama 3, arXiv:2407.21783, section 3.3.2). The gather's transpose adds the gradients up and
leaves each device those of its own keys. Every device computes its whole rectangle of queries x keys, the masked part too:
it would wait for the device of the last tokens anyway, of whose rectangle little is masked.

Legend: B batch, T tokens (of a row, and within a device of its part), S tokens of the whole row, N query heads,
K key-value heads, H head dim.
"""

import typing

import jax

from jaxlm import sharding

Pair = tuple[jax.Array | None, jax.Array | None]


def splits(tokens: int) -> bool:
    """Whether the mesh that the caller runs under splits rows of so many tokens (it does not where it does not divide)."""
    ways = sharding.axis_size("context")
    return ways > 1 and tokens % ways == 0


def over_context(
    run: typing.Callable[..., jax.Array],
    q_BxTxNxH: jax.Array,
    k_BxTxKxH: jax.Array,
    v_BxTxKxH: jax.Array,
    *pairs: Pair,
) -> jax.Array:
    """`run` on each device's queries and all keys.

    Args:
      run: `(q_BxTxNxH, k_BxSxKxH, v_BxSxKxH, *pairs, offset) -> out_BxTxNxH`; the device's query t is token offset + t.
      q_BxTxNxH, k_BxTxKxH, v_BxTxKxH: of whole rows; T divisible by the context axis.
      pairs: arrays [B, T] for queries and for keys, or (None, None), as `run` takes them.

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
    """Where the first of this device's tokens stands in its row."""
    return jax.lax.axis_index("context") * tokens
