"""Operations of decoding, which are bound by memory bandwidth: attention over a cache, products with few rows.

Legend: B batch, T new tokens, S cache slots, N query heads, K key-value heads, G = N // K, H head dim, I inputs and O
outputs of a product, M rows.
"""

import jax
import jax.numpy as jnp

from jaxlm.ops import int8
from jaxlm.ops.int8 import Int8

_MASKED = -1e30  # finite, so that exp(score - max) is 0 and never inf - inf


def cached_attention(
    q_BxTxNxH: jax.Array, k_BxKxHxS: jax.Array, v_BxKxSxH: jax.Array, mask_BxTxS: jax.Array
) -> jax.Array:
    """Returns the attention of a few new tokens over the cache, with scores scaled by H ** -0.5: [B, T, N, H] in q's dtype.

    Keys have slots as the last axis, values have slots before channels, so that both products read the cache in memory
    order. If keys had the layout of values, their product would take four times as long on CPUs (dev/LOG.md,
    2026-11-21). Scores and softmax are float32.

    Args:
      mask_BxTxS: True if the query may attend to the slot; each query must have at least one.
    """
    batch, length, heads, head_dim = q_BxTxNxH.shape
    kv_heads = k_BxKxHxS.shape[1]
    group = heads // kv_heads
    q = q_BxTxNxH.reshape(batch, length, kv_heads, group, head_dim)
    q_BxKxTGxH = q.transpose(0, 2, 1, 3, 4).reshape(batch, kv_heads, length * group, head_dim)
    by_head = (((3,), (2,)), ((0, 1), (0, 1)))
    scores_BxKxTGxS = jax.lax.dot_general(q_BxKxTGxH, k_BxKxHxS, by_head, preferred_element_type=jnp.float32)
    mask_Bx1xTGxS = jnp.repeat(mask_BxTxS, group, axis=1)[:, None]
    scores_BxKxTGxS = jnp.where(mask_Bx1xTGxS, scores_BxKxTGxS * head_dim**-0.5, _MASKED)
    weights_BxKxTGxS = jax.nn.softmax(scores_BxKxTGxS, axis=-1).astype(v_BxKxSxH.dtype)
    out = jax.lax.dot_general(weights_BxKxTGxS, v_BxKxSxH, by_head, preferred_element_type=jnp.float32)
    out = out.reshape(batch, kv_heads, length, group, head_dim).transpose(0, 2, 1, 3, 4)
    return out.reshape(q_BxTxNxH.shape).astype(q_BxTxNxH.dtype)


def write_cache(
    k_BxKxHxS: jax.Array, v_BxKxSxH: jax.Array, k_BxTxKxH: jax.Array, v_BxTxKxH: jax.Array, slot: int | jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the cache with new keys and values in the slots from `slot` on, the same in all rows; or in slots `slot` (T,).

    The update is in place if the cache is donated or carried by a loop. The cache may have more rows than the new tokens.
    """
    if jnp.ndim(slot):
        for t in range(len(slot)):
            new = (x[:, t : t + 1] for x in (k_BxTxKxH, v_BxTxKxH))
            k_BxKxHxS, v_BxKxSxH = write_cache(k_BxKxHxS, v_BxKxSxH, *new, slot[t])
        return k_BxKxHxS, v_BxKxSxH
    return (
        jax.lax.dynamic_update_slice(k_BxKxHxS, k_BxTxKxH.transpose(0, 2, 3, 1), (0, 0, 0, slot)),
        jax.lax.dynamic_update_slice(v_BxKxSxH, v_BxTxKxH.transpose(0, 2, 1, 3), (0, 0, slot, 0)),
    )


def row_product(
    x_MxI: jax.Array, kernel_OxI: jax.Array | Int8, preferred_element_type: jax.typing.DTypeLike | None = None
) -> jax.Array:
    """Returns x times the transposed kernel, (M, O). For few rows of x it takes as long as reading the kernel once.

    With a quantised kernel it is `int8.product`. Else on one CPU the kernel is the left operand, because XLA's library copies
    the right operand before it multiplies.
    """

    def plain(x_MxI: jax.Array, kernel_OxI: jax.Array) -> jax.Array:
        contract_last = (((1,), (1,)), ((), ()))
        return jax.lax.dot_general(x_MxI, kernel_OxI, contract_last, preferred_element_type=preferred_element_type)

    def streamed(x_MxI: jax.Array, kernel_OxI: jax.Array) -> jax.Array:
        y_OxM = jnp.dot(kernel_OxI, x_MxI.T, preferred_element_type=preferred_element_type)
        # Without the barrier XLA swaps the operands back to save a transpose of the small result.
        return jax.lax.optimization_barrier(y_OxM).T

    if isinstance(kernel_OxI, Int8):
        return int8.product(x_MxI, kernel_OxI).astype(preferred_element_type or x_MxI.dtype)
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty and mesh.size > 1:
        return plain(x_MxI, kernel_OxI)
    return jax.lax.platform_dependent(x_MxI, kernel_OxI, cpu=streamed, default=plain)


def first_argmax(x_BxV: jax.Array) -> jax.Array:
    """Returns `jnp.argmax` over the last axis, int32: the first index of the highest value.

    Uses two reductions, a maximum and a minimum, which vectorise on CPUs, unlike the reduction of pairs in `jnp.argmax`.
    """
    highest_Bx1 = jnp.max(x_BxV, axis=-1, keepdims=True)
    ids_V = jnp.arange(x_BxV.shape[-1], dtype=jnp.int32)
    return jnp.min(jnp.where(x_BxV == highest_Bx1, ids_V, x_BxV.shape[-1]), axis=-1)
