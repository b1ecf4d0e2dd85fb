"""Eight-bit floats by block: the error is bounded, the rounding unbiased, nothing jumps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxlm.ops import quantize

encode = jax.jit(quantize.encode, static_argnums=2)
decode = jax.jit(quantize.decode)


def noise(shape, seed=0):
    return quantize.noise(shape, jnp.uint32(seed)) & 0xFFFF


def values(signed: bool, octaves: float, shape=(16, 192)) -> jax.Array:
    """Random numbers whose sizes go over so many octaves."""
    rng = np.random.default_rng(0)
    x = rng.uniform(1, 2, shape) * np.exp2(rng.uniform(-octaves, 0, shape)) * 1e-5
    return jnp.asarray(x * (rng.choice([-1, 1], shape) if signed else 1), jnp.float32)


@pytest.mark.parametrize(("dtype", "octaves"), [(jnp.int8, 14), (jnp.uint8, 30)])
def test_the_error_is_below_an_eighth_of_each_value(dtype, octaves):
    x = values(dtype == jnp.int8, octaves)
    packed = encode(x, noise(x.shape), dtype)
    assert (packed.codes.dtype, packed.codes.shape, packed.exponents.shape) == (dtype, x.shape, (16, 2))
    error = np.abs(decode(packed) - x) / np.abs(x)
    assert 0.02 < error.max() <= 1 / 8
    linear = np.round(x / np.abs(x).max() * 127) / 127 * np.abs(x).max()  # what a code without exponents gives
    assert np.max(np.abs(linear - x) / np.abs(x)) > 0.9


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8])
def test_the_rounding_is_unbiased(dtype):
    x = values(dtype == jnp.int8, 6)
    n = 2000
    mean = jax.lax.map(lambda s: decode(encode(x, noise(x.shape, s), dtype)), jnp.arange(n, dtype=jnp.uint32)).mean(0)
    # One rounding has a standard deviation of at most a 16th of the value: six of the mean's.
    np.testing.assert_array_less(np.abs(mean - x), np.abs(x) / 16 / np.sqrt(n) * 6)
    assert abs(float(jnp.mean(mean / x)) - 1) < 1e-4
    nearest = decode(encode(x, jnp.full(x.shape, 2**15, jnp.uint32), dtype))
    with pytest.raises(AssertionError):
        np.testing.assert_array_less(np.abs(nearest - x), np.abs(x) / 16 / np.sqrt(n) * 6)


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8])
def test_what_was_read_is_written_again_as_it_was(dtype):
    x = values(dtype == jnp.int8, 20).at[0, :5].set(0.0)
    once = encode(x, noise(x.shape), dtype)
    again = encode(decode(once), noise(x.shape, 1), dtype)
    jax.tree.map(np.testing.assert_array_equal, once, again)


def test_below_the_range_a_first_moment_is_zero_and_a_second_is_not():
    x = jnp.full((1, 64), 1e-30).at[0, 0].set(1.0).at[0, 1].set(0.0)
    m, v = (np.asarray(decode(encode(x, noise(x.shape), dtype)))[0] for dtype in (jnp.int8, jnp.uint8))
    assert m[0] == v[0] == 1.0
    assert m[1] == v[1] == 0.0
    assert (m[2:] == 0).all()
    assert (v[2:] >= 1e-30).all()
    assert (v[2:] < 1e-9).all()


def test_zeros_and_the_smallest_and_largest_floats():
    for dtype in (jnp.int8, jnp.uint8):
        z = jnp.zeros((2, 64))
        jax.tree.map(np.testing.assert_array_equal, encode(z, noise(z.shape), dtype), quantize.zeros(z.shape, dtype))
        x = jnp.asarray(np.geomspace(1e-37, 3e38, 128), jnp.float32)[:, None] * jnp.ones((1, 64))
        np.testing.assert_allclose(decode(encode(x, noise(x.shape), dtype)), x, rtol=1 / 8)


def test_blocks_do_not_straddle_devices():
    for n in (512, 1408, 2048, 2560, 4096, 5632, 10240, 11008, 14336):
        block = quantize.block_size(n)
        assert 64 <= block < 256
        assert n // block % 8 == 0
    assert [quantize.block_size(n) for n in (1, 63, 64, 128, 67 * 3, 257)] == [0, 0, 64, 64, 201, 0]


def test_noise_is_the_same_on_any_mesh_and_another_for_another_seed():
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    where = NamedSharding(mesh, PartitionSpec("a", "b"))
    x = values(True, 6)
    sharded = jax.jit(lambda x: quantize.encode(x, noise(x.shape), jnp.int8), out_shardings=where)(
        jax.device_put(x, where)
    )
    jax.tree.map(np.testing.assert_array_equal, sharded, encode(x, noise(x.shape), jnp.int8))
    assert np.mean(np.asarray(noise(x.shape, 0)) == np.asarray(noise(x.shape, 1))) < 0.01


def test_numbers_are_those_of_the_flat_array():
    flat = np.arange(24, dtype=np.uint32) * np.uint32(0x9E3779B1)
    np.testing.assert_array_equal(quantize.numbers((2, 3, 4)), flat.reshape(2, 3, 4))


def test_mix_is_murmur3_and_spreads_one_bit_over_all():
    assert int(quantize.mix(jnp.uint32(1))) == 0x514E28B7
    x = jnp.arange(4096, dtype=jnp.uint32)
    flipped = np.asarray(jax.lax.population_count(quantize.mix(x) ^ quantize.mix(x ^ 1)))
    assert abs(flipped.mean() - 16) < 0.5
