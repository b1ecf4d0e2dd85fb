"""Products in integers: near those in floats, and a row's bits do not depend on the other rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.ops import int8
from jaxlm.ops.decode import row_product

RNG = np.random.default_rng(0)


def matrix(rows: int, columns: int) -> jax.Array:
    return jnp.asarray(RNG.standard_normal((rows, columns)), jnp.float32)


def test_codes_are_within_half_a_level_of_each_row():
    x = matrix(7, 64) * jnp.asarray([1e-6, 0.01, 1, 10, 1e4, 1, 0])[:, None]  # rows of very different sizes
    coded = int8.quantize(x)
    assert coded.codes_OxI.dtype == jnp.int8
    assert int(jnp.abs(coded.codes_OxI).max()) == 127
    largest = np.abs(np.asarray(x)).max(-1, keepdims=True)
    gap = np.abs(np.asarray(int8.decode(coded, jnp.float32)) - np.asarray(x))
    assert (gap <= largest * (0.5 / 127) * (1 + 1e-5)).all()
    assert gap.max() > 0
    again = int8.quantize(int8.decode(coded, jnp.float32))
    assert (again.codes_OxI == coded.codes_OxI).all()


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_a_product_is_near_the_product_of_floats_and_exactly_that_of_the_codes(rows):
    x, kernel = matrix(rows, 256), matrix(96, 256)
    coded = int8.quantize(kernel)
    y = np.asarray(jax.jit(row_product)(x, coded))
    exact = np.asarray(x, np.float64) @ np.asarray(kernel, np.float64).T
    # Two rounding errors, each of some .3 of a level of 1/127 of the largest of 256 normal numbers, 2.9.
    assert 0.002 < np.linalg.norm(y - exact) / np.linalg.norm(exact) < 0.012
    rounded = [np.asarray(int8.decode(part, jnp.float32), np.float64) for part in (int8.quantize(x), coded)]
    np.testing.assert_allclose(y, rounded[0] @ rounded[1].T, rtol=1e-5, atol=1e-4)


def test_a_row_has_the_same_bits_alone_and_among_others():
    x, coded = matrix(8, 256), int8.quantize(matrix(96, 256))
    together = np.asarray(jax.jit(row_product)(x, coded))
    for row in range(8):
        np.testing.assert_array_equal(np.asarray(jax.jit(row_product)(x[row : row + 1], coded))[0], together[row])


def test_one_row_is_multiplied_as_two():
    """A product of one row would be ten times as slow on a CPU."""
    if jax.default_backend() == "cpu":
        program = jax.jit(row_product).lower(matrix(1, 256), int8.quantize(matrix(96, 256))).compile().as_text()
        assert "s32[2,96]" in program
