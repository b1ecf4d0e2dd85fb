"""Products: dense is tensordot, a LoRA's are two of them; in float8 how far from exact, and what NVIDIA's compiler gets."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models as tiny

from jaxlm.ops import products as fp8
from jaxlm.ops.products import dense

M, I, O = 64, 96, 80  # noqa: E741


def operands(size: float = 1.0):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = ((M, I), (I, O), (M, O))
    x, kernel, d_y = (jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))
    return x * size, kernel * 0.02, d_y * 1e-6 * size


def results(product, *operands):
    def run(x, kernel, d_y):
        y, vjp = jax.vjp(product, x, kernel)
        return (y, *vjp(d_y))

    return [np.asarray(r, np.float64) for r in tiny.jit(run)(*operands)]


def errors(product, *operands):
    """Norm of the error over the norm of the result: output, gradient of x, gradient of the kernel."""
    got, want = results(product, *operands), results(dense, *operands)
    return [np.linalg.norm(g - w) / np.linalg.norm(w) for g, w in zip(got, want, strict=True)]


@pytest.mark.parametrize("size", [1e-4, 1.0, 3e4])
def test_errors_are_those_of_the_formats(size):
    """Three bits after the leading one round by 2.6% (rms), two by 5.2%: 3.7% forward, 5.9% for gradients."""
    y, d_x, d_kernel = errors(fp8.fp8_dense, *operands(size))
    assert y < 0.045
    assert d_x < 0.07
    assert d_kernel < 0.07
    assert min(y, d_x, d_kernel) > 0.01  # it is rounded at all


def test_without_scales_gradients_vanish(monkeypatch):
    """The mutation: gradients of 1e-6 are below what e5m2 can hold."""
    monkeypatch.setattr(fp8, "quantize", lambda x, dtype: (x.astype(dtype), jnp.float32(1)))
    assert max(errors(fp8.fp8_dense, *operands())) > 0.5


def test_scales_are_powers_of_two_that_use_the_range():
    for dtype, top in ((fp8.FORWARD, 448.0), (fp8.GRADIENT, 57344.0)):
        for largest in (1.0, 1.9, 448.0, 3e-9, 1e20):
            x = jnp.asarray([largest, -largest / 3, 0.0])
            q, scale = jax.jit(fp8.quantize, static_argnums=1)(x, dtype)
            assert np.log2(float(scale)) % 1 == 0
            assert top / 4 < float(q[0]) <= top
            np.testing.assert_allclose(np.asarray(q, np.float32) * scale, x, rtol=2.0**-3)


def test_zeros_and_what_is_not_finite():
    zeros = jnp.zeros((4, 16))
    assert (fp8.fp8_dense(zeros, jnp.ones((16, 8))) == 0).all()
    bad = zeros.at[1, 2].set(jnp.inf)
    assert not jnp.isfinite(fp8.fp8_dense(bad, jnp.ones((16, 8)))).any()
    assert not jnp.isfinite(fp8.fp8_dense(zeros.at[0, 0].set(jnp.nan), jnp.ones((16, 8)))).all()


def test_exact_where_the_formats_are():
    rng = np.random.default_rng(0)
    x, kernel = (jnp.asarray(rng.choice([-2.0, -1.0, 0.5, 1.0, 4.0], shape)) for shape in ((3, 5, 16), (16, 4, 8)))
    np.testing.assert_array_equal(fp8.fp8_dense(x, kernel), dense(x, kernel))


def test_the_program_for_nvidia_has_float8_products():
    """Three of them: forward, and one for each gradient, with its sums kept in full."""
    x, kernel = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((M, I), (I, O)))
    grad = jax.jit(jax.value_and_grad(lambda x, kernel: fp8.fp8_dense(x, kernel).astype(jnp.float32).sum(), (0, 1)))
    text = grad.trace(x, kernel).lower(lowering_platforms=("cuda",)).as_text()
    products = [line for line in text.splitlines() if "dot_general" in line]
    backward = [line for line in products if "f8E5M2" in line]
    assert (len(products), len(backward)) == (3, 2)
    assert all("f8E4M3FN" in line and "xbf16>" in line and "HIGHEST" in line for line in backward)


@pytest.mark.parametrize(("x_shape", "k_shape", "axes"), [((2, 3, 4), (4, 5, 6), 1), ((2, 3, 4, 5), (4, 5, 6), 2)])
def test_dense_is_tensordot(x_shape, k_shape, axes):
    x, kernel = (jax.random.normal(jax.random.key(i), s) for i, s in enumerate((x_shape, k_shape)))
    np.testing.assert_allclose(dense(x, kernel, axes), jnp.tensordot(x, kernel, axes), rtol=1e-5, atol=1e-6)
    got, expected = (
        jax.grad(lambda x, k, f=f: jnp.sum(jnp.sin(f(x, k, axes))), argnums=(0, 1))(x, kernel)
        for f in (dense, jnp.tensordot)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, expected)
    with pytest.raises(TypeError):
        dense(x, kernel[1:], axes)


# A LoRA's products are of a type by which XLA leaves them apart.
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
