"""Attention through library kernels: cuDNN, Tokamax (Hopper), Pallas (Triton on GPU, splash attention on TPU).

There is no fallback to another kernel: if the library can't run, its error is raised. scripts/bench_gpu.py checks results and
segment isolation on a GPU. Legend: B batch, T tokens, S keys, N query heads, K key-value heads, H head dim, M segments.
"""

import functools
import json
import typing

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.devices import sharding
from jaxlm.ops.attention_blocked import visible

# There is room for one segment per this many tokens: 16 per row of 2,048 tokens, on average over the batch.
TOKENS_PER_SEGMENT = 128
_INT32 = 2**31 - 1
_BF16 = {jnp.dtype(jnp.bfloat16): "BF16", jnp.dtype(jnp.float16): "F16"}
# Contracted and batch dimensions of the products, q, k, v being [B, T, heads, H] and the scores [B, N, T, T].
_FORWARD = {"bmm1": (3, 3, (0, 2), (0, 2)), "bmm2": (3, 1, (0, 1), (0, 2))}
_BACKWARD = {
    "bmm1_grad_gemm1": (2, 1, (0, 1), (0, 2)),
    "bmm1_grad_gemm2": (3, 1, (0, 1), (0, 2)),
    "bmm2_grad_gemm1": (2, 1, (0, 1), (0, 2)),
    "bmm2_grad_gemm2": (3, 3, (0, 2), (0, 2)),
}


def cudnn_attention(
    q_BxTxNxH: jax.Array,
    k_BxSxKxH: jax.Array,
    v_BxSxKxH: jax.Array,
    ids: tuple[jax.Array | None, jax.Array | None],
    scale: float,
    offset: jax.Array | None = None,
) -> jax.Array:
    """Returns cuDNN's flash attention [B, T, N, H], through jax.nn.dot_product_attention(implementation="cudnn").

    Segments are passed as a boolean mask, which becomes a bias for cuDNN, [B, 1, T, S] in q's dtype (2 bytes * B * T *
    S). This is exact for any number of segments. (Before jax 0.11 the backward pass also writes the bias's gradient, which is
    unused.) `cudnn_packed` has no such mask. Without segment ids there is only cuDNN's own causal mask.

    Args:
      q_BxTxNxH, k_BxSxKxH, v_BxSxKxH: bfloat16 or float16; H is a multiple of 8 and at most 128 (256 on Hopper); T is
        even if there are segments.
      ids: the segment ids of queries and keys.
      offset: the index of the first query among the keys, an integer scalar. S may then be larger than T, and the mask
        includes causality. None if S = T.

    Raises:
      ValueError, RuntimeError, NotImplementedError: cuDNN does not support the dtype or shape, or is missing.
    """
    mask = None
    if offset is not None:
        mask = visible(ids, offset, 0, q_BxTxNxH.shape[1], k_BxSxKxH.shape[1])[:, None]
    elif ids[0] is not None:
        mask = (ids[0][:, :, None] == ids[1][:, None, :])[:, None]
    return jax.nn.dot_product_attention(
        q_BxTxNxH, k_BxSxKxH, v_BxSxKxH, mask=mask, is_causal=offset is None, scale=scale, implementation="cudnn"
    )


def cudnn_packed_attention(
    q_BxTxNxH: jax.Array, k_BxTxKxH: jax.Array, v_BxTxKxH: jax.Array, ids_BxT: jax.Array | None, scale: float
) -> jax.Array:
    """Returns cuDNN's flash attention over packed documents, passed as offsets (Hopper or newer). Ids must increase in a row.

    There is room for one document per TOKENS_PER_SEGMENT tokens, on average over the rows of a device. If a batch has
    more documents, the device runs the masked kernel of `cudnn_attention` instead.
    """
    if ids_BxT is None:
        return cudnn_attention(q_BxTxNxH, k_BxTxKxH, v_BxTxKxH, (None, None), scale)
    per_row = max(2, q_BxTxNxH.shape[1] // TOKENS_PER_SEGMENT)

    def masked(q, k, v, ids):
        return cudnn_attention(q, k, v, (ids, ids), scale)

    def run(q, k, v, ids):
        return packed_attention(q, k, v, ids, scale, per_row, masked)

    return _on_each_device(run, q_BxTxNxH, k_BxTxKxH, v_BxTxKxH, ids_BxT)


def tokamax_attention(
    q_BxTxNxH: jax.Array, k_BxTxKxH: jax.Array, v_BxTxKxH: jax.Array, ids_BxT: jax.Array | None, scale: float
) -> jax.Array:
    """Returns Tokamax's flash attention, a Mosaic kernel for Hopper and newer (github.com/openxla/tokamax).

    Each query gets the index of its first key, the start of its segment. This is exact for any number of segments and
    needs no mask in memory, if ids increase along a row. Tokamax needs Python 3.12 and jax 0.11.1; its public function has
    no argument for the range of keys, so this calls an internal one.

    Raises ValueError if tokamax is not installed.
    """
    try:
        from tokamax._src.ops.attention import base, pallas_mosaic_gpu
    except ImportError as error:
        raise ValueError(f"attention backend 'tokamax' needs the package: pip install tokamax ({error})") from error
    kernel = pallas_mosaic_gpu.PallasMosaicGpuFlashAttention()

    def run(q, k, v, ids=None):
        first = None if ids is None else segment_starts(ids)[:, None]
        return kernel(q, k, v, mask=base.Mask(k_start=first, is_causal=True), logits_scale=scale)

    return _on_each_device(run, q_BxTxNxH, k_BxTxKxH, v_BxTxKxH, ids_BxT)


def segment_starts(segment_ids_BxT: jax.Array) -> jax.Array:
    """Returns, for each token, the index in its row at which its run of equal ids begins: int32 (B, T)."""
    # A running maximum of the indices at which the id changes is the last such index so far.
    index_T = jnp.arange(segment_ids_BxT.shape[1], dtype=jnp.int32)
    new_BxT = jnp.diff(segment_ids_BxT, axis=1, prepend=segment_ids_BxT[:, :1]) != 0
    return jax.lax.cummax(jnp.where(new_BxT, index_T, 0), axis=1)


def pallas_attention(
    q_BxTxNxH: jax.Array, k_BxTxKxH: jax.Array, v_BxTxKxH: jax.Array, ids_BxT: jax.Array | None, scale: float
) -> jax.Array:
    """Returns attention by a kernel of jax.experimental.pallas: splash on TPU, else Triton flash (interpreted on CPU).

    Rows are padded at their end to the kernel's block. The padding comes after every token, so no token attends to it.
    """
    run = functools.partial(_pallas, scale=scale)
    return _on_each_device(run, q_BxTxNxH, k_BxTxKxH, v_BxTxKxH, ids_BxT)


def _on_each_device(run, q_BxTxNxH, k_BxTxKxH, v_BxTxKxH, ids_BxT):
    """Returns `run(q, k, v[, ids])`, run on each device's own rows and heads, since XLA can't split a kernel over a mesh."""
    arrays = [q_BxTxNxH, k_BxTxKxH, v_BxTxKxH] + ([] if ids_BxT is None else [ids_BxT])
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return run(*arrays)
    # Queries are sharded like the key-value heads, whose number the mesh may not divide.
    kv = sharding.spec(("batch", None, "heads", None), k_BxTxKxH.shape, mesh)
    specs = [kv, kv, kv] + [sharding.spec(("batch", None), x.shape, mesh) for x in arrays[3:]]
    return jax.shard_map(run, in_specs=tuple(specs), out_specs=kv, check_vma=False)(*arrays)


def _pallas(*arrays, scale):
    length = arrays[0].shape[1]
    block = 128 if length >= 128 else max(16, 1 << (length - 1).bit_length())
    platform = jax.default_backend()
    if platform == "tpu":
        block = 128  # the splash kernel's smallest block, also for short rows
    padded = [jnp.pad(x, [(0, 0), (0, -length % block)] + [(0, 0)] * (x.ndim - 2)) for x in arrays]
    function = _splash if platform == "tpu" else functools.partial(_triton, interpret=platform == "cpu")
    return function(*padded, scale=scale)[:, :length]


def _triton(q_BxTxNxH, k_BxTxKxH, v_BxTxKxH, ids_BxT=None, *, scale, interpret):
    from jax.experimental.pallas.ops.gpu import attention as gpu  # imports Triton, so only here

    # The kernel needs a key-value head for each query head. The transpose of the repeat sums the gradients.
    repeats = q_BxTxNxH.shape[2] // k_BxTxKxH.shape[2]
    k_BxTxNxH, v_BxTxNxH = (jnp.repeat(x, repeats, axis=2) for x in (k_BxTxKxH, v_BxTxKxH))
    return gpu.mha(q_BxTxNxH, k_BxTxNxH, v_BxTxNxH, ids_BxT, sm_scale=scale, causal=True, interpret=interpret)


def _splash(q_BxTxNxH, k_BxTxKxH, v_BxTxKxH, ids_BxT=None, *, scale, interpret=False):
    from jax.experimental.pallas.ops.tpu import splash_attention as tpu

    length, heads = q_BxTxNxH.shape[1:3]
    size = int(np.gcd(length, 512))  # a block must divide the row, which is padded to a multiple of 128
    names = ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")
    sizes = tpu.BlockSizes(**dict.fromkeys(names, size))
    mask = tpu.MultiHeadMask([tpu.CausalMask((length, length)) for _ in range(heads)])
    kernel = tpu.make_splash_mha(mask=mask, head_shards=1, q_seq_shards=1, block_sizes=sizes, interpret=interpret)
    q_BxNxTxH, k_BxKxTxH, v_BxKxTxH = (jnp.swapaxes(x, 1, 2) for x in (q_BxTxNxH, k_BxTxKxH, v_BxTxKxH))
    q_BxNxTxH = q_BxNxTxH * jnp.asarray(scale, q_BxNxTxH.dtype)  # the kernel does not scale
    segments = () if ids_BxT is None else (tpu.SegmentIds(ids_BxT, ids_BxT),)
    return jnp.swapaxes(jax.vmap(kernel)(q_BxNxTxH, k_BxKxTxH, v_BxKxTxH, *segments), 1, 2)


class Segments(typing.NamedTuple):
    """The documents of a batch in cuDNN's format: M segments, first the documents, then empty segments.

    Attributes:
      lengths_M: the tokens of each segment.
      starts_M1: the index of each segment's first token among the batch's tokens, then the number of tokens.
      fit: a boolean scalar, False if the batch has more than M documents.
    """

    lengths_M: jax.Array
    starts_M1: jax.Array
    fit: jax.Array


def segments_of(segment_ids_BxT: jax.Array, per_row: int) -> Segments:
    """Returns the documents of a batch, in order: runs of equal ids. If there are more than M, only `fit` is valid.

    Args:
      per_row: M / B, the number of segments per row. A row may have more if the whole batch fits.
    """
    batch, length = segment_ids_BxT.shape
    first_BxT = jnp.ones((batch, 1), bool)  # each row begins a new document
    begins_BxT = jnp.concatenate([first_BxT, segment_ids_BxT[:, 1:] != segment_ids_BxT[:, :-1]], axis=1)
    room, tokens = batch * per_row, batch * length
    (starts_M,) = jnp.nonzero(begins_BxT.reshape(-1), size=room, fill_value=tokens)
    starts_M1 = jnp.append(starts_M, tokens).astype(jnp.int32)
    return Segments(jnp.diff(starts_M1), starts_M1, jnp.sum(begins_BxT) <= room)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def packed_attention(
    q_BxTxNxH: jax.Array,
    k_BxTxKxH: jax.Array,
    v_BxTxKxH: jax.Array,
    segment_ids_BxT: jax.Array,
    scale: float,
    per_row: int,
    masked: typing.Callable,
) -> jax.Array:
    """Returns causal attention within each segment, (B, T, N, H), for the rows of one device.

    In its packed (THD) layout cuDNN takes the batch as one run of tokens and a list of segments, each with its length and
    its offset in elements. Work and memory then depend on the documents, not on the rows. `jax.nn.dot_product_attention`
    does not offer this layout. The function that it calls does, but with grouped heads its offsets for the keys are wrong
    before jax 0.11.2 (github.com/jax-ml/jax/pull/39521). So the custom calls that XLA turns into cuDNN's graphs are
    written out here.

    Args:
      per_row: the number of segments per row for which there is room, on average over the batch.
      masked: (q, k, v, segment_ids) -> (B, T, N, H), exact for any data. It computes batches with too many segments.

    Raises ValueError if the batch's offsets need more than 32 bits.
    """
    return _forward(q_BxTxNxH, k_BxTxKxH, v_BxTxKxH, segment_ids_BxT, scale, per_row, masked)[0]


def _forward(q, k, v, ids, scale, per_row, masked):
    batch, length, heads, _ = q.shape
    if q.size > _INT32:
        raise ValueError(f"queries of {q.shape} have more elements than the offsets of 'cudnn_packed' can count")
    segments = segments_of(ids, per_row)
    stats = jax.ShapeDtypeStruct((batch * per_row, heads, length), jnp.float32)

    def packed(q, k, v):
        out, saved = _call("__cudnn$fmhaSoftmax", _FORWARD, (q, k, v), q, k, segments, scale, per_row, (q,), (stats,))
        return out, saved

    def fallback(q, k, v):
        return masked(q, k, v, ids), jnp.zeros(stats.shape, stats.dtype)

    # Chosen on the device: shapes do not depend on the data, and the host does not wait for it.
    out, saved = jax.lax.cond(segments.fit, packed, fallback, q, k, v)
    return out, (q, k, v, ids, segments, saved, out)


def _backward(scale, per_row, masked, residuals, d_out):
    q, k, v, ids, segments, saved, out = residuals

    def packed(q, k, v, d_out):
        operands = (q, k, v, saved, d_out, out)
        return _call("__cudnn$fmhaSoftmaxBackward", _BACKWARD, operands, q, k, segments, scale, per_row, (q, k, v), ())

    def fallback(q, k, v, d_out):
        return tuple(jax.vjp(lambda *qkv: masked(*qkv, ids), q, k, v)[1](d_out))

    return *jax.lax.cond(segments.fit, packed, fallback, q, k, v, d_out), None


packed_attention.defvjp(_forward, _backward)


def _call(target, products, operands, q, k, segments, scale, per_row, like, extra):
    """Calls cuDNN's graph over the segments. Returns arrays like `like` (B, T, heads, H), then those of `extra`."""
    batch, length = q.shape[:2]
    row = (batch, per_row)
    lengths_BxS = segments.lengths_M.reshape(row)
    # cuDNN reads M + 1 offsets. XLA's shape has per_row + 1 offsets for each row, so the last B - 1 are not read.
    starts = jnp.append(segments.starts_M1, jnp.full(batch - 1, batch * length, jnp.int32)).reshape(batch, per_row + 1)
    offsets = [starts * (x.shape[2] * x.shape[3]) for x in (q, k)]  # in elements; keys have fewer per token
    shapes = [jax.ShapeDtypeStruct((x.shape[0], x.shape[2], x.shape[1], x.shape[3]), x.dtype) for x in like]
    workspace = jax.ShapeDtypeStruct((0,), jnp.uint8)  # XLA's compiler sets its size
    results = [*shapes, *extra, workspace]
    run = jax.ffi.ffi_call(
        target,
        results,
        # (B, heads, T, H) in the memory order of (B, T, heads, H).
        output_layouts=[(0, 2, 1, 3)] * len(shapes) + [None] * (len(extra) + 1),
        custom_call_api_version=2,
        legacy_backend_config=_backend_config(products, q, scale, per_row),
    )
    *arrays, _ = run(*operands, lengths_BxS, lengths_BxS, *offsets)
    return *(x.swapaxes(1, 2) for x in arrays[: len(like)]), *arrays[len(like) :]


def _backend_config(products: dict, q_BxTxNxH: jax.Array, scale: float, per_row: int) -> str:
    """Returns the custom call's backend config: `CudnnfMHABackendConfig` in xla/service/gpu/backend_configs.proto."""
    batch, length, heads, _ = q_BxTxNxH.shape

    def product(lhs: int, rhs: int, lhs_batch: tuple, rhs_batch: tuple) -> dict:
        return {
            "lhs_contracting_dimensions": [str(lhs)],
            "rhs_contracting_dimensions": [str(rhs)],
            "lhs_batch_dimensions": [str(i) for i in lhs_batch],
            "rhs_batch_dimensions": [str(i) for i in rhs_batch],
        }

    fmha = {
        "algorithm": {
            "algo_id": "0",
            "math_type": "TENSOR_OP_MATH",
            "tuning_knobs": {"17": "1", "24": "0"},
            "is_cudnn_frontend": True,
            "workspace_size": "0",
        },
        "fmha_scale": float(scale),
        "intermediate_tensor_shape": {
            "element_type": _BF16[jnp.dtype(q_BxTxNxH.dtype)],
            "dimensions": [str(n) for n in (batch, heads, length, length)],
            "tuple_shapes": [],
            "layout": {"minor_to_major": ["3", "2", "1", "0"]},
            "is_dynamic_dimension": [False] * 4,
        },
        "is_flash_attention": True,
        "mask_type": "PADDING_CAUSAL",
        "dropout_rate": 0.0,
        "seed": 42,
        "sliding_window_length": 0,
        "max_seg_per_batch": per_row,
        "is_paged_attention": False,
    }
    fmha |= {f"{name}_dot_dimension_numbers": product(*dims) for name, dims in products.items()}
    return json.dumps({"operation_queue_id": "0", "cudnn_fmha_backend_config": fmha})
