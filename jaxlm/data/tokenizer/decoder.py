"""Decodes ids into bytes, many at a time."""

from collections.abc import Sequence

import numpy as np


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
        index = np.repeat(self._offsets[ids_N] - ends_N1[:-1], lengths_N) + np.arange(ends_N1[-1])
        return self._bytes[index].tobytes(), ends_N1
