"""Decodes ids into bytes, many at a time."""

from collections.abc import Sequence

import numpy as np

_AT_ONCE = 1 << 16  # ids: each byte of theirs takes 24 bytes while it is decoded


class Decoder:
    """Joins the pieces of ids, given each id's bytes."""

    def __init__(self, pieces: Sequence[bytes]):
        self._lengths = np.array([len(piece) for piece in pieces])
        self._offsets = np.cumsum(self._lengths) - self._lengths
        self._bytes = np.frombuffer(b"".join(pieces), np.uint8)

    def __call__(self, ids_N: np.ndarray) -> tuple[bytes, np.ndarray]:
        """Returns (the bytes, how many of these the first 0, 1, ..., N ids give)."""
        lengths_N = self._lengths[ids_N]
        ends_N1 = np.concatenate([[0], np.cumsum(lengths_N)])
        raw_C = np.empty(ends_N1[-1], np.uint8)
        for first in range(0, len(ids_N), _AT_ONCE):
            part = slice(first, min(first + _AT_ONCE, len(ids_N)))
            begin, end = ends_N1[part.start], ends_N1[part.stop]
            index = np.repeat(self._offsets[ids_N[part]] - ends_N1[part], lengths_N[part]) + np.arange(begin, end)
            raw_C[begin:end] = self._bytes[index]
        return raw_C.tobytes(), ends_N1
