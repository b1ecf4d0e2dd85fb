"""Exact causal attention in query blocks, written for XLA on a CPU: the masked upper triangle is never computed.

The backward pass recomputes the probabilities from the saved log-sum-exp (FlashAttention-2, arXiv:2307.08691). The forward pass
holds scores as [queries, keys], the backward pass as [keys, queries]: so nearly every product is row-major times row-major (or
times a transpose), which XLA's CPU backend runs fastest.

Legend: B batch, T queries, S keys (of all or of one block), I queries of a block, N query heads, K key-value heads,
G = N // K, H head dim.
"""

import functools
import itertools
import operator

import jax
import jax.numpy as jnp

_MASKED = -1e30  # finite, so that exp(score - max) is 0 and never inf - inf
_BLOCK = 128
_MAX_BLOCKS = 32  # blocks are unrolled in the program: longer rows get longer blocks


def blocked_attention(
    q_BxTxNxH: jax.Array,
    k_BxSxKxH: jax.Array,
    v_BxSxKxH: jax.Array,
    ids: tuple[jax.Array | None, jax.Array | None],
    scale: float,
    offset: jax.Array | None = None,
    block: int | None = None,
) -> jax.Array:
    """Returns causal self-attention within segments, [B, T, N, H] in q's dtype. Memory is O(T * block) instead of O(T * T).

    Scores, softmax and sums of gradients are float32.

    Args:
      ids: as `visible` takes them.
      offset: the index of the first query among the keys, an integer scalar. Then there may be more keys than queries, and
        each block is multiplied with all keys, since the offset is known only at run time.
      block: the number of queries in a block; None for 128, or T / 32 for rows over 4,096 tokens.
    """
    length = q_BxTxNxH.shape[1]
    block = max(_BLOCK, -(-length // _MAX_BLOCKS)) if block is None else block
    return _blocked(q_BxTxNxH, k_BxSxKxH, v_BxSxKxH, ids, offset, float(scale), block)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _blocked(q, k, v, ids, offset, scale, block):
    return _forward(q, k, v, ids, offset, scale, block)[0]


def _edges(queries: int, keys: int, block: int, offset: jax.Array | None) -> list[tuple[int, int, int]]:
    """Returns the blocks as (first query, end of the queries, number of keys that the block needs)."""
    ends = [(start, min(start + block, queries)) for start in range(0, queries, block)]
    return [(start, end, end if offset is None else keys) for start, end in ends]


def _heads_first(x_BxSxKxH: jax.Array) -> jax.Array:
    return jnp.swapaxes(x_BxSxKxH, 1, 2)


def _query_block(q_BxTxNxH: jax.Array, kv_heads: int, start: int, end: int) -> jax.Array:
    batch, _, heads, head_dim = q_BxTxNxH.shape
    q_BxIxKxGxH = q_BxTxNxH[:, start:end].reshape(batch, end - start, kv_heads, heads // kv_heads, head_dim)
    return q_BxIxKxGxH.transpose(0, 2, 3, 1, 4)


def _rows(x_BxKxGxIxH: jax.Array) -> jax.Array:
    batch, kv_heads, group, rows, head_dim = x_BxKxGxIxH.shape
    return x_BxKxGxIxH.transpose(0, 3, 1, 2, 4).reshape(batch, rows, kv_heads * group, head_dim)


def visible(ids, offset, start: int, end: int, seen: int) -> jax.Array:
    """Returns booleans [B or 1, I, S]: True where a query of start..end may attend to a key of 0..seen.

    Args:
      ids: (segment ids of queries, of keys), (None, `until_BxT` of `ops.attention.attention`) or (None, None).
      offset: as in `blocked_attention`.
    """
    first = start if offset is None else start + offset
    queries_Ix1 = first + jnp.arange(end - start)[:, None]
    mask = (jnp.arange(seen)[None, :] <= queries_Ix1)[None]
    if ids[1] is None:
        return mask
    if ids[0] is None:
        return mask & (queries_Ix1 < ids[1][:, None, :seen])
    return mask & (ids[0][:, start:end, None] == ids[1][:, None, :seen])


_einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


def _forward(q_BxTxNxH, k_BxSxKxH, v_BxSxKxH, ids, offset, scale, block):
    k_BxKxSxH, v_BxKxSxH = _heads_first(k_BxSxKxH), _heads_first(v_BxSxKxH)
    scaled_BxTxNxH = q_BxTxNxH * jnp.asarray(scale, q_BxTxNxH.dtype)  # scales H numbers for each query, not S scores
    outs, normalisers = [], []
    for start, end, seen in _edges(q_BxTxNxH.shape[1], k_BxSxKxH.shape[1], block, offset):
        q_BxKxGxIxH = _query_block(scaled_BxTxNxH, k_BxSxKxH.shape[2], start, end)
        scores = _einsum("bkgih,bksh->bkgis", q_BxKxGxIxH, k_BxKxSxH[:, :, :seen])
        scores = jnp.where(visible(ids, offset, start, end, seen)[:, None, None], scores, _MASKED)
        highest = jnp.max(scores, axis=-1, keepdims=True)
        weights = jnp.exp(scores - highest)
        total = jnp.sum(weights, axis=-1, keepdims=True)
        out = _einsum("bkgis,bksh->bkgih", weights.astype(v_BxSxKxH.dtype), v_BxKxSxH[:, :, :seen])
        # Divided after the product with the values: H numbers for each query, not S.
        outs.append(_rows((out / total).astype(q_BxTxNxH.dtype)))
        # The log-sum-exp of the scores: exp(score - normaliser) is the probability, in the backward pass.
        normalisers.append((highest + jnp.log(total))[..., 0])  # [B, K, G, I]
    out_BxTxNxH = jnp.concatenate(outs, axis=1)
    return out_BxTxNxH, (q_BxTxNxH, k_BxSxKxH, v_BxSxKxH, ids, offset, out_BxTxNxH, normalisers)


def _backward(scale, block, residuals, d_out_BxTxNxH):
    q_BxTxNxH, k_BxSxKxH, v_BxSxKxH, ids, offset, out_BxTxNxH, normalisers = residuals
    kv_heads, dtype = k_BxSxKxH.shape[2], q_BxTxNxH.dtype
    k_BxKxSxH, v_BxKxSxH = _heads_first(k_BxSxKxH), _heads_first(v_BxSxKxH)
    k_BxKxHxS = jnp.swapaxes(k_BxKxSxH, 2, 3)  # transposed once: else XLA transposes every block of d_scores
    scaled_BxTxNxH = q_BxTxNxH * jnp.asarray(scale, dtype)
    # A score's gradient is p * (slope - delta), where slope is the gradient of its probability p, and delta the sum of
    # p * slope over the keys. delta equals the dot product of the output with its gradient, so no sum over keys is needed.
    delta_BxTxNx1 = jnp.sum(d_out_BxTxNxH.astype(jnp.float32) * out_BxTxNxH, axis=-1, keepdims=True)
    edges = _edges(q_BxTxNxH.shape[1], k_BxSxKxH.shape[1], block, offset)
    d_q, d_k, d_v = [], [], []
    for (start, end, seen), normaliser in zip(edges, normalisers, strict=True):
        q_BxKxGxIxH = _query_block(scaled_BxTxNxH, kv_heads, start, end)
        d_out_BxKxGxIxH = _query_block(d_out_BxTxNxH, kv_heads, start, end)
        delta_BxKxGxI = _query_block(delta_BxTxNx1, kv_heads, start, end)[..., 0]
        mask_BxSxI = jnp.swapaxes(visible(ids, offset, start, end, seen), 1, 2)
        scores = _einsum("bksh,bkgih->bksgi", k_BxKxSxH[:, :, :seen], q_BxKxGxIxH)
        scores = jnp.where(mask_BxSxI[:, None, :, None, :], scores, _MASKED)
        weights = jnp.exp(scores - normaliser[:, :, None])
        slopes = _einsum("bksh,bkgih->bksgi", v_BxKxSxH[:, :, :seen], d_out_BxKxGxIxH)
        d_scores = (weights * (slopes - delta_BxKxGxI[:, :, None])).astype(dtype)
        d_v.append(_einsum("bksgi,bkgih->bksh", weights.astype(dtype), d_out_BxKxGxIxH))
        d_k.append(_einsum("bksgi,bkgih->bksh", d_scores, q_BxKxGxIxH))
        d_q_BxKxHxGxI = _einsum("bkhs,bksgi->bkhgi", k_BxKxHxS[..., :seen], d_scores)
        d_q.append(_rows((jnp.moveaxis(d_q_BxKxHxGxI, 2, 4) * scale).astype(dtype)))
    return jnp.concatenate(d_q, axis=1), _sum_keys(d_k, dtype), _sum_keys(d_v, dtype), None, None


def _sum_keys(parts: list[jax.Array], dtype) -> jax.Array:
    """Returns the sum of parts of the keys' gradients; each part covers the first S keys. [B, K, S, H] -> [B, S, K, H]."""
    ends = [0, *sorted({part.shape[2] for part in parts})]
    sums = [
        functools.reduce(operator.add, [part[:, :, start:end] for part in parts if part.shape[2] >= end])
        for start, end in itertools.pairwise(ends)
    ]
    return jnp.swapaxes(jnp.concatenate(sums, axis=2), 1, 2).astype(dtype)


_blocked.defvjp(_forward, _backward)
