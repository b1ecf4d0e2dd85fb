"""Numbers the elements of an array and hashes numbers. The results do not depend on how devices split the array."""

import typing

import jax
import jax.numpy as jnp


def numbers(shape: typing.Sequence[int]) -> jax.Array:
    """Returns a uint32 for each element of an array of this shape: its row-major index times an odd constant.

    The constant makes the numbers of neighbours differ in many bits. The index is computed axis by axis, because a
    reshape would gather an array that devices split.
    """
    index = jnp.zeros(shape, jnp.uint32)
    for axis, size in enumerate(shape):
        index = index * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
    return index * jnp.uint32(0x9E3779B1)


def mix(h: jax.Array) -> jax.Array:
    """Hashes each uint32 of `h` by murmur3's finaliser, a bijection in which each bit changes about half of all bits."""
    h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
    return h ^ (h >> 16)
