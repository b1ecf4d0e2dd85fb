"""Stores arrays in eight bits: small floats that share an exponent by block. An optimizer keeps its moments so.

Each element is a float32 with three bits of mantissa left. Its exponent is stored relative to the largest of its block
(compare the OCP microscaling formats, arXiv:2310.10537). int8 has a sign and 127 values over 16 octaves, uint8 255
values over 32. So numbers far below a block's maximum keep their relative precision; with evenly spaced codes they would
lose it (Dettmers et al., arXiv:2110.02861). All blocks round to the same grid of floats, so a value that is read and
written again does not move unless it changed.

Rounding is stochastic: noise is added below the last bit that is kept. Rounded to the nearest, a moving average, which
changes by less than half a code a step, would never move. The noise is a hash of the element's index and a seed, so it
needs no state and is the same on every mesh. All of this is integer arithmetic, the same on every device.
"""

import typing

import jax
import jax.numpy as jnp

from jaxlm.ops.bits import mix, numbers

MANTISSA = 3  # bits that are kept
_DROPPED = 23 - MANTISSA
_LEVELS = {jnp.dtype(jnp.int8): 127, jnp.dtype(jnp.uint8): 255}


class Blocked(typing.NamedTuple):
    """An array (..., n) in eight bits.

    Blocks are runs along the last axis, so devices split both parts as they would the array itself.

    Attributes:
      codes: (..., n), int8 or uint8.
      exponents: (..., n / block), uint8: the largest exponent of each block.
    """

    codes: jax.Array
    exponents: jax.Array


def block_size(n: int) -> int:
    """Returns the size of the blocks of an axis of n elements: a divisor of n from 64 to 255; 0 if there is none.

    Of several divisors it takes that whose number of blocks has the largest power of two as a factor. So each device gets
    whole blocks on any mesh, and the size need not depend on the mesh.
    """
    sizes = [b for b in range(64, 256) if n % b == 0]
    return max(sizes, key=lambda b: ((n // b) & -(n // b), b), default=0)


def zeros(shape: typing.Sequence[int], dtype: jnp.dtype) -> Blocked:
    """Returns an array of zeros in eight bits, as `encode` would. `dtype` is int8 or uint8."""
    lead, n = tuple(shape[:-1]), shape[-1]
    return Blocked(jnp.zeros(shape, dtype), jnp.zeros((*lead, n // block_size(n)), jnp.uint8))


def noise(shape: typing.Sequence[int], seed: jax.Array) -> jax.Array:
    """Returns random bits (uint32) for each element, a hash of its index and `seed` (a uint32): enough for two roundings."""
    return mix(numbers(shape) ^ mix(seed))


def encode(x: jax.Array, noise_16: jax.Array, dtype: jnp.dtype) -> Blocked:
    """Stores float32 x (..., n) in eight bits. Averaged over the noise the result is x, but below a block's range.

    Below the range int8 gives zero. uint8 gives the smallest code, so that a second moment never becomes zero.

    Args:
      x: not negative if `dtype` is uint8.
      noise_16: random integers below 2^16, uint32, of x's shape. A value between two codes is rounded up with a chance in
        proportion to its distance from the lower one, in steps of 2^-16.
      dtype: int8 or uint8.
    """
    levels = _LEVELS[jnp.dtype(dtype)]
    signed = levels == 127
    x, noise_16, shape = blocks(x), blocks(noise_16), x.shape
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0x7FFFFFFF)
    kept = ((bits + (noise_16 << (_DROPPED - 16))) >> _DROPPED).astype(jnp.int32)
    exponents = (jnp.max(kept, axis=-1) >> MANTISSA).astype(jnp.uint8)
    codes = jnp.clip(kept - _origin(exponents, levels), 0 if signed else 1, levels)
    codes = jnp.where(bits == 0, 0, jnp.where(x < 0, -codes, codes))
    return Blocked(codes.astype(dtype).reshape(shape), exponents)


def decode(blocked: Blocked) -> jax.Array:
    """Returns the float32 values of an array in eight bits."""
    codes = blocks(blocked.codes).astype(jnp.int32)
    kept = jnp.maximum(jnp.abs(codes) + _origin(blocked.exponents, _LEVELS[blocked.codes.dtype]), 0)
    x = jax.lax.bitcast_convert_type(kept << _DROPPED, jnp.float32)
    return jnp.where(codes == 0, 0.0, jnp.where(codes < 0, -x, x)).reshape(blocked.codes.shape)


def _origin(exponents: jax.Array, levels: int) -> jax.Array:
    """Returns the kept bits of the float that code 0 would be: the highest code is the last float of the block's exponent."""
    return ((exponents[..., None].astype(jnp.int32) + 1) << MANTISSA) - 1 - levels


def blocks(x: jax.Array) -> jax.Array:
    """Splits the last axis into blocks: (..., n) -> (..., n / block, block)."""
    block = block_size(x.shape[-1])
    return x.reshape(*x.shape[:-1], x.shape[-1] // block, block)
