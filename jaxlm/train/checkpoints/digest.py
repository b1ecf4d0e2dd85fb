"""Computes a digest of each array, so that a damaged checkpoint is detected.

Orbax does not verify arrays: it restores one with a flipped bit and reports nothing. The digests are computed on the
device before saving. So damage by a disk, a network filesystem or memory is detected when the array is read back.
"""

import jax
import jax.numpy as jnp

from jaxlm import tree
from jaxlm.ops.bits import mix, numbers

_UINTS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


@jax.jit
def digest(x: jax.Array) -> jax.Array:
    """Returns the digest of an array, a uint32. It does not depend on the array's sharding.

    The digest is the sum, modulo 2^32, of a hash of each element's bits and global index. The order of a sum does not
    matter, so shards don't either. The hash (murmur3's finaliser) is a bijection, so any change of one element changes
    the sum.
    """
    x = jax.device_put(x, jax.memory.Space.Device)  # an optimizer's state may wait in the host's memory
    bits = jax.lax.bitcast_convert_type(x, _UINTS[x.dtype.itemsize]).astype(jnp.uint32)
    return jnp.sum(mix(bits ^ numbers(x.shape)), dtype=jnp.uint32)


def table(items: dict[str, dict]) -> dict[str, int]:
    """Returns name -> digest of each array. Computes one at a time, as an offloaded state may not fit."""
    return {name: int(jax.device_get(digest(leaf))) for name, leaf in tree.named_leaves(items)}


def differing(items: dict[str, dict], saved: dict[str, int]) -> list[str]:
    """Returns the names of the arrays whose digest differs from that in `saved`."""
    return [name for name, value in table(items).items() if saved.get(name) != value]
