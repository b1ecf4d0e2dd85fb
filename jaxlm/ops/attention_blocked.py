"""Exact causal attention in query blocks, written for XLA on a CPU (it runs anywhere).

Each block of queries meets only the keys up to its own end, so the masked upper triangle is never computed, and the
backward pass recomputes the probabilities from the saved log-sum-exp instead of keeping them (FlashAttention-2,
Dao 2023, arXiv:2307.08691). The forward pass holds scores as [queries, keys], the backward pass as [keys, queries]:
so that nearly every product is row-major times row-major (or times a transpose), which XLA's CPU products run fastest.

Legend: B batch, T tokens, S keys seen by a block, I queries of a block, N query heads, K key-value heads,
G = N // K, H head dim.
"""

import functools
import operator

import jax
import jax.numpy as jnp

_MASKED = -1e30  # finite, so that exp(score - max) is 0 and never inf - inf
_BLOCK = 128
_MAX_BLOCKS = 32  # blocks are unrolled in the program: longer rows get longer blocks


def blocked_attention(
    q_BxTxNxH: jax.Array,
    k_BxTxKxH: jax.Array,
    v_BxTxKxH: jax.Array,
    q_segment_ids_BxT: jax.Array | None,
    kv_segment_ids_BxT: jax.Array | None,
    *,
    scale: float,
    block: int | None = None,
) -> jax.Array:
    """Causal self-attention within segments, in memory O(T * block) instead of O(T * T).

    Args:
      q_BxTxNxH, k_BxTxKxH, v_BxTxKxH: any T; N a multiple of K.
      q_segment_ids_BxT, kv_segment_ids_BxT: integers, or None for one segment a row.
      scale: of the scores.
      block: queries in a block; None takes 128, or T / 32 for rows over 4,096 tokens.

    Returns:
      [B, T, N, H] in q's dtype; scores, softmax and gradients' sums are float32.

    Raises:
      ValueError: for a block under 1.
    """
    length = q_BxTxNxH.shape[1]
    block = max(_BLOCK, -(-length // _MAX_BLOCKS)) if block is None else block
    if block < 1:
        raise ValueError(f"block must be at least 1 token, got {block}")
    ids = None if q_segment_ids_BxT is None else (q_segment_ids_BxT, kv_segment_ids_BxT)
    return _blocked(q_BxTxNxH, k_BxTxKxH, v_BxTxKxH, ids, float(scale), block)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _blocked(q, k, v, ids, scale, block):
    return _forward(q, k, v, ids, scale, block)[0]


def _edges(length: int, block: int) -> list[tuple[int, int]]:
    return [(start, min(start + block, length)) for start in range(0, length, block)]


def _heads_first(x_BxTxKxH: jax.Array) -> jax.Array:
    return jnp.swapaxes(x_BxTxKxH, 1, 2)


def _query_block(q_BxTxNxH: jax.Array, kv_heads: int, start: int, end: int) -> jax.Array:
    """Rows start..end as [B, K, G, I, H]."""
    batch, _, heads, head_dim = q_BxTxNxH.shape
    q_BxIxKxGxH = q_BxTxNxH[:, start:end].reshape(batch, end - start, kv_heads, heads // kv_heads, head_dim)
    return q_BxIxKxGxH.transpose(0, 2, 3, 1, 4)


def _rows(x_BxKxGxIxH: jax.Array) -> jax.Array:
    """[B, K, G, I, H] -> [B, I, N, H]."""
    batch, kv_heads, group, rows, head_dim = x_BxKxGxIxH.shape
    return x_BxKxGxIxH.transpose(0, 3, 1, 2, 4).reshape(batch, rows, kv_heads * group, head_dim)


def _visible(ids, start: int, end: int) -> jax.Array:
    """Which of keys 0..end the queries start..end may see: [B or 1, I, S]."""
    mask = (jnp.arange(end)[None, :] <= jnp.arange(start, end)[:, None])[None]
    if ids is None:
        return mask
    return mask & (ids[0][:, start:end, None] == ids[1][:, None, :end])


_einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


def _forward(q_BxTxNxH, k_BxTxKxH, v_BxTxKxH, ids, scale, block):
    k_BxKxTxH, v_BxKxTxH = _heads_first(k_BxTxKxH), _heads_first(v_BxTxKxH)
    q_BxTxNxH = q_BxTxNxH * jnp.asarray(scale, q_BxTxNxH.dtype)
    outs, normalisers = [], []
    for start, end in _edges(q_BxTxNxH.shape[1], block):
        q_BxKxGxIxH = _query_block(q_BxTxNxH, k_BxTxKxH.shape[2], start, end)
        scores = _einsum("bkgih,bksh->bkgis", q_BxKxGxIxH, k_BxKxTxH[:, :, :end])
        scores = jnp.where(_visible(ids, start, end)[:, None, None], scores, _MASKED)
        highest = jnp.max(scores, axis=-1, keepdims=True)
        weights = jnp.exp(scores - highest)
        total = jnp.sum(weights, axis=-1, keepdims=True)
        out = _einsum("bkgis,bksh->bkgih", weights.astype(v_BxTxKxH.dtype), v_BxKxTxH[:, :, :end])
        outs.append(_rows((out / total).astype(q_BxTxNxH.dtype)))
        normalisers.append((highest + jnp.log(total))[..., 0])  # [B, K, G, I]
    return jnp.concatenate(outs, axis=1), normalisers


def _blocked_fwd(q, k, v, ids, scale, block):
    out, normalisers = _forward(q, k, v, ids, scale, block)
    return out, (q, k, v, ids, out, normalisers)


def _blocked_bwd(scale, block, residuals, d_out_BxTxNxH):
    q_BxTxNxH, k_BxTxKxH, v_BxTxKxH, ids, out_BxTxNxH, normalisers = residuals
    kv_heads, dtype = k_BxTxKxH.shape[2], q_BxTxNxH.dtype
    k_BxKxTxH, v_BxKxTxH = _heads_first(k_BxTxKxH), _heads_first(v_BxTxKxH)
    k_BxKxHxT = jnp.swapaxes(k_BxKxTxH, 2, 3)  # turned once: else XLA turns every block of d_scores
    scaled_BxTxNxH = q_BxTxNxH * jnp.asarray(scale, dtype)
    delta_BxTxNx1 = jnp.sum(d_out_BxTxNxH.astype(jnp.float32) * out_BxTxNxH, axis=-1, keepdims=True)
    edges = _edges(q_BxTxNxH.shape[1], block)
    d_q, d_k, d_v = [], [], []
    for (start, end), normaliser in zip(edges, normalisers, strict=True):
        q_BxKxGxIxH = _query_block(scaled_BxTxNxH, kv_heads, start, end)
        d_out_BxKxGxIxH = _query_block(d_out_BxTxNxH, kv_heads, start, end)
        delta_BxKxGxI = _query_block(delta_BxTxNx1, kv_heads, start, end)[..., 0]
        mask_BxSxI = jnp.swapaxes(_visible(ids, start, end), 1, 2)
        scores = _einsum("bksh,bkgih->bksgi", k_BxKxTxH[:, :, :end], q_BxKxGxIxH)
        scores = jnp.where(mask_BxSxI[:, None, :, None, :], scores, _MASKED)
        weights = jnp.exp(scores - normaliser[:, :, None])
        slopes = _einsum("bksh,bkgih->bksgi", v_BxKxTxH[:, :, :end], d_out_BxKxGxIxH)
        d_scores = (weights * (slopes - delta_BxKxGxI[:, :, None])).astype(dtype)
        d_v.append(_einsum("bksgi,bkgih->bksh", weights.astype(dtype), d_out_BxKxGxIxH))
        d_k.append(_einsum("bksgi,bkgih->bksh", d_scores, q_BxKxGxIxH))
        d_q_BxKxHxGxI = _einsum("bkhs,bksgi->bkhgi", k_BxKxHxT[..., :end], d_scores)
        d_q.append(_rows((jnp.moveaxis(d_q_BxKxHxGxI, 2, 4) * scale).astype(dtype)))
    return jnp.concatenate(d_q, axis=1), _sum_keys(d_k, edges, dtype), _sum_keys(d_v, edges, dtype), None


def _sum_keys(parts: list[jax.Array], edges: list[tuple[int, int]], dtype) -> jax.Array:
    """Adds up the gradients of the keys: parts[i] covers keys 0..edges[i][1]. [B, K, S, H] -> [B, T, K, H]."""
    sums = [
        functools.reduce(operator.add, [part[:, :, start:end] for part in parts[i:]])
        for i, (start, end) in enumerate(edges)
    ]
    return jnp.swapaxes(jnp.concatenate(sums, axis=2), 1, 2).astype(dtype)


_blocked.defvjp(_blocked_fwd, _blocked_bwd)
