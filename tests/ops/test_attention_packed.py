"""Packed attention without its kernels: cuDNN and Tokamax are played by functions that read what they would be given."""

import functools
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models as tiny

from jaxlm.ops import attention_kernels
from jaxlm.ops.attention import attention, masked_attention

B, T, N, K, H = 2, 24, 4, 2, 8


def arrays():
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(B, T, heads, H) for heads in (N, K, K, N)]
    return tuple(jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True))


def ids(*cuts_of_rows):
    rows = [np.searchsorted(np.asarray(cuts), np.arange(T), side="right") + 1 for cuts in cuts_of_rows]
    return jnp.asarray(np.stack(rows), jnp.int32)


PACKED = ids([5, 6, 20], [11])


def places(lengths, offsets, elements):
    """Of each token of the batch: its segment and its place in it, from lengths and offsets in elements of memory."""
    lengths, starts = lengths.reshape(-1), offsets.reshape(-1)[: lengths.size]
    at = jnp.arange(B * T)[:, None] * elements
    inside = (at >= starts) & (at < starts + lengths * elements)
    segment = jnp.where(inside.any(1), inside.argmax(1), -1)
    return segment, at[:, 0] - starts[segment]


def cudnn_by_offsets(target, results, **settings):
    """A stand-in for `jax.ffi.ffi_call`: attention among tokens whose segments cuDNN would find together."""

    def run(q, k, v, *rest):
        q_lengths, kv_lengths, q_offsets, kv_offsets = rest[-4:]
        q_segment, q_place = places(q_lengths, q_offsets, N * H)
        k_segment, k_place = places(kv_lengths, kv_offsets, K * H)
        mask = (q_segment[:, None] == k_segment) & (k_place // (K * H) <= (q_place // (N * H))[:, None])

        def forward(q, k, v):
            flat = (x.reshape(1, B * T, -1, H) for x in (q, k, v))
            return masked_attention(*flat, mask[None], 0.3).reshape(q.shape)

        if "Backward" in target:
            found = jax.vjp(forward, q, k, v)[1](rest[1])
        else:
            found = (forward(q, k, v),)
        extra = [jnp.zeros(r.shape, r.dtype) for r in results[len(found) :]]
        for x, result in zip(found, results, strict=False):
            assert x.swapaxes(1, 2).shape == result.shape
        return *(x.swapaxes(1, 2) for x in found), *extra

    return run


def packed(q, k, v, segments, per_row=4, masked=None):
    return attention_kernels.packed_attention(q, k, v, segments, 0.3, per_row, masked or masked_by_xla)


def masked_by_xla(q, k, v, segments):
    return attention(q, k, v, backend="xla", segment_ids_BxT=segments, scale=0.3)


def value_and_gradients(function, q, k, v, d_out):
    def run(q, k, v):
        out, vjp = jax.vjp(function, q, k, v)
        return (out, *vjp(d_out))

    return [np.asarray(x, np.float32) for x in tiny.jit(run)(q, k, v)]


def worst(got, want):
    return max(np.abs(g - w).max() / np.abs(w).max() for g, w in zip(got, want, strict=True))


def compared(segments, **options):
    """How far packed attention is from the reference, forward and gradients."""
    *qkv, d_out = arrays()
    got = value_and_gradients(lambda *a: packed(*a, segments, **options), *qkv, d_out)
    return worst(got, value_and_gradients(lambda *a: masked_by_xla(*a, segments), *qkv, d_out))


@pytest.fixture
def cudnn(monkeypatch):
    monkeypatch.setattr(jax.ffi, "ffi_call", cudnn_by_offsets)


def test_segments_are_listed_over_the_batch():
    segments_of = jax.jit(attention_kernels.segments_of, static_argnums=1)
    found = segments_of(PACKED, 4)
    np.testing.assert_array_equal(found.lengths_M, [5, 1, 14, 4, 11, 13, 0, 0])
    np.testing.assert_array_equal(found.starts_M1, [0, 5, 6, 20, 24, 35, 48, 48, 48])
    assert bool(found.fit)
    assert bool(segments_of(PACKED, 3).fit)
    assert not bool(segments_of(PACKED, 2).fit)


def test_offsets_lead_to_each_document_of_grouped_heads(cudnn):
    assert compared(PACKED) < 1e-6


def test_wrong_offsets_of_keys_are_seen(cudnn, monkeypatch):
    """The mutation: the keys' offsets counted in the elements of queries, as jax did before 0.11.2."""
    right = jax.ffi.ffi_call

    def wrong(*args, **settings):
        return lambda *operands: right(*args, **settings)(*operands[:-1], operands[-2])

    monkeypatch.setattr(jax.ffi, "ffi_call", wrong)
    assert not compared(PACKED) < 0.1


def test_a_batch_with_too_many_documents_is_exact_too(cudnn):
    many = ids(list(range(1, T)), [3])
    assert compared(many, per_row=2) < 1e-6

    def nothing(q, k, v, segments):
        return jnp.zeros_like(q)

    assert compared(many, per_row=2, masked=nothing) == 1.0  # mutation: it is the masked kernel that ran
    assert compared(many, per_row=13, masked=nothing) < 1e-6


def test_the_backend_takes_room_for_a_document_in_128_tokens(cudnn, monkeypatch):
    monkeypatch.setattr(attention_kernels, "cudnn_attention", None)  # no masked kernel is needed
    monkeypatch.setattr(jax.lax, "cond", lambda fit, packed, fallback, *args: packed(*args))
    *qkv, d_out = arrays()
    segments = ids([5], [11])
    run = functools.partial(attention, backend="cudnn_packed", segment_ids_BxT=segments, scale=0.3)
    want = value_and_gradients(lambda *a: masked_by_xla(*a, segments), *qkv, d_out)
    assert worst(value_and_gradients(run, *qkv, d_out), want) < 1e-6


def test_too_many_elements_for_the_offsets():
    q = jax.ShapeDtypeStruct((1024, 2048, 32, 64), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((1024, 2048, 8, 64), jnp.bfloat16)
    with pytest.raises(ValueError, match="more elements than the offsets of 'cudnn_packed' can count"):
        jax.eval_shape(packed, q, k, k, jax.ShapeDtypeStruct((1024, 2048), jnp.int32))


def test_segment_starts():
    want = [[0] * 5 + [5] + [6] * 14 + [20] * 4, [0] * 11 + [11] * 13]
    np.testing.assert_array_equal(attention_kernels.segment_starts(PACKED), want)


@pytest.mark.parametrize("segments", [PACKED, None])
def test_tokamax_is_told_where_each_document_begins(monkeypatch, segments):
    class Kernel:
        def __call__(self, q, k, v, *, mask, logits_scale):
            assert mask.is_causal
            index = jnp.arange(T)
            first = jnp.zeros((B, 1, T), int) if mask.k_start is None else mask.k_start
            visible = (index >= first[:, 0, :, None]) & (index <= index[:, None])
            return masked_attention(q, k, v, visible, logits_scale)

    package = "tokamax._src.ops.attention"
    base = types.SimpleNamespace(Mask=lambda **given: types.SimpleNamespace(**given))
    found = types.ModuleType(package)
    found.base, found.pallas_mosaic_gpu = base, types.SimpleNamespace(PallasMosaicGpuFlashAttention=Kernel)
    for name in ("tokamax", "tokamax._src", "tokamax._src.ops"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, package, found)
    *qkv, d_out = arrays()
    run = functools.partial(attention, backend="tokamax", segment_ids_BxT=segments, scale=0.3)
    want = value_and_gradients(lambda *a: masked_by_xla(*a, segments), *qkv, d_out)
    assert worst(value_and_gradients(run, *qkv, d_out), want) < 1e-6
