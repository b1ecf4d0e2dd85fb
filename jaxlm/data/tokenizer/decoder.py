"""Decodes ids into bytes, many at a time."""

from collections.abc import Sequence

import numpy as np

_AT_ONCE = 1 << 14  # ids, so that what is computed of them stays in the processor's cache: 1.5 times as fast


class Decoder:
    """Joins the pieces of ids, given each id's bytes."""

    def __init__(self, pieces: Sequence[bytes]):
        self._lengths = np.array([len(piece) for piece in pieces])
        self._offsets = np.cumsum(self._lengths) - self._lengths
        self._bytes = np.frombuffer(b"".join(pieces), np.uint8)

    def __call__(self, ids_N: np.ndarray) -> tuple[bytes, np.ndarray]:
        """Returns (the bytes, how many of these the first 0, 1, ..., N ids give)."""
        lengths_N = self._lengths[ids_N]
        parts = (slice(at, at + _AT_ONCE) for at in range(0, len(ids_N), _AT_ONCE))
        raw = b"".join(self._joined(ids_N[part], lengths_N[part]) for part in parts)
        return raw, np.concatenate([[0], np.cumsum(lengths_N)])

    def _joined(self, ids_N: np.ndarray, lengths_N: np.ndarray) -> bytes:
        ends_N = np.cumsum(lengths_N)
        index = np.repeat(self._offsets[ids_N] - ends_N + lengths_N, lengths_N) + np.arange(ends_N[-1])
        return self._bytes[index].tobytes()
