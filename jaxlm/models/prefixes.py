"""Keeps the keys and values of how prompts begin, so that a system prompt is read once, and a chat's turns but once each."""

import collections
import typing

import jax
import numpy as np


class Prefixes:
    """Chunks by all the ids up to their end, at most so many bytes of them; the longest unused go first.

    Attributes:
      hits: how many tokens were found.
      size: bytes held.
    """

    def __init__(self, most_bytes: int, chunk: int):
        self._most, self._chunk = most_bytes, chunk
        self._kept: collections.OrderedDict[bytes, typing.Any] = collections.OrderedDict()
        self.hits = self.size = 0

    def find(self, ids: np.ndarray) -> list[typing.Any]:
        """Returns the chunks with which `ids` begin, as many in a row as there are."""
        found = []
        for end in range(self._chunk, len(ids) + 1, self._chunk):
            key = ids[:end].tobytes()
            if key not in self._kept:
                break
            found.append(self._kept[key])
        self._use(ids[: len(found) * self._chunk])
        self.hits += len(found) * self._chunk
        return found

    def keep(self, ids: np.ndarray, chunk: typing.Callable[[], typing.Any]) -> None:
        """Keeps the last chunk of `ids`, made only if it is new."""
        key = ids.tobytes()
        if self._most <= 0 or key in self._kept:
            return
        self._kept[key] = made = chunk()
        self.size += _bytes(key, made)
        self._use(ids)
        while self.size > self._most:
            self.size -= _bytes(*self._kept.popitem(last=False))

    def _use(self, ids: np.ndarray) -> None:
        """Marks all chunks of `ids` as used, the first one last: without it the others would be of no use."""
        for end in range(len(ids), 0, -self._chunk):
            if (key := ids[:end].tobytes()) in self._kept:
                self._kept.move_to_end(key)


def _bytes(key: bytes, chunk: typing.Any) -> int:
    return len(key) + sum(leaf.nbytes for leaf in jax.tree.leaves(chunk))
