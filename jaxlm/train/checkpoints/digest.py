"""One number for each array, by which a damaged checkpoint is found.

Orbax verifies nothing: a flipped bit in an array file restores silently. The digests are computed on the device from the
arrays that were meant to be saved, so garbage from a disk, a network filesystem or memory is found when it is read back.
"""

import jax
import jax.numpy as jnp

from jaxlm import tree
from jaxlm.ops.bits import mix, numbers

_UINTS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


@jax.jit
def digest(x: jax.Array) -> jax.Array:
    """One uint32 of an array, independent of how it is sharded.

    Each element's bits are mixed with its global index (murmur3's finaliser, a bijection) and the results added
    modulo 2^32: the order of addition is free, and any change of one element changes the sum.
    """
    x = jax.device_put(x, jax.memory.Space.Device)  # an optimizer's state may wait in the host's memory
    bits = jax.lax.bitcast_convert_type(x, _UINTS[x.dtype.itemsize]).astype(jnp.uint32)
    return jnp.sum(mix(bits ^ numbers(x.shape)), dtype=jnp.uint32)


def table(items: dict[str, dict]) -> dict[str, int]:
    """Name -> digest of each array, on the host. One after the other: an offloaded state need not fit at once."""
    return {name: int(jax.device_get(digest(leaf))) for name, leaf in tree.named_leaves(items)}


def differing(items: dict[str, dict], saved: dict[str, int]) -> list[str]:
    """Names of the arrays whose digest is not the saved one."""
    return [name for name, value in table(items).items() if saved.get(name) != value]
