"""Hashes of a text: its words, shingles, MinHash bands and a sketch (Broder 1997; LSH banding: Leskovec et al., ch. 3).

Legend: W words, S distinct shingles, P permutations, B bands.
"""

import functools
import hashlib

import numpy as np

WINDOW = 50  # words
ONE_IN = np.uint64(16)
SKETCH = 512  # smallest shingle hashes kept for the similarity check: exact up to this many shingles, +-2% beyond
_P = np.uint64(0x9E3779B97F4A7C15)
_CHUNK = 1 << 14  # shingles hashed at a time, so that the table of permutations stays in cache


def normalised_hash(text: str) -> tuple[int, int]:
    """Returns a 128-bit hash as two uint64, equal for texts that differ only in spacing and case."""
    digest = hashlib.blake2b(" ".join(text.casefold().split()).encode("utf-8", "replace"), digest_size=16).digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")


def hash64(text: str) -> int:
    """Returns a hash of a string, a uint64, which is the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest(), "little")


def mix(x: np.ndarray) -> np.ndarray:
    """Applies the finaliser of splitmix64 (Steele et al. 2014) to uint64."""
    x = x ^ (x >> np.uint64(30))
    x = x * np.uint64(0xBF58476D1CE4E5B9)
    x = x ^ (x >> np.uint64(27))
    x = x * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@functools.cache
def _kinds(operators: bool) -> np.ndarray:
    """Returns uint8[2**16] by code point: 0 between words, 1 in a word, 2 a word of its own (scripts without spaces)."""
    kinds = np.fromiter((chr(c).isalnum() for c in range(1 << 16)), np.uint8, 1 << 16)
    for first, last in ((0x0E00, 0x0EFF), (0x1000, 0x109F), (0x1780, 0x17FF), (0x3040, 0x30FF), (0x3400, 0x9FFF)):
        kinds[first : last + 1] *= 2
    kinds[0x0300:0x0370] = 1  # combining marks
    kinds[list(map(ord, "+/%&^~=<!"))] = 2 * operators
    return kinds


@functools.cache
def _powers(n: int) -> np.ndarray:
    return np.concatenate([np.ones(1, np.uint64), np.cumprod(np.full(n - 1, _P))])


def word_hashes(text: str, operators: bool = False) -> np.ndarray:
    """Returns a hash of each word, case folded: uint64[W]. Digits count; punctuation and spacing don't.

    operators: each of +/%&^~=<! is a word, so that pages of a manual on `operator+` and `operator~` differ.
    """
    text = text.casefold()
    if text.isascii():
        points = np.frombuffer(text.encode(), np.uint8)
    else:
        points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    kinds = _kinds(operators)[points if points.dtype == np.uint8 else np.minimum(points, 0xFFFF)]
    if points.dtype != np.uint8:
        kinds = np.where(points >= 0x20000, np.uint8(2), kinds)
    inside = kinds > 0
    before = np.concatenate([np.zeros(1, np.uint8), kinds[:-1]])
    starts = np.flatnonzero(inside & ((before != 1) | (kinds == 2)))
    if not len(starts):
        return np.empty(0, np.uint64)
    # A polynomial hash of every word at once: the sum of mix(c_k) P^k over its characters, k from 0 at the word's start.
    owner = np.cumsum(np.bincount(starts, minlength=len(points)).astype(np.int64)) - 1
    place = np.arange(len(points)) - starts[np.maximum(owner, 0)]
    longest = int(place[inside].max()) + 1
    powers = _powers(1 << (longest - 1).bit_length())[np.where(inside, place, 0)]
    terms = mix(points.astype(np.uint64) + np.uint64(1)) * powers
    terms[~inside] = 0
    return np.add.reduceat(terms, starts)


def shingles(words: np.ndarray, n: int) -> np.ndarray:
    """Returns the distinct hashes of all runs of `n` words, or of all words if they are fewer, sorted: uint64[S]."""
    if not len(words):
        return np.empty(0, np.uint64)
    n = min(n, len(words))
    mixed = mix(words)
    hashes = mixed[: len(words) - n + 1]
    for k in range(1, n):
        hashes = hashes * _P + mixed[k : len(words) - n + 1 + k]
    return _distinct(np.sort(mix(hashes)))


def _distinct(ordered: np.ndarray) -> np.ndarray:
    """`np.unique` of sorted integers; numpy's own takes thirty times as long as the sort."""
    return ordered[np.append(True, ordered[1:] != ordered[:-1])[: len(ordered)]]


_POWERS = {k: np.uint64(pow(int(_P), k, 2**64)) for k in (1, 2, 4, 8, 16, 32, 64)}


def windows(words_W: np.ndarray) -> np.ndarray:
    """Returns hashes of runs of 50 words, one in 16 chosen by the hash, so that equal texts give equal ones: uint64[n]."""
    hashes = mix(ngram_hashes(mix(words_W), [WINDOW])[0])
    return np.unique(hashes[hashes % ONE_IN == 0])


def ngram_hashes(x_W: np.ndarray, sizes: list[int]) -> list[np.ndarray]:
    """Returns for each size n the hash of the n words at each place: sum of x[i+k] r^k modulo 2^64, by doubling."""
    doubled = {1: x_W}
    while 2 * max(doubled) <= min(max(sizes), len(x_W)):
        k = max(doubled)
        doubled[2 * k] = _joined(doubled[k], doubled[k], k)
    return [_sized(doubled, n) if n <= len(x_W) else x_W[:0] for n in sizes]


def _sized(doubled: dict[int, np.ndarray], n: int) -> np.ndarray:
    size = max(k for k in doubled if k <= n)
    return doubled[size] if size == n else _joined(doubled[size], _sized(doubled, n - size), size)


def _joined(left: np.ndarray, right: np.ndarray, k: int) -> np.ndarray:
    right = right[k:]
    return left[: len(right)] + right * _POWERS[k]


@functools.cache
def _permutations(count: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.Generator(np.random.PCG64(1))
    return tuple(rng.integers(0, 2**64, (2, count, 1), np.uint64) | np.array([[[1]], [[0]]], np.uint64))


def band_hashes(shingles_S: np.ndarray, bands: int, rows: int) -> np.ndarray:
    """Returns a hash for each band, uint64[B]: equal with probability J**rows for documents of similarity J.

    MinHash with multiply-shift hashes (Dietzfelbinger et al. 1997).
    """
    a, b = _permutations(bands * rows)
    lowest_P = np.full(bands * rows, np.iinfo(np.uint64).max, np.uint64)
    for start in range(0, len(shingles_S), _CHUNK):
        part = shingles_S[start : start + _CHUNK]
        hashes_PS = a * part
        hashes_PS += b
        np.minimum(lowest_P, hashes_PS.min(1) >> np.uint64(16), out=lowest_P)
    mixed = mix(lowest_P + (np.arange(bands * rows, dtype=np.uint64) << np.uint64(48))).reshape(bands, rows)
    return mix(np.add.reduce(mixed * _powers(rows), axis=1))


def sketch(shingles_S: np.ndarray) -> np.ndarray:
    """Returns the SKETCH smallest shingles, cut to their high 32 bits: uint32[<= SKETCH], sorted, distinct."""
    return _distinct((shingles_S[: 2 * SKETCH] >> np.uint64(32)).astype(np.uint32))[:SKETCH]


def similarity(a: np.ndarray, b: np.ndarray) -> float:
    """Estimates the Jaccard similarity of two documents from their sketches."""
    both = np.concatenate([a, b])
    both.sort()
    same = both[1:] == both[:-1]
    if max(len(a), len(b)) < SKETCH:
        shared = int(same.sum())
        return shared / max(1, len(both) - shared)
    # Bottom-k (Cohen 1997): of the k smallest of the union, the share that both have.
    in_both = np.append(same, False)[np.append(True, ~same)][:SKETCH]
    return float(in_both.mean())
