"""Norms against formulas in float64 and their dtypes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.ops import norms


@pytest.fixture
def x():
    return np.random.default_rng(0).normal(3.0, 2.0, (2, 5, 16))


def test_rms_norm_is_the_formula(x):
    scale = np.linspace(0.5, 1.5, 16)
    want = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * scale
    got = norms.rms_norm(jnp.asarray(x, jnp.float32), jnp.asarray(scale, jnp.float32), 1e-5)
    np.testing.assert_allclose(got, want, rtol=2e-6)


def test_layer_norm_is_the_formula(x):
    scale, bias = np.linspace(0.5, 1.5, 16), np.linspace(-1, 1, 16)
    want = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * scale + bias
    args = (jnp.asarray(a, jnp.float32) for a in (x, scale, bias))
    np.testing.assert_allclose(norms.layer_norm(*args, 1e-5), want, rtol=1e-5, atol=1e-6)


def test_statistics_are_float32_and_dtype_is_kept():
    x = jnp.full((1, 512), 300.0, jnp.float16)  # its squares overflow float16
    y = norms.rms_norm(x, jnp.ones(512), 1e-5)
    assert y.dtype == jnp.float16
    np.testing.assert_allclose(y, 1.0, rtol=1e-3)
    assert norms.layer_norm(x.astype(jnp.bfloat16), jnp.ones(512)).dtype == jnp.bfloat16


def test_gradient_is_finite_at_zero():
    grad = jax.grad(lambda x: norms.rms_norm(x, jnp.ones(8)).sum())(jnp.zeros((1, 8)))
    assert jnp.isfinite(grad).all()
