"""Causal grouped-query attention over packed rows: one function, interchangeable backends.

Legend: B batch, T query tokens, S key-value tokens (or cache slots), N query heads, K key-value heads, G = N // K query
heads to a key-value head, H head dim. Query head n uses key-value head n // G.

**Over the mesh's `context` axis**, which splits the tokens of each row, each device keeps its own queries and gathers all keys
and values from the others (Llama 3, arXiv:2407.21783, section 3.3.2). With grouped heads these are few bytes compared to the
work of the queries. In the backward pass the gather becomes a sum over devices, after which each device has the gradients of
its own keys. Every device computes the scores of all its queries and all keys, even the masked ones. Skipping these would save
no time, since the device with the last tokens, of whose scores few are masked, would take as long as before.
"""

import functools
import typing

import jax
import jax.numpy as jnp

from jaxlm.devices import sharding
from jaxlm.ops import attention_blocked, attention_kernels

BACKENDS = ("xla", "blocked", "cudnn", "cudnn_packed", "tokamax", "pallas")
TREES = ("xla", "blocked")  # those that take `kv_until_BxS`
_AUTO = {"cpu": "blocked", "gpu": "cudnn", "tpu": "pallas"}
_PLATFORMS = {"cudnn": ("gpu",), "cudnn_packed": ("gpu",), "tokamax": ("gpu",), "pallas": ("gpu", "tpu")}
_MASKED = -1e30  # finite, so that exp(score - max) is 0 and never inf - inf


def resolve_backend(name: str, platform: str) -> str:
    """Returns the backend to run for a requested name: "auto" (`models.hardware` knows more of Hopper) or one of BACKENDS.

    Args:
      platform: "cpu", "gpu" (also "cuda" and "rocm") or "tpu", as `jax.default_backend()` or a device names it.

    Raises ValueError if the name is unknown, or the backend does not run on the platform. No other takes its place.
    """
    platform = "gpu" if platform in ("cuda", "rocm") else platform
    if name == "auto":
        return _AUTO.get(platform, "xla")
    if name not in BACKENDS:
        raise ValueError(f"unknown attention backend {name!r}; one of auto, {', '.join(BACKENDS)}")
    if platform not in _PLATFORMS.get(name, (platform,)):
        raise ValueError(
            f"attention backend {name!r} runs on {' and '.join(_PLATFORMS[name])}, not on {platform}; "
            f"'auto' would take {_AUTO.get(platform, 'xla')!r}"
        )
    return name


@jax.named_scope("attention")  # a profile tells its products from the others by this name
def attention(
    q_BxTxNxH: jax.Array,
    k_BxSxKxH: jax.Array,
    v_BxSxKxH: jax.Array,
    *,
    backend: str,
    q_positions_BxT: jax.Array | None = None,
    kv_positions_BxS: jax.Array | None = None,
    q_segment_ids_BxT: jax.Array | None = None,
    kv_segment_ids_BxS: jax.Array | None = None,
    kv_until_BxS: jax.Array | None = None,
    scale: float | None = None,
) -> jax.Array:
    """Returns softmax(scale * q k^T) v over the keys that a query may see: those not after it and in its own segment.

    Every backend honours segment ids. All but `xla` are for self-attention (T = S). They do not read positions but
    compare indices in the row, which is the same if positions increase along each segment. `xla` compares positions if
    they are given (both, or it raises), else indices. `cudnn_packed` and `tokamax` take each run of equal ids as a
    segment, which is right if ids increase along a row.

    If the mesh (`jax.set_mesh`) splits the tokens over its `context` axis, keys and values are gathered over that axis
    (see `over_context`). Backends that are not in CONTEXT_ATTENTION then raise an error.

    Args:
      q_BxTxNxH: queries.
      k_BxSxKxH, v_BxSxKxH: keys and values; N is a multiple of K.
      backend: one of BACKENDS, see resolve_backend.
      q_positions_BxT, kv_positions_BxS: integer positions; needed when T differs from S.
      q_segment_ids_BxT, kv_segment_ids_BxS: integer ids; tokens attend only within equal ids. If T = S, the second may
        be left out. None means that each row is one segment.
      kv_until_BxS: integers, in place of positions and segment ids: the token at index s is seen by those at indices s to
        until[s] - 1. Texts that begin alike can so share their beginning, laid out as a tree is walked (see
        `eval.likelihood`). Only `xla` and `blocked` take it, for T = S.
      scale: the scale of the scores; None for H ** -0.5.

    Returns:
      [B, T, N, H] in q's dtype; scores and softmax are float32. The result is zero for a query that may see no key
      (only with `xla`; if T = S every query sees itself).

    Raises:
      ValueError: the backend is unknown or does not take `kv_until_BxS`, shapes do not fit, or T != S and the backend
        needs T = S.
      Errors of cuDNN or Pallas: they do not support the machine, dtype or shape.
    """
    if backend not in BACKENDS:
        raise ValueError(f"unknown attention backend {backend!r}; one of {', '.join(BACKENDS)}")
    _check_shapes(q_BxTxNxH, k_BxSxKxH, v_BxSxKxH)
    queries, keys = q_BxTxNxH.shape[1], k_BxSxKxH.shape[1]
    scale = q_BxTxNxH.shape[-1] ** -0.5 if scale is None else scale
    run = functools.partial(_run, backend=backend, scale=scale)
    positions = (q_positions_BxT, kv_positions_BxS) if kv_until_BxS is None else (None, None)
    ids = _ids(q_segment_ids_BxT, kv_segment_ids_BxS, kv_until_BxS, queries == keys, backend)
    if queries == keys and splits(queries):
        if backend not in sharding.CONTEXT_ATTENTION:
            raise ValueError(f"attention backend {backend!r} does not split rows over devices; use 'blocked' or 'xla'")
        positions = positions if backend == "xla" else (None, None)
        return over_context(run, q_BxTxNxH, k_BxSxKxH, v_BxSxKxH, positions, ids)
    return run(q_BxTxNxH, k_BxSxKxH, v_BxSxKxH, positions, ids)


def _ids(q_segment_ids_BxT, kv_segment_ids_BxS, kv_until_BxS, square: bool, backend: str):
    """The pair of ids that `_run` takes. Raises ValueError as `attention` does."""
    if kv_until_BxS is not None:
        if backend not in TREES or not square:
            raise ValueError(
                f"attention backend {backend!r} can't share the beginnings of texts; use 'blocked' or 'xla'"
            )
        return None, kv_until_BxS
    if kv_segment_ids_BxS is None and square:
        kv_segment_ids_BxS = q_segment_ids_BxT
    if (q_segment_ids_BxT is None) != (kv_segment_ids_BxS is None):
        raise ValueError("segment ids are needed for queries and for keys, or for neither")
    return q_segment_ids_BxT, kv_segment_ids_BxS


def _run(q_BxTxNxH, k_BxSxKxH, v_BxSxKxH, positions, ids, offset=None, *, backend: str, scale: float) -> jax.Array:
    """Runs a backend. With an offset (an integer scalar, traced) query t stands at index offset + t among the keys."""
    queries, keys = q_BxTxNxH.shape[1], k_BxSxKxH.shape[1]
    if backend == "xla":
        if offset is not None and positions[0] is None:
            positions = (offset + jnp.arange(queries)[None], jnp.arange(keys)[None])
        if ids[0] is None and ids[1] is not None:
            mask_BxTxS = attention_blocked.visible(ids, offset, 0, queries, keys)
        else:
            mask_BxTxS = visible(queries, keys, *positions, *ids)
        return masked_attention(q_BxTxNxH, k_BxSxKxH, v_BxSxKxH, mask_BxTxS, scale)
    # The kernels below know no positions: without an offset, query t is at index t.
    if offset is None and queries != keys:
        raise ValueError(
            f"attention backend {backend!r} needs as many keys as queries, got {keys} and {queries}; use 'xla' with positions"
        )
    function = {
        "blocked": attention_blocked.blocked_attention,
        "cudnn": attention_kernels.cudnn_attention,
        "cudnn_packed": attention_kernels.cudnn_packed_attention,
        "tokamax": attention_kernels.tokamax_attention,
        "pallas": attention_kernels.pallas_attention,
    }[backend]
    return function(
        q_BxTxNxH, k_BxSxKxH, v_BxSxKxH, *ids, scale=scale, **({} if offset is None else {"offset": offset})
    )


def visible(
    queries: int,
    keys: int,
    q_positions_BxT: jax.Array | None = None,
    kv_positions_BxS: jax.Array | None = None,
    q_segment_ids_BxT: jax.Array | None = None,
    kv_segment_ids_BxS: jax.Array | None = None,
) -> jax.Array:
    """Returns booleans [B or 1, T, S], True if the query may see the key. Compares positions if given, else indices (T = S).

    Args: as `attention`.

    Raises:
      ValueError: only the queries' or only the keys' positions are given, or T differs from S and there are no
        positions.
    """
    if (q_positions_BxT is None) != (kv_positions_BxS is None):
        raise ValueError("positions are needed for queries and for keys, or for neither")
    if q_positions_BxT is not None:
        mask_BxTxS = kv_positions_BxS[:, None, :] <= q_positions_BxT[:, :, None]
    elif queries == keys:
        mask_BxTxS = jnp.tril(jnp.ones((1, queries, keys), jnp.bool_))
    else:
        raise ValueError(f"{queries} queries against {keys} keys need positions")
    if q_segment_ids_BxT is not None:
        mask_BxTxS = mask_BxTxS & (q_segment_ids_BxT[:, :, None] == kv_segment_ids_BxS[:, None, :])
    return mask_BxTxS


def masked_attention(
    q_BxTxNxH: jax.Array, k_BxSxKxH: jax.Array, v_BxSxKxH: jax.Array, mask_BxTxS: jax.Array, scale: float
) -> jax.Array:
    """Returns attention under any mask, with all scores in memory: the reference for the other backends.

    Args:
      mask_BxTxS: booleans [B or 1, T, S]; True if the query may see the key.

    Returns:
      [B, T, N, H] in q's dtype; zeros for a query that may see no key.
    """
    batch, length, heads, head_dim = q_BxTxNxH.shape
    kv_heads = k_BxSxKxH.shape[2]
    q_BxTxKxGxH = q_BxTxNxH.reshape(batch, length, kv_heads, heads // kv_heads, head_dim)
    scores_BxKxGxTxS = jnp.einsum("btkgh,bskh->bkgts", q_BxTxKxGxH, k_BxSxKxH, preferred_element_type=jnp.float32)
    mask = mask_BxTxS[:, None, None]
    scores_BxKxGxTxS = jnp.where(mask, scores_BxKxGxTxS * scale, _MASKED)
    # The maximum keeps exp in range and cancels out of the quotient, so that it needs no gradient.
    highest = jax.lax.stop_gradient(jnp.max(scores_BxKxGxTxS, axis=-1, keepdims=True))
    # Masked again: where a query sees nothing, the maximum is _MASKED itself and exp gives 1 everywhere.
    weights_BxKxGxTxS = jnp.where(mask, jnp.exp(scores_BxKxGxTxS - highest), 0.0)
    total = jnp.sum(weights_BxKxGxTxS, axis=-1, keepdims=True)
    weights_BxKxGxTxS = (weights_BxKxGxTxS / jnp.maximum(total, 1e-30)).astype(v_BxSxKxH.dtype)
    out = jnp.einsum("bkgts,bskh->btkgh", weights_BxKxGxTxS, v_BxSxKxH, preferred_element_type=jnp.float32)
    return out.reshape(q_BxTxNxH.shape).astype(q_BxTxNxH.dtype)


def splits(tokens: int) -> bool:
    """True if the current mesh splits rows of `tokens` tokens over `context`. False if the axis does not divide `tokens`."""
    ways = sharding.axis_size("context")
    return ways > 1 and tokens % ways == 0


def over_context(
    run: typing.Callable[..., jax.Array],
    q_BxTxNxH: jax.Array,
    k_BxTxKxH: jax.Array,
    v_BxTxKxH: jax.Array,
    *pairs: tuple[jax.Array | None, jax.Array | None],
) -> jax.Array:
    """Runs `run` on every device, with the device's own queries and all keys. The context axis must divide T.

    Args:
      run: a function `(q_BxTxNxH, k_BxSxKxH, v_BxSxKxH, ids, offset) -> out_BxTxNxH`. Query t of the device is token
        offset + t of its row.
      ids: arrays [B, T] for queries and for keys; None for none.

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
    return jax.lax.axis_index("context") * tokens


def _check_shapes(q_BxTxNxH: jax.Array, k_BxSxKxH: jax.Array, v_BxSxKxH: jax.Array) -> None:
    q, k, v = q_BxTxNxH.shape, k_BxSxKxH.shape, v_BxSxKxH.shape
    if len(q) != 4 or len(k) != 4 or k != v or q[0] != k[0] or q[3] != k[3]:
        raise ValueError(f"q {q}, k {k} and v {v} are not [B, T, N, H], [B, S, K, H] and [B, S, K, H]")
    if q[2] % k[2]:
        raise ValueError(f"{q[2]} query heads are not a multiple of {k[2]} key-value heads")
