"""Cross-entropy: tiled = plain in value and gradients, padding columns, weights, z-loss, sharding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxlm.ops import xent

M, D, V, REAL = 50, 16, 128, 101


def _inputs(dtype=jnp.float32, rows=M):
    keys = jax.random.split(jax.random.key(0), 4)
    hidden = jax.random.normal(keys[0], (rows, D), dtype)
    head = 0.5 * jax.random.normal(keys[1], (D, V), dtype)
    targets = jax.random.randint(keys[2], (rows,), 0, REAL)
    weights = jnp.where(jnp.arange(rows) % 5 == 0, 0.0, 0.5 + jax.random.uniform(keys[3], (rows,)))
    return hidden, head, targets, weights


def _loss(tile, z_loss=0.0):
    def loss(hidden, head, targets, weights):
        return xent.cross_entropy(hidden, head, targets, weights, vocab_size=REAL, z_loss=z_loss, tile=tile)

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))


def _reference(hidden, head, targets, weights, z_loss=0.0):
    hidden, head, weights = (np.asarray(x, np.float64) for x in (hidden, head, weights))
    logits = (hidden @ head)[:, :REAL]
    highest = logits.max(-1)
    lse = highest + np.log(np.exp(logits - highest[:, None]).sum(-1))
    picked = logits[np.arange(len(targets)), targets]
    aux = {
        "nll_sum": (weights * (lse - picked)).sum(),
        "weight_sum": weights.sum(),
        "correct_sum": (weights * (logits.argmax(-1) == np.asarray(targets))).sum(),
    }
    return aux["nll_sum"] + z_loss * (weights * lse**2).sum(), aux


@pytest.mark.parametrize(("tile", "z_loss"), [(0, 0.1), (16, 0.1), (50, 0.0)])
def test_value_is_the_formula(tile, z_loss):
    inputs = _inputs()
    (total, aux), _ = _loss(tile, z_loss)(*inputs)
    want, want_aux = _reference(*inputs, z_loss)
    np.testing.assert_allclose(total, want, rtol=1e-5)
    for name, value in want_aux.items():
        np.testing.assert_allclose(aux[name], value, rtol=1e-5, err_msg=name)
        assert aux[name].dtype == jnp.float32


@pytest.mark.parametrize(("tile", "z_loss"), [(7, 0.1), (25, 0.0), (49, 0.1)])
def test_tiled_equals_plain(tile, z_loss):
    inputs = _inputs()
    (plain, aux), grads = _loss(0, z_loss)(*inputs)
    (tiled, tiled_aux), tiled_grads = _loss(tile, z_loss)(*inputs)
    np.testing.assert_allclose(tiled, plain, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), tiled_aux, aux)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), tiled_grads, grads)


def test_tiled_equals_plain_under_a_scaled_loss():
    """The gradients of the forward pass are multiplied by what comes back, not returned as they are."""
    hidden, head, targets, weights = _inputs()

    @functools.partial(jax.jit, static_argnums=1)
    def scaled(hidden, tile):
        return 3.0 * xent.cross_entropy(hidden, head, targets, weights, vocab_size=REAL, tile=tile)[0]

    np.testing.assert_allclose(jax.grad(scaled)(hidden, 16), jax.grad(scaled)(hidden, 0), rtol=1e-5, atol=1e-6)


def test_bfloat16_inputs_have_float32_logits():
    inputs = _inputs(jnp.bfloat16)
    exact = tuple(x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x for x in inputs)
    (want, _), d_want = _loss(0)(*exact)
    for tile in (0, 16):
        (total, _), grads = _loss(tile)(*inputs)
        np.testing.assert_allclose(total, want, rtol=1e-5)  # bfloat16 logits would be 1e-3 off
        for grad, d in zip(grads, d_want, strict=True):
            assert grad.dtype == jnp.bfloat16
            np.testing.assert_allclose(grad.astype(jnp.float32), d, rtol=0.05, atol=0.02)


def test_padding_columns_take_nothing_and_get_no_gradient():
    hidden, head, targets, weights = _inputs()
    loud, loss = head.at[:, REAL:].set(50.0), _loss(16, 0.1)
    (total, aux), (d_hidden, d_head) = loss(hidden, head, targets, weights)
    (total2, aux2), (d_hidden2, d_head2) = loss(hidden, loud, targets, weights)
    assert total == total2
    assert aux["correct_sum"] == aux2["correct_sum"]
    np.testing.assert_array_equal(d_hidden, d_hidden2)
    assert (d_head[:, REAL:] == 0).all()
    assert (d_head2[:, REAL:] == 0).all()
    # Mutation: without the mask both would see the loud columns.
    unmasked = xent.cross_entropy(hidden, loud, targets, weights, vocab_size=V, tile=0)[0]
    assert unmasked > 2 * total


def test_zero_weight_is_absence():
    hidden, head, targets, weights = _inputs()
    kept = np.flatnonzero(np.asarray(weights))
    (total, _), (d_hidden, d_head) = _loss(16)(hidden, head, targets, weights)
    (want, _), (d_hidden_kept, d_head_kept) = _loss(16)(hidden[kept], head, targets[kept], weights[kept])
    np.testing.assert_allclose(total, want, rtol=1e-6)
    np.testing.assert_allclose(d_head, d_head_kept, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(d_hidden[kept], d_hidden_kept, rtol=1e-5, atol=1e-6)
    assert (d_hidden[np.asarray(weights) == 0] == 0).all()


@pytest.mark.parametrize("tile", [0, 16])
def test_token_nll(tile):
    hidden, head, targets, weights = _inputs()
    nll = xent.token_nll(hidden, head, targets, vocab_size=REAL, tile=tile)
    assert nll.shape == (M,)
    np.testing.assert_allclose(jnp.sum(nll * weights), _reference(hidden, head, targets, weights)[0], rtol=1e-5)
    one = xent.token_nll(hidden[3:4], head, targets[3:4], vocab_size=REAL)
    np.testing.assert_allclose(nll[3:4], one, rtol=1e-5)  # rows come back in their order


def test_sharded_equals_one_device():
    inputs, loss = _inputs(rows=64), _loss(16, 0.1)
    (want, _), d_want = loss(*inputs)
    mesh = Mesh(np.array(jax.devices()[:8]), ("data",))
    over = [PartitionSpec("data"), PartitionSpec(), PartitionSpec("data"), PartitionSpec("data")]
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(inputs, over, strict=True)]
    (total, _), grads = loss(*placed)
    np.testing.assert_allclose(total, want, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), grads, d_want)


def test_full_logits_never_exist_when_tiled():
    def shapes(tile):
        rows = 4096
        args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((rows, D), (D, V))]
        args += [jax.ShapeDtypeStruct((rows,), jnp.int32), jax.ShapeDtypeStruct((rows,), jnp.float32)]
        return _loss(tile).lower(*args).as_text().count(f"tensor<{rows}x{V}xf32>")

    assert shapes(256) == 0
    assert shapes(0) > 0
