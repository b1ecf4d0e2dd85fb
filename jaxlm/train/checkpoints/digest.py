"""Computes a number for each array, by which a damaged checkpoint is found.

Orbax does not verify: it restores an array with a flipped bit without a word. The digests are computed on the device,
before saving. So damage by a disk, a network filesystem or memory is found when the array is read back.
"""

import jax
import jax.numpy as jnp

from jaxlm import tree
from jaxlm.ops.bits import mix, numbers

_UINTS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


@jax.jit
def digest(x: jax.Array) -> jax.Array:
    """Returns a uint32 of an array, which does not depend on how it is sharded.

    It is the sum, modulo 2^32, of a hash of each element's bits and global index. A sum has no order, so shards don't
    matter. The hash (murmur3's finaliser) is a bijection, so any change of one element changes the sum.
    """
    x = jax.device_put(x, jax.memory.Space.Device)  # an optimizer's state may wait in the host's memory
    bits = jax.lax.bitcast_convert_type(x, _UINTS[x.dtype.itemsize]).astype(jnp.uint32)
    return jnp.sum(mix(bits ^ numbers(x.shape)), dtype=jnp.uint32)


def table(items: dict[str, dict]) -> dict[str, int]:
    """Returns name -> digest of each array. They are computed one by one, since an offloaded state may not fit as a whole."""
    return {name: int(jax.device_get(digest(leaf))) for name, leaf in tree.named_leaves(items)}


def differing(items: dict[str, dict], saved: dict[str, int]) -> list[str]:
    """Returns the names of the arrays whose digest is not the saved one."""
    return [name for name, value in table(items).items() if saved.get(name) != value]
