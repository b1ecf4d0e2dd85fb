"""Causal grouped-query attention over packed rows: one function, interchangeable backends.

Legend: B batch, T query tokens, S key-value tokens (or cache slots), N query heads, K key-value heads, G = N // K query
heads to a key-value head, H head dim. Query head n uses key-value head n // G.
"""

import functools
import typing

import jax
import jax.numpy as jnp

from jaxlm.config import ConfigError
from jaxlm.devices import sharding
from jaxlm.ops import attention_blocked, attention_kernels

BACKENDS = ("xla", "blocked", "cudnn", "cudnn_packed", "tokamax", "pallas")
TREES = ("xla", "blocked")  # the backends that support `until_BxT`
_AUTO = {"cpu": "blocked", "gpu": "cudnn", "tpu": "pallas"}
_PLATFORMS = {"cudnn": ("gpu",), "cudnn_packed": ("gpu",), "tokamax": ("gpu",), "pallas": ("gpu", "tpu")}
_MASKED = -1e30  # finite, so that exp(score - max) is 0 and never inf - inf


def resolve_backend(name: str, platform: str) -> str:
    """Returns the backend for a requested name, one of BACKENDS or "auto" (`models.hardware` refines "auto" for Hopper).

    Args:
      platform: "cpu", "gpu" (also "cuda" and "rocm") or "tpu", as `jax.default_backend()` or a device names it.

    Raises ConfigError if the backend does not run on the platform; there is no fallback.
    """
    platform = "gpu" if platform in ("cuda", "rocm") else platform
    if name == "auto":
        return _AUTO.get(platform, "xla")
    if platform not in _PLATFORMS.get(name, (platform,)):
        raise ConfigError(
            f"config.model.attention: {name!r} runs on {' and '.join(_PLATFORMS[name])}, not on {platform}; "
            f"'auto' would take {_AUTO.get(platform, 'xla')!r}"
        )
    return name


@jax.named_scope("attention")  # a profile finds attention's products by this name
def attention(
    q_BxTxNxH: jax.Array,
    k_BxTxKxH: jax.Array,
    v_BxTxKxH: jax.Array,
    *,
    backend: str,
    segment_ids_BxT: jax.Array | None = None,
    until_BxT: jax.Array | None = None,
    scale: float | None = None,
) -> jax.Array:
    """Returns softmax(scale * q k^T) v over the keys that a query may see: those not after it and in its own segment.

    The result is [B, T, N, H] in q's dtype; scores and softmax are float32. If the mesh (`jax.set_mesh`) splits the tokens over
    its `context` axis, keys and values are gathered over that axis (see `over_context`).

    Args:
      q_BxTxNxH, k_BxTxKxH, v_BxTxKxH: queries, keys and values; N is a multiple of K.
      backend: one of BACKENDS, see `resolve_backend`.
      segment_ids_BxT: integer ids; tokens attend only within equal ids. None means that each row is one segment.
        `cudnn_packed` and `tokamax` take each run of equal ids as a segment, so ids must increase along a row.
      until_BxT: integers, in place of segment ids: tokens at indices s to until[s] - 1 attend to the token at index s. So
        texts can share a common prefix, laid out like a trie in depth-first order (see `eval.likelihood`). Only the backends
        in TREES support this.
      scale: the scale of the scores; None for H ** -0.5.

    Raises ValueError if the backend does not support `until_BxT`, or can't split rows over `context` (it is not in
    CONTEXT_ATTENTION), and errors of cuDNN or Pallas.
    """
    scale = q_BxTxNxH.shape[-1] ** -0.5 if scale is None else scale
    run, ids = functools.partial(_run, backend=backend, scale=scale), (segment_ids_BxT, segment_ids_BxT)
    if until_BxT is not None:
        if backend not in TREES:
            raise ValueError(f"attention backend {backend!r} can't share prefixes of texts: use 'blocked' or 'xla'")
        ids = (None, until_BxT)
    ways = sharding.axis_size("context")
    if ways == 1 or q_BxTxNxH.shape[1] % ways:
        return run(q_BxTxNxH, k_BxTxKxH, v_BxTxKxH, ids)
    if backend not in sharding.CONTEXT_ATTENTION:
        raise ValueError(f"attention backend {backend!r} does not split rows over devices; use 'blocked' or 'xla'")
    return over_context(run, q_BxTxNxH, k_BxTxKxH, v_BxTxKxH, ids)


def _run(q_BxTxNxH, k_BxSxKxH, v_BxSxKxH, ids, offset=None, *, backend: str, scale: float) -> jax.Array:
    """Runs a backend. With an offset (a traced integer scalar), query t has index offset + t among the keys."""
    if backend == "xla":
        mask_BxTxS = attention_blocked.visible(ids, offset, 0, q_BxTxNxH.shape[1], k_BxSxKxH.shape[1])
        return masked_attention(q_BxTxNxH, k_BxSxKxH, v_BxSxKxH, mask_BxTxS, scale)
    if backend in sharding.CONTEXT_ATTENTION:
        function = attention_blocked.blocked_attention if backend == "blocked" else attention_kernels.cudnn_attention
        return function(q_BxTxNxH, k_BxSxKxH, v_BxSxKxH, ids, scale, offset)
    function = {
        "cudnn_packed": attention_kernels.cudnn_packed_attention,
        "tokamax": attention_kernels.tokamax_attention,
        "pallas": attention_kernels.pallas_attention,
    }[backend]
    return function(q_BxTxNxH, k_BxSxKxH, v_BxSxKxH, ids[0], scale)


def masked_attention(
    q_BxTxNxH: jax.Array, k_BxSxKxH: jax.Array, v_BxSxKxH: jax.Array, mask_BxTxS: jax.Array, scale: float
) -> jax.Array:
    """Returns attention under any mask, [B, T, N, H] in q's dtype: the reference for the other backends.

    All scores are in memory at once. `mask_BxTxS` (or [1, T, S]) is True if the query may attend to the key; a query that may
    attend to no key gets zeros.
    """
    batch, length, heads, head_dim = q_BxTxNxH.shape
    kv_heads = k_BxSxKxH.shape[2]
    q_BxTxKxGxH = q_BxTxNxH.reshape(batch, length, kv_heads, heads // kv_heads, head_dim)
    scores_BxKxGxTxS = jnp.einsum("btkgh,bskh->bkgts", q_BxTxKxGxH, k_BxSxKxH, preferred_element_type=jnp.float32)
    mask = mask_BxTxS[:, None, None]
    scores_BxKxGxTxS = jnp.where(mask, scores_BxKxGxTxS * scale, _MASKED)
    # The maximum keeps exp in range and cancels out of the quotient, so that it needs no gradient.
    highest = jax.lax.stop_gradient(jnp.max(scores_BxKxGxTxS, axis=-1, keepdims=True))
    # Masked again: if a query may see no key, the maximum is _MASKED itself, and exp gives 1 everywhere.
    weights_BxKxGxTxS = jnp.where(mask, jnp.exp(scores_BxKxGxTxS - highest), 0.0)
    total = jnp.sum(weights_BxKxGxTxS, axis=-1, keepdims=True)
    weights_BxKxGxTxS = (weights_BxKxGxTxS / jnp.maximum(total, 1e-30)).astype(v_BxSxKxH.dtype)
    out = jnp.einsum("bkgts,bskh->btkgh", weights_BxKxGxTxS, v_BxSxKxH, preferred_element_type=jnp.float32)
    return out.reshape(q_BxTxNxH.shape).astype(q_BxTxNxH.dtype)


# Each device keeps its own queries and gathers all keys and values from the others (Llama 3, arXiv:2407.21783, section 3.3.2):
# with grouped heads these are few bytes compared to the work of the queries. In the backward pass the gather becomes a sum over
# devices. Every device computes the scores of all its queries with all keys, even masked scores: skipping these would save no
# time, since the slowest device, which has the last tokens, has few masked scores.
def over_context(
    run: typing.Callable[..., jax.Array],
    q_BxTxNxH: jax.Array,
    k_BxTxKxH: jax.Array,
    v_BxTxKxH: jax.Array,
    ids: tuple[jax.Array | None, jax.Array | None],
) -> jax.Array:
    """Returns the output of `run`, sharded like the queries. The size of the context axis must divide T.

    Args:
      run: a function `(q_BxTxNxH, k_BxSxKxH, v_BxSxKxH, ids, offset) -> out_BxTxNxH` on one device, whose query t is token
        offset + t of the row.
      ids: arrays [B, T] for queries and for keys; None for none.
    """
    mesh = jax.sharding.get_abstract_mesh()
    tokens = sharding.spec(("batch", "seq"), q_BxTxNxH.shape[:2], mesh, ones=True)
    # Queries are sharded like the key-value heads, whose number the axis tensor may not divide.
    heads = sharding.spec(("batch", "seq", "kv_heads", None), k_BxTxKxH.shape, mesh, ones=True)

    def gather(x: jax.Array | None) -> jax.Array | None:
        return None if x is None else jax.lax.all_gather(x, "context", axis=1, tiled=True)

    def on_device(q_BxTxNxH, k_BxTxKxH, v_BxTxKxH, ids):
        offset = _offset(q_BxTxNxH.shape[1])
        return run(q_BxTxNxH, gather(k_BxTxKxH), gather(v_BxTxKxH), (ids[0], gather(ids[1])), offset)

    split = jax.shard_map(on_device, in_specs=(heads, heads, heads, tokens), out_specs=heads, check_vma=False)
    return split(q_BxTxNxH, k_BxTxKxH, v_BxTxKxH, ids)


def _offset(tokens: int) -> jax.Array:
    return jax.lax.axis_index("context") * tokens
