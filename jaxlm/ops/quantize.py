"""Stores arrays in eight bits, as small floats with a shared exponent for each block. Optimizers store moments so.

Each element is a float32 rounded to three bits of mantissa; its exponent is stored relative to the block's largest exponent
(compare arXiv:2310.10537). int8 has a sign and 127 values over 16 octaves; uint8 has 255 values over 32 octaves. So numbers
far below a block's maximum keep their relative precision, which evenly spaced codes would lose (arXiv:2110.02861). All blocks
round to the same grid of floats, so decoding and encoding again changes no value.
"""

import typing

import jax
import jax.numpy as jnp

MANTISSA = 3  # bits of the mantissa that are kept
_DROPPED = 23 - MANTISSA
_LEVELS = {jnp.dtype(jnp.int8): 127, jnp.dtype(jnp.uint8): 255}


class Blocked(typing.NamedTuple):
    """An array (..., n) in eight bits: `codes` (..., n), int8 or uint8, and each block's largest exponent, `exponents`
    (..., n / block), uint8. Blocks are runs along the last axis, so both are sharded like the array itself.
    """

    codes: jax.Array
    exponents: jax.Array


def block_size(n: int) -> int:
    """Returns the size of the blocks of an axis of n elements: a divisor of n from 64 to 255; 0 if there is none.

    Takes the divisor for which the number of blocks is divisible by the largest power of two. So each device gets whole
    blocks on any mesh, and the size does not depend on the mesh.
    """
    sizes = [b for b in range(64, 256) if n % b == 0]
    return max(sizes, key=lambda b: ((n // b) & -(n // b), b), default=0)


def zeros(shape: typing.Sequence[int], dtype: jnp.dtype) -> Blocked:
    lead, n = tuple(shape[:-1]), shape[-1]
    return Blocked(jnp.zeros(shape, dtype), jnp.zeros((*lead, n // block_size(n)), jnp.uint8))


def noise(shape: typing.Sequence[int], seed: jax.Array) -> jax.Array:
    """Returns 32 random bits for each element, a uint32 hash of its index and `seed` (a uint32): enough for two roundings."""
    return mix(numbers(shape) ^ mix(seed))


# Rounding is stochastic: with rounding to nearest, a moving average that changes by less than half a code per step would never
# change. The noise is a hash of the element's index and a seed, so it needs no state and is the same on every mesh. All of this
# is integer arithmetic, the same on every device.
def encode(x: jax.Array, noise_16: jax.Array, dtype: jnp.dtype) -> Blocked:
    """Returns float32 x (..., n) in eight bits. Averaged over the noise the result is x, except below a block's range.

    Below the range int8 gives zero, and uint8 the smallest code, so that a second moment never becomes zero.

    Args:
      x: the values to store, not negative if `dtype` is uint8.
      noise_16: random integers below 2^16, uint32, of x's shape. A value between two codes is rounded up with a
        probability in proportion to its distance from the lower code, in steps of 2^-16.
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
    """Returns the kept bits of code 0's float. It is set so that the highest code is the largest float of the exponent."""
    return ((exponents[..., None].astype(jnp.int32) + 1) << MANTISSA) - 1 - levels


def blocks(x: jax.Array) -> jax.Array:
    """Returns x with its last axis split into blocks: (..., n) -> (..., n / block, block)."""
    block = block_size(x.shape[-1])
    return x.reshape(*x.shape[:-1], x.shape[-1] // block, block)


def numbers(shape: typing.Sequence[int]) -> jax.Array:
    """Returns a uint32 for each element of an array of this shape: its row-major index times an odd constant.

    The constant makes the numbers of neighbours differ in many bits. The index is computed axis by axis, because a
    reshape would gather a sharded array.
    """
    index = jnp.zeros(shape, jnp.uint32)
    for axis, size in enumerate(shape):
        index = index * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
    return index * jnp.uint32(0x9E3779B1)


def mix(h: jax.Array) -> jax.Array:
    """Hashes each uint32 of `h` by murmur3's finaliser, a bijection: flipping an input bit flips about half of the bits."""
    h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
    return h ^ (h >> 16)
