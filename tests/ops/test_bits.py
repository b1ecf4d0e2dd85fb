"""Numbers of elements and their hash."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.ops.quantize import mix, numbers


def test_numbers_are_those_of_the_flat_array():
    flat = np.arange(24, dtype=np.uint32) * np.uint32(0x9E3779B1)
    np.testing.assert_array_equal(numbers((2, 3, 4)), flat.reshape(2, 3, 4))


def test_mix_is_murmur3_and_spreads_one_bit_over_all():
    assert int(mix(jnp.uint32(1))) == 0x514E28B7
    x = jnp.arange(4096, dtype=jnp.uint32)
    flipped = np.asarray(jax.lax.population_count(mix(x) ^ mix(x ^ 1)))
    assert abs(flipped.mean() - 16) < 0.5
