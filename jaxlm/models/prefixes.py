"""Keeps the keys and values of how prompts begin, so that a system prompt is read once, and a chat's turns but once each."""

import collections
import hashlib
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
        keys = self._keys(ids)
        count = next((n for n, key in enumerate(keys) if key not in self._kept), len(keys))
        self._use(keys[:count])
        self.hits += count * self._chunk
        return [self._kept[key] for key in keys[:count]]

    def keep(self, ids: np.ndarray, chunk: typing.Callable[[], typing.Any]) -> None:
        """Keeps the last chunk of `ids`, made only if it is new."""
        keys = self._keys(ids)
        if self._most <= 0 or keys[-1] in self._kept:
            return
        self._kept[keys[-1]] = made = chunk()
        self.size += _bytes(made)
        self._use(keys)
        while self.size > self._most:
            self.size -= _bytes(self._kept.popitem(last=False)[1])

    def _keys(self, ids: np.ndarray) -> list[bytes]:
        """A hash for each whole chunk, of all ids up to its end."""
        so_far, keys = hashlib.sha256(), []
        for end in range(self._chunk, len(ids) + 1, self._chunk):
            so_far.update(ids[end - self._chunk : end].tobytes())
            keys.append(so_far.digest())
        return keys

    def _use(self, keys: list[bytes]) -> None:
        """Marks chunks as used, the first one last: without it the others would be of no use."""
        for key in reversed(keys):
            if key in self._kept:
                self._kept.move_to_end(key)


def _bytes(chunk: typing.Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(chunk))
