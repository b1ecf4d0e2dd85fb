"""Computes a digest of each array, so that a damaged checkpoint is detected.

Orbax does not verify arrays: it restores one with a flipped bit and reports nothing. The digests are computed on the
device before saving. So damage by a disk, a network filesystem or memory is detected when the array is read back: on
the device by `differing`, on the host by `of_array`.
"""

from collections.abc import Iterator, Sequence
from concurrent import futures

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.devices import tree
from jaxlm.ops.quantize import mix, numbers

_UINTS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}
_AT_ONCE = 2**16  # elements that the host hashes at once: they stay in its caches (2^20 takes 2.7 times as long)
_A_JOB = 2**20  # elements that a thread hashes in a row


@jax.jit
def digest(x: jax.Array) -> jax.Array:
    """Returns the digest of an array, a uint32. It does not depend on the array's sharding.

    The digest is the sum, modulo 2^32, of a hash of each element's bits and global index. The order of a sum does not
    matter, so shards don't either. The hash (murmur3's finaliser) is a bijection, so any change of one element changes
    the sum.
    """
    x = jax.device_put(x, jax.memory.Space.Device)  # an offloaded optimizer state is in the host's memory
    bits = jax.lax.bitcast_convert_type(x, _UINTS[x.dtype.itemsize]).astype(jnp.uint32)
    return jnp.sum(mix(bits ^ numbers(x.shape)), dtype=jnp.uint32)


def of_array(array: np.ndarray, pool: futures.ThreadPoolExecutor | None = None) -> int:
    """Returns the digest of an array, computed on the host: the shares of all its pieces sum to it."""

    def share(piece: np.ndarray, start: Sequence[int]) -> int:
        return sum(_hash(part, at, array.shape) for part, at in _split(piece, start, _AT_ONCE))

    pieces = _split(array, (0,) * array.ndim, _A_JOB)
    return sum((pool.map if pool else map)(lambda piece: share(*piece), pieces)) % 2**32


def _split(piece: np.ndarray, start: Sequence[int], most: int) -> Iterator[tuple[np.ndarray, Sequence[int]]]:
    """Yields blocks of at most `most` elements that make up the piece, each with the index of its first element."""
    if piece.size <= most:
        yield piece, start
        return
    axis = int(np.argmax(piece.shape))
    half = piece.shape[axis] // 2
    first, second = np.split(piece, [half], axis)
    yield from _split(first, start, most)
    yield from _split(second, [at + half * (i == axis) for i, at in enumerate(start)], most)


def _hash(piece: np.ndarray, start: Sequence[int], shape: Sequence[int]) -> int:
    """Returns a small piece's share of the digest: `mix` of ops/quantize.py, in place, in as few passes as possible."""
    h, step = np.zeros((1,) * piece.ndim, np.uint32), 0x9E3779B1  # `numbers` of ops/quantize: this times the index
    for axis in reversed(range(piece.ndim)):
        along = np.arange(start[axis], start[axis] + piece.shape[axis], dtype=np.int64).astype(np.uint32)
        along *= np.array(step % 2**32, np.uint32)
        h = h + along.reshape([-1 if i == axis else 1 for i in range(piece.ndim)])
        step *= shape[axis]
    h = h.reshape(-1)
    h ^= np.ascontiguousarray(piece).reshape(-1).view(f"u{piece.dtype.itemsize}")
    shifted = np.empty_like(h)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        h ^= np.right_shift(h, shift, out=shifted)
        if factor != 1:
            h *= np.array(factor, np.uint32)
    return int(np.add.reduce(h, dtype=np.uint32))


@jax.jit
def _look(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns an array's digest, and True if all its numbers are finite."""
    x = jax.device_put(x, jax.memory.Space.Device)
    finite = jnp.all(jnp.isfinite(x)) if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.bool_(True)
    return digest(x), finite


def look(items: dict[str, dict]) -> tuple[dict[str, int], list[str]]:
    """Returns name -> digest of each array, and the names of the arrays with a number that is not finite."""
    looks = {}
    for name, leaf in tree.named_leaves(items):
        looks[name] = _look(leaf)
        # One at a time: an offloaded state may not fit on the device; concurrent collectives of CPU devices may deadlock.
        if leaf.sharding.memory_kind == "pinned_host" or jax.default_backend() == "cpu":
            jax.block_until_ready(looks[name])
    looks = jax.device_get(looks)
    digests = {name: int(sum_) for name, (sum_, _) in looks.items()}
    return digests, [name for name, (_, finite) in looks.items() if not finite]


def table(items: dict[str, dict]) -> dict[str, int]:
    return look(items)[0]


def differing(items: dict[str, dict], saved: dict[str, int]) -> list[str]:
    return [name for name, value in table(items).items() if saved.get(name) != value]
