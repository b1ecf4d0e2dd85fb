"""Eight-bit floats that share an exponent by block, rounded at random: what an optimizer keeps between steps.

Each element is a float32 cut down to three bits of mantissa, its exponent counted from that of its block's largest
(compare the OCP microscaling formats, arXiv:2310.10537). int8 has a sign and 127 values over 16 octaves, uint8 255
values over 32: what lies far below a block's maximum keeps its relative precision, which a linear code loses (the
reason why 8-bit optimizers use other codes: Dettmers et al., arXiv:2110.02861). The grid is that of the floats, the
same whatever the block, so a value that is read and written again moves only if it changed.

A moving average changes by less than half a code a step and would stay where it is if rounded to the nearest: the
rounding is stochastic, by adding noise below the last bit that is kept. The noise is a hash of the element's index and
a seed: no state, the same on every mesh. All of it is integer arithmetic, the same on every device.
"""

import typing

import jax
import jax.numpy as jnp

from jaxlm.ops.bits import mix, numbers

MANTISSA = 3  # bits that are kept
_DROPPED = 23 - MANTISSA
_LEVELS = {jnp.dtype(jnp.int8): 127, jnp.dtype(jnp.uint8): 255}


class Blocked(typing.NamedTuple):
    """An array in eight bits: `codes` of its shape (int8 or uint8), and the blocks' exponents (..., n / block), uint8.

    The blocks are runs along the last axis, so both are split over devices as the array itself.
    """

    codes: jax.Array
    exponents: jax.Array


def block_size(n: int) -> int:
    """The number of elements in a block of an axis of n elements: a divisor of n from 64 to 255; 0 if there is none.

    Of several divisors it is the one whose number of blocks is divisible by the largest power of two, so that on any mesh
    each device gets whole blocks. (The block itself must not depend on the mesh.)
    """
    sizes = [b for b in range(64, 256) if n % b == 0]
    return max(sizes, key=lambda b: ((n // b) & -(n // b), b), default=0)


def zeros(shape: typing.Sequence[int], dtype: jnp.dtype) -> Blocked:
    """An array of zeros in eight bits, as `encode` makes it. `dtype` is int8 or uint8."""
    lead, n = tuple(shape[:-1]), shape[-1]
    return Blocked(jnp.zeros(shape, dtype), jnp.zeros((*lead, n // block_size(n)), jnp.uint8))


def noise(shape: typing.Sequence[int], seed: jax.Array) -> jax.Array:
    """Uniform random bits, uint32, from each element's index and `seed` (a uint32 scalar): 16 for each of two roundings."""
    return mix(numbers(shape) ^ mix(seed))


def encode(x: jax.Array, noise_16: jax.Array, dtype: jnp.dtype) -> Blocked:
    """Eight bits for each element of x (..., n), float32, unbiased but for what lies below a block's range.

    Args:
      x: not negative for uint8.
      noise_16: random integers below 2^16 of x's shape, uint32: between two codes, the chance of the upper one follows
        from them in steps of 2^-16.
      dtype: int8 or uint8.

    Below the range int8 becomes zero and uint8 the smallest code: a second moment that is not zero never becomes it.
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
    """The float32 values of an array in eight bits."""
    codes = blocks(blocked.codes).astype(jnp.int32)
    kept = jnp.maximum(jnp.abs(codes) + _origin(blocked.exponents, _LEVELS[blocked.codes.dtype]), 0)
    x = jax.lax.bitcast_convert_type(kept << _DROPPED, jnp.float32)
    return jnp.where(codes == 0, 0.0, jnp.where(codes < 0, -x, x)).reshape(blocked.codes.shape)


def _origin(exponents: jax.Array, levels: int) -> jax.Array:
    """The kept bits of the float that code 0 stands for: the highest code is the last float of the block's exponent."""
    return ((exponents[..., None].astype(jnp.int32) + 1) << MANTISSA) - 1 - levels


def blocks(x: jax.Array) -> jax.Array:
    """Splits the last axis into blocks: (..., n) -> (..., n / block, block)."""
    block = block_size(x.shape[-1])
    return x.reshape(*x.shape[:-1], x.shape[-1] // block, block)
