"""The decoding operations against their plain forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.ops import decode
from jaxlm.ops.attention import masked_attention


def relative(got, expected) -> float:
    return float(jnp.abs(got - expected).max() / jnp.abs(expected).max())


@pytest.mark.parametrize("new", [1, 3])
def test_cached_attention_is_attention(new):
    rng = np.random.default_rng(0)
    b, s, n, k, h = 2, 10, 4, 2, 8
    q, keys, values = (
        jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((b, new, n, h), *[(b, s, k, h)] * 2)
    )
    caches = (jnp.zeros((b, k, h, s)), jnp.zeros((b, k, s, h)))
    caches = decode.write_cache(*caches, keys[:, :4], values[:, :4], 0)
    caches = jax.jit(decode.write_cache)(*caches, keys[:, 4:], values[:, 4:], 4)
    q_positions = jnp.tile(jnp.arange(6, 6 + new), (b, 1))
    kv_positions = jnp.stack([jnp.arange(s), jnp.where(jnp.arange(s) < 3, 99, jnp.arange(s))])
    mask = kv_positions[:, None, :] <= q_positions[:, :, None]
    expected = masked_attention(q, keys, values, mask, h**-0.5)
    cached = jax.jit(decode.cached_attention)
    assert relative(cached(q, *caches, mask), expected) < 1e-5
    assert relative(cached(q, *caches, jnp.ones_like(mask)), expected) > 1e-2
    swapped = (jnp.roll(caches[0], 1, axis=1), caches[1])
    assert relative(cached(q, *swapped, mask), expected) > 1e-2


@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(5, 24, 7), (8, 512, 64), (1, 7, 6)])
def test_row_product_is_the_product(rows, inputs, outputs):
    rng = np.random.default_rng(1)
    x, kernel = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((rows, inputs), (outputs, inputs)))
    product = jax.jit(decode.row_product)
    assert relative(product(x, kernel), x @ kernel.T) < 1e-5
    assert relative(product(x, kernel[::-1]), x @ kernel.T) > 1e-2
    halves = product(x.astype(jnp.bfloat16), kernel.astype(jnp.bfloat16))
    assert halves.dtype == jnp.bfloat16
    assert relative(halves.astype(jnp.float32), x @ kernel.T) < 0.03


def test_row_product_reads_the_kernel_as_the_left_operand():
    x, kernel = jnp.ones((8, 512)), jnp.ones((64, 512))
    compiled = jax.jit(decode.row_product).lower(x, kernel).compile().as_text()
    assert "f32[64,8]" in compiled  # outputs before rows
    with jax.set_mesh(jax.make_mesh((2,), ("data",))):
        assert "f32[64,8]" not in jax.jit(decode.row_product).lower(x, kernel).compile().as_text()


def test_first_argmax_takes_the_first_of_equals():
    x = jnp.asarray([[0.0, 3.0, 3.0, -jnp.inf], [-1.0, -2.0, -5.0, -jnp.inf]])
    assert decode.first_argmax(x).tolist() == [1, 0] == jnp.argmax(x, -1).tolist()
    assert decode.first_argmax(x).dtype == jnp.int32
