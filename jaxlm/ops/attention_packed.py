"""cuDNN's flash attention over documents packed into rows. It takes the start of each document, and needs no mask.

In its packed (THD) layout cuDNN takes the batch as one run of tokens and a list of segments, each with its length and
its offset in elements. Work and memory then depend on the documents, not on the rows. `jax.nn.dot_product_attention`
does not offer this layout. The function that it calls does, but before jax 0.11.2 with wrong offsets for the keys if
heads are grouped (github.com/jax-ml/jax/pull/39521). So this module writes out the custom calls that XLA turns into
cuDNN's graphs.

Legend: B batch, T tokens, N query heads, K key-value heads, H head dim, M = B * segments_per_row segments in a batch.
"""

import functools
import json
import typing

import jax
import jax.numpy as jnp

# Tokens of a row to one segment that it has room for: rows of 2,048 tokens have 16 on average over the batch.
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


class Segments(typing.NamedTuple):
    """The documents of a batch as cuDNN takes them: M segments, first the documents, then empty segments.

    Attributes:
      lengths_M: the number of tokens of each segment.
      starts_M1: the index of each segment's first token among all tokens of the batch, and as element M + 1 the number
        of all tokens.
      fit: a boolean scalar, False if the batch has more than M documents.
    """

    lengths_M: jax.Array
    starts_M1: jax.Array
    fit: jax.Array


def segments_of(segment_ids_BxT: jax.Array, per_row: int) -> Segments:
    """Finds the documents of a batch, in order.

    Args:
      segment_ids_BxT: integer ids; a document is a run of equal ids (if the id comes again later, that is another
        document).
      per_row: M / B, the number of segments a row. Only the sum over all rows must fit.

    Returns:
      The segments. If there are more than M documents, `fit` is False and the other fields are useless.
    """
    batch, length = segment_ids_BxT.shape
    first_BxT = jnp.ones((batch, 1), bool)  # a row begins a document, whatever the row before ends with
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
    """Returns causal attention within each segment, (B, T, N, H).

    Args:
      q_BxTxNxH, k_BxTxKxH, v_BxTxKxH: queries, keys and values of one device, bfloat16 or float16; N is a multiple of
        K.
      segment_ids_BxT: the ids that `segments_of` takes.
      scale: the scale of the scores.
      per_row: the number of segments a row for which there is room, on average over the batch.
      masked: (q, k, v, segment_ids) -> (B, T, N, H), exact for any data. It computes the batches that have more
        segments.

    Raises:
      ValueError: the batch is so large that its offsets need more than 32 bits.
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

    # Chosen on the device: shapes must not depend on the data, and the host need not be asked.
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
    """cuDNN's graph over the segments. Results: arrays like `like` (B, T, heads, H), then those of `extra`."""
    batch, length = q.shape[:2]
    row = (batch, per_row)
    lengths_BxS = segments.lengths_M.reshape(row)
    # cuDNN reads M + 1 offsets; XLA's shape has (per_row + 1) to a row, so the last B - 1 are not read.
    starts = jnp.append(segments.starts_M1, jnp.full(batch - 1, batch * length, jnp.int32)).reshape(batch, per_row + 1)
    offsets = [starts * (x.shape[2] * x.shape[3]) for x in (q, k)]  # elements to a token: keys have fewer heads
    shapes = [jax.ShapeDtypeStruct((x.shape[0], x.shape[2], x.shape[1], x.shape[3]), x.dtype) for x in like]
    workspace = jax.ShapeDtypeStruct((0,), jnp.uint8)  # XLA's compiler gives it its size
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
    """What XLA's GPU compiler reads of the custom call: `CudnnfMHABackendConfig` in xla/service/gpu/backend_configs.proto."""
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
