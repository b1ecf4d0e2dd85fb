"""Bits of arrays, the same however an array is split over devices: a number for each element, and a hash."""

import typing

import jax
import jax.numpy as jnp


def numbers(shape: typing.Sequence[int]) -> jax.Array:
    """A uint32 for each element of an array of this shape: its row-major index times an odd constant.

    The constant makes neighbours differ in many bits. There is no reshape, which would gather an array that is split over
    devices.
    """
    index = jnp.zeros(shape, jnp.uint32)
    for axis, size in enumerate(shape):
        index = index * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
    return index * jnp.uint32(0x9E3779B1)


def mix(h: jax.Array) -> jax.Array:
    """murmur3's finaliser: a bijection of uint32 that spreads every bit over all."""
    h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
    return h ^ (h >> 16)
