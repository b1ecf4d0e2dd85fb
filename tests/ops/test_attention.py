"""Attention: every backend equals the reference, and no document sees another."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.config import MeshConfig
from jaxlm.devices import sharding
from jaxlm.ops import attention as ops
from jaxlm.ops import attention_blocked, attention_kernels
from jaxlm.ops.attention import resolve_backend

attention = jax.jit(ops.attention, static_argnames=("backend", "scale"))  # one program, not one for each operation

B, N, K, H = 2, 4, 2, 16
RUNS_HERE = ["xla", "blocked", "pallas"]
# bfloat16 only; see scripts/bench_gpu.py
CUDNN = ["cudnn", "cudnn_packed"] if jax.default_backend() == "gpu" else []


def _qkv(length, dtype=jnp.float32, heads=N, kv_heads=K, batch=B):
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(batch, length, n, H) for n in (heads, kv_heads, kv_heads, heads)]
    return tuple(jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True))


def _segments(length, *cuts):
    """One row of segments that change at `cuts`, and a second row that is one segment."""
    row = np.searchsorted(np.asarray(cuts), np.arange(length), side="right") + 1
    return jnp.asarray(np.stack([row, np.ones(length, int)]), jnp.int32)


def _value_and_gradients(function, q, k, v, d_out):
    def run(q, k, v):
        out, vjp = jax.vjp(function, q, k, v)
        return (out, *vjp(d_out.astype(out.dtype)))

    return jax.jit(run)(q, k, v)


def _assert_close(got, want, **tolerance):
    for a, b, name in zip(got, want, ("out", "d_q", "d_k", "d_v"), strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), err_msg=name, **tolerance)


def test_xla_is_the_formula():
    q, k, v, _ = (np.asarray(x, np.float64) for x in _qkv(9))
    ids = np.asarray(_segments(9, 4))
    want = np.zeros_like(q)
    for b, n, t in itertools.product(range(B), range(N), range(9)):
        seen = [s for s in range(t + 1) if ids[b, s] == ids[b, t]]
        scores = np.array([q[b, t, n] @ k[b, s, n // (N // K)] for s in seen]) * H**-0.5
        weights = np.exp(scores - scores.max())
        want[b, t, n] = sum(w * v[b, s, n // (N // K)] for w, s in zip(weights / weights.sum(), seen, strict=True))
    q, k, v, _ = _qkv(9)
    got = attention(q, k, v, backend="xla", segment_ids_BxT=jnp.asarray(ids))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("length", "packed"), [(1, True), (16, False), (37, True)])
def test_blocked_equals_xla_forward_and_backward(length, packed):
    *qkv, d_out = _qkv(length)
    ids = _segments(length, 3, 20) if packed else None
    want = _value_and_gradients(lambda *a: attention(*a, backend="xla", segment_ids_BxT=ids, scale=0.3), *qkv, d_out)
    got = _value_and_gradients(
        lambda *a: attention_blocked.blocked_attention(*a, (ids, ids), 0.3, block=16), *qkv, d_out
    )
    _assert_close(got, want, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("backend", ["blocked", "pallas"])
def test_backends_equal_xla_at_their_own_blocks(backend):
    *qkv, d_out = _qkv(200)
    ids = _segments(200, 70, 131)

    def run(name):
        return _value_and_gradients(functools.partial(attention, backend=name, segment_ids_BxT=ids), *qkv, d_out)

    _assert_close(run(backend), run("xla"), rtol=2e-5, atol=5e-6)


def test_splash_kernel_interpreted_equals_xla():
    *qkv, d_out = _qkv(128, batch=2)
    ids = _segments(128, 50)
    splash = functools.partial(attention_kernels._splash, scale=H**-0.5, interpret=True)
    got = _value_and_gradients(lambda *a: splash(*a, ids), *qkv, d_out)
    want = _value_and_gradients(lambda *a: attention(*a, backend="xla", segment_ids_BxT=ids), *qkv, d_out)
    _assert_close(got, want, rtol=2e-5, atol=5e-6)


@pytest.mark.parametrize("backend", ["xla", "blocked"])
def test_bfloat16_has_float32_softmax(backend):
    *qkv, d_out = _qkv(40, jnp.bfloat16)
    exact = [x.astype(jnp.float32) for x in qkv]
    got = _value_and_gradients(lambda *a: attention(*a, backend=backend), *qkv, d_out)
    want = _value_and_gradients(lambda *a: attention(*a, backend="xla"), *exact, d_out.astype(jnp.float32))
    assert all(x.dtype == jnp.bfloat16 for x in got)
    _assert_close(got, want, rtol=0.03, atol=0.03)


def _leaks(backend, drop_segments=False, function=attention):
    """True if documents 1 and 3 notice a change of document 2 in outputs, or gradients cross documents."""
    dtype = jnp.bfloat16 if backend in CUDNN else jnp.float32
    q, k, v, d_out = _qkv(160, dtype)
    ids = None if drop_segments else _segments(160, 50, 120)
    inside = jnp.zeros((B, 160, 1, 1), bool).at[0, 50:120].set(True)
    other = np.ones((B, 160), bool)
    other[0, 50:120] = False
    run = jax.jit(lambda q, k, v: function(q, k, v, backend=backend, segment_ids_BxT=ids))
    changed = [jnp.where(inside, 7.0 * x + 3.0, x) for x in (q, k, v)]
    outputs_moved = (run(q, k, v) != run(*changed))[other].any()
    gradients = _value_and_gradients(run, q, k, v, jnp.where(inside, d_out, 0.0))[1:]
    return bool(outputs_moved) or any(bool((g != 0)[other].any()) for g in gradients)


@pytest.mark.parametrize("backend", RUNS_HERE + CUDNN)
def test_no_leakage_between_documents(backend):
    assert not _leaks(backend)
    assert _leaks(backend, drop_segments=True)  # mutation: the check can fail


def test_leakage_check_catches_a_backend_that_ignores_segments(monkeypatch):
    monkeypatch.setattr(attention_blocked, "visible", lambda ids, *where: _VISIBLE((None, None), *where))
    assert _leaks("blocked", function=ops.attention)


_VISIBLE = attention_blocked.visible


@pytest.mark.parametrize("backend", RUNS_HERE)
def test_nothing_sees_the_future(backend):
    q, k, v, _ = _qkv(40)
    run = functools.partial(attention, backend=backend)
    out = run(q, k, v)
    later = run(q, k.at[:, 25:].add(5.0), v.at[:, 25:].add(5.0))
    np.testing.assert_array_equal(out[:, :25], later[:, :25])
    assert (out[:, 25:] != later[:, 25:]).any(axis=(0, 2, 3)).all()


def test_a_query_that_sees_nothing_gives_zeros():
    q, k, v, _ = _qkv(3)
    assert (ops.masked_attention(q, k, v, jnp.zeros((B, 3, 3), bool), 1.0) == 0).all()


@pytest.mark.parametrize("sizes", [(2, 2, 2), (1, 2, 4)])
def test_pallas_on_a_mesh_equals_xla(sizes):
    """Each device runs the kernel on its rows and heads. With 4 ways on 2 key-value heads the heads stay whole."""
    q, k, v, d_out = _qkv(48, batch=8)
    ids = jnp.asarray(np.tile(np.searchsorted([10, 30], np.arange(48), side="right") + 1, (8, 1)), jnp.int32)
    mesh = sharding.make_mesh(MeshConfig(*sizes, 1))

    def run(backend):
        fn = functools.partial(attention, backend=backend, segment_ids_BxT=ids)
        return _value_and_gradients(fn, q, k, v, d_out)

    want = run("xla")
    with jax.set_mesh(mesh):
        got = run("pallas")
    _assert_close(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("how", "sizes"),
    [
        ("xla, three axes", {"fsdp": 2, "tensor": 2, "context": 2}),
        ("blocked", {"tensor": 4, "context": 2}),
        ("blocked, one segment", {"data": 2, "context": 4}),
    ],
)
def test_rows_split_over_context_equal_whole_rows(how, sizes, monkeypatch):
    """Forward and backward, packed. With 4 ways on 2 key-value heads the heads stay whole."""
    monkeypatch.setattr(attention_blocked, "_BLOCK", 8)  # several blocks to a device
    *qkv, d_out = _qkv(48, batch=4)
    ids = np.concatenate([_segments(48, 9, 30), _segments(48, 21, 24)])
    more = {} if "one segment" in how else {"segment_ids_BxT": jnp.asarray(ids)}

    def run():
        backend = how.split()[0].rstrip(",")
        return _value_and_gradients(functools.partial(ops.attention, backend=backend, **more), *qkv, d_out)

    want = run()
    axes = {"data": 1, "fsdp": 1, "tensor": 1, "context": 1} | sizes
    with jax.set_mesh(sharding.make_mesh(MeshConfig(**axes), jax.devices()[: np.prod(list(axes.values()))])):
        _assert_close(run(), want, rtol=2e-5, atol=5e-6)
        monkeypatch.setattr(ops, "_offset", lambda tokens: jnp.int32(0))
        with pytest.raises(AssertionError):
            _assert_close(run(), want, rtol=2e-5, atol=5e-6)


def test_cudnn_over_context_gets_the_mask_of_its_rectangle(monkeypatch):
    """The kernel needs a GPU; what it is asked for is computed here by XLA."""
    real = jax.nn.dot_product_attention
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda *a, **k: real(*a, **(k | {"implementation": "xla"})))
    *qkv, d_out = _qkv(16, jnp.bfloat16, batch=2)
    ids = _segments(16, 5, 12)

    def run(backend):
        return _value_and_gradients(functools.partial(ops.attention, backend=backend, segment_ids_BxT=ids), *qkv, d_out)

    want = run("xla")
    with jax.set_mesh(sharding.make_mesh(MeshConfig(1, 1, 1, 4), jax.devices()[:4])):
        _assert_close(run("cudnn"), want, rtol=0.03, atol=0.03)
        monkeypatch.setattr(ops, "_offset", lambda tokens: jnp.int32(0))
        with pytest.raises(AssertionError):
            _assert_close(run("cudnn"), want, rtol=0.03, atol=0.03)


def test_resolve_backend():
    assert [resolve_backend("auto", platform) for platform in ("cpu", "gpu", "cuda")] == ["blocked", "cudnn", "cudnn"]
    assert (resolve_backend("auto", "tpu"), resolve_backend("xla", "tpu")) == ("pallas", "xla")


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (lambda: resolve_backend("cudnn", "cpu"), "'cudnn' runs on gpu, not on cpu"),
        (lambda: resolve_backend("pallas", "cpu"), "'pallas' runs on gpu and tpu, not on cpu"),
        (lambda: attention(*_qkv(8)[:3], backend="tokamax"), "needs the package: pip install tokamax"),
    ],
)
def test_a_backend_that_is_not_here_is_refused(run, words):
    with pytest.raises(ValueError, match=words):
        run()


def test_pallas_over_context_is_refused():
    with (
        jax.set_mesh(sharding.make_mesh(MeshConfig(1, 1, 1, 8))),
        pytest.raises(ValueError, match="does not split rows over devices; use 'blocked' or 'xla'"),
    ):
        ops.attention(*_qkv(16)[:3], backend="pallas")
