"""A LoRA's products: those of `dense`, forward and backward, but of a type by which XLA leaves them apart."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.ops import products as fp8
from jaxlm.ops.products import dense

X = jax.random.normal(jax.random.key(0), (2, 5, 3, 4))
A = jax.random.normal(jax.random.key(1), (3, 4, 2))
B = jax.random.normal(jax.random.key(2), (2, 6, 7))
SLOPE = jax.random.normal(jax.random.key(3), (2, 5, 6, 7))


def by_lora(x, a, b):
    return fp8.lora_up(fp8.lora_down(x, a, 2), b)


def plain(x, a, b):
    return dense(dense(x, a, 2), b)


def test_values_and_gradients_are_those_of_two_products():
    got, want = (jax.vjp(fn, X, A, B) for fn in (by_lora, plain))
    np.testing.assert_allclose(got[0], want[0], rtol=1e-6)
    for mine, theirs in zip(got[1](SLOPE), want[1](SLOPE), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)
    wrong = jax.vjp(by_lora, X, A, B)[1](2 * SLOPE)[1]
    assert abs(wrong - want[1](SLOPE)[1]).max() > 0.1


@pytest.mark.parametrize("fn", [by_lora, plain])
def test_products_that_share_activations_with_a_kernels_have_another_type(fn):
    low = [value.astype(jnp.bfloat16) for value in (X, A, B, SLOPE)]
    text = str(jax.make_jaxpr(lambda *args: jax.vjp(fn, *args[:3])[1](args[3]))(*low))
    products = [line for line in text.splitlines() if "dot_general" in line]
    apart = [line for line in products if "f32[" in line.partition("=")[0]]
    assert len(apart) == (2 if fn is by_lora else 0)  # x A; slope B of the backward pass
