"""Attention through library kernels: cuDNN (GPU) and Pallas (Triton on GPU, splash attention on TPU).

Nothing here falls back: where the library cannot, its error is what the caller sees. The kernels need their device, so
segment isolation on a GPU is checked by the leakage test run on a GPU machine; here Pallas' GPU kernel runs interpreted.

Legend: B batch, T tokens, S keys, N query heads, K key-value heads, H head dim.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm import sharding


def cudnn_attention(
    q_BxTxNxH: jax.Array,
    k_BxSxKxH: jax.Array,
    v_BxSxKxH: jax.Array,
    q_segment_ids_BxT: jax.Array | None,
    kv_segment_ids_BxS: jax.Array | None,
    *,
    scale: float,
    offset: jax.Array | None = None,
) -> jax.Array:
    """cuDNN's flash attention through jax.nn.dot_product_attention(implementation="cudnn").

    Segments go in as a boolean mask, which cuDNN takes as a bias of [B, 1, T, S] in q's dtype (2 bytes * B * T * S):
    exact for any number of segments. cuDNN's packed form (sequence offsets) would avoid it, but needs a fixed greatest
    number of segments a row, Hopper, and in jax scales the keys' offsets by the number of query heads, which is wrong
    for grouped queries. Without segment ids there is no mask, only cuDNN's own causal one.

    Args:
      q_BxTxNxH, k_BxSxKxH, v_BxSxKxH: bfloat16 or float16; H a multiple of 8 and at most 128 (256 on Hopper); T even
        with segments.
      q_segment_ids_BxT, kv_segment_ids_BxS: integers, or None for one segment a row.
      scale: of the scores.
      offset: index of the first query among the keys, an integer scalar; then S may be larger than T, and causality goes
        into the mask. None: S = T.

    Returns:
      [B, T, N, H] in q's dtype.

    Raises:
      ValueError: for a dtype that cuDNN does not take.
      RuntimeError, NotImplementedError: from jax, without cuDNN or for a shape beyond it.
    """
    if q_BxTxNxH.dtype not in (jnp.bfloat16, jnp.float16):
        raise ValueError(f"attention backend 'cudnn' takes bfloat16 or float16, got {q_BxTxNxH.dtype}")
    mask = None
    if q_segment_ids_BxT is not None:
        mask = (q_segment_ids_BxT[:, :, None] == kv_segment_ids_BxS[:, None, :])[:, None]
    if offset is not None:
        past_TxS = jnp.arange(k_BxSxKxH.shape[1])[None] <= offset + jnp.arange(q_BxTxNxH.shape[1])[:, None]
        mask = past_TxS[None, None] if mask is None else mask & past_TxS
    return jax.nn.dot_product_attention(
        q_BxTxNxH, k_BxSxKxH, v_BxSxKxH, mask=mask, is_causal=offset is None, scale=scale, implementation="cudnn"
    )


def pallas_attention(
    q_BxTxNxH: jax.Array,
    k_BxTxKxH: jax.Array,
    v_BxTxKxH: jax.Array,
    q_segment_ids_BxT: jax.Array | None,
    kv_segment_ids_BxT: jax.Array | None,
    *,
    scale: float,
) -> jax.Array:
    """jax.experimental.pallas kernels: splash attention on TPU, else the Triton flash attention (interpreted on CPU).

    Rows are padded at their end to the kernel's block; padding is causally after every token, so none attends to it. The
    compiler can't split a kernel: on a mesh each device runs it on its own rows and heads (`jax.shard_map`).

    Args:
      q_BxTxNxH, k_BxTxKxH, v_BxTxKxH: N a multiple of K (the Triton kernel gets the keys repeated).
      q_segment_ids_BxT, kv_segment_ids_BxT: integers, or None for one segment a row.
      scale: of the scores.

    Returns:
      [B, T, N, H] in q's dtype.
    """
    arrays = [q_BxTxNxH, k_BxTxKxH, v_BxTxKxH]
    if q_segment_ids_BxT is not None:
        arrays += [q_segment_ids_BxT, kv_segment_ids_BxT]
    run = functools.partial(_on_one_device, scale=scale)
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return run(*arrays)
    heads = ("batch", None, "heads", None)
    kv = sharding.spec(heads, k_BxTxKxH.shape, mesh)  # queries follow the key-value heads, which may not divide
    specs = [kv, kv, kv] + [sharding.spec(("batch", None), x.shape, mesh) for x in arrays[3:]]
    return jax.shard_map(run, in_specs=tuple(specs), out_specs=kv, check_vma=False)(*arrays)


def _on_one_device(q_BxTxNxH, k_BxTxKxH, v_BxTxKxH, q_segment_ids_BxT=None, kv_segment_ids_BxT=None, *, scale):
    length = q_BxTxNxH.shape[1]
    block = 128 if length >= 128 else max(16, 1 << (length - 1).bit_length())
    platform = jax.default_backend()
    if platform == "tpu":
        block = 128
    pad = -length % block
    padded = [jnp.pad(x, [(0, 0), (0, pad)] + [(0, 0)] * (x.ndim - 2)) for x in (q_BxTxNxH, k_BxTxKxH, v_BxTxKxH)]
    ids = q_segment_ids_BxT, kv_segment_ids_BxT
    if q_segment_ids_BxT is not None:
        ids = tuple(jnp.pad(x, [(0, 0), (0, pad)]) for x in ids)
    function = _splash if platform == "tpu" else functools.partial(_triton, interpret=platform == "cpu")
    return function(*padded, *ids, scale=scale)[:, :length]


def _triton(q_BxTxNxH, k_BxTxKxH, v_BxTxKxH, q_ids_BxT, kv_ids_BxT, *, scale, interpret):
    from jax.experimental.pallas.ops.gpu import attention as gpu  # imports Triton's lowering: only where it is used

    del kv_ids_BxT  # the kernel has one array of ids: self-attention
    repeats = q_BxTxNxH.shape[2] // k_BxTxKxH.shape[2]
    k_BxTxNxH, v_BxTxNxH = (jnp.repeat(x, repeats, axis=2) for x in (k_BxTxKxH, v_BxTxKxH))
    return gpu.mha(q_BxTxNxH, k_BxTxNxH, v_BxTxNxH, q_ids_BxT, sm_scale=scale, causal=True, interpret=interpret)


def _splash(q_BxTxNxH, k_BxTxKxH, v_BxTxKxH, q_ids_BxT, kv_ids_BxT, *, scale, interpret=False):
    from jax.experimental.pallas.ops.tpu import splash_attention as tpu

    length, heads = q_BxTxNxH.shape[1:3]
    size = int(np.gcd(length, 512))
    sizes = tpu.BlockSizes(
        block_q=size,
        block_kv=size,
        block_kv_compute=size,
        block_q_dkv=size,
        block_kv_dkv=size,
        block_kv_dkv_compute=size,
        block_q_dq=size,
        block_kv_dq=size,
    )
    mask = tpu.MultiHeadMask([tpu.CausalMask((length, length)) for _ in range(heads)])
    kernel = tpu.make_splash_mha(mask=mask, head_shards=1, q_seq_shards=1, block_sizes=sizes, interpret=interpret)
    q_BxNxTxH, k_BxKxTxH, v_BxKxTxH = (jnp.swapaxes(x, 1, 2) for x in (q_BxTxNxH, k_BxTxKxH, v_BxTxKxH))
    q_BxNxTxH = q_BxNxTxH * jnp.asarray(scale, q_BxNxTxH.dtype)  # the kernel does not scale
    if q_ids_BxT is None:
        out = jax.vmap(kernel)(q_BxNxTxH, k_BxKxTxH, v_BxKxTxH)
    else:
        out = jax.vmap(kernel)(q_BxNxTxH, k_BxKxTxH, v_BxKxTxH, tpu.SegmentIds(q_ids_BxT, kv_ids_BxT))
    return jnp.swapaxes(out, 1, 2)
