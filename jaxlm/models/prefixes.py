"""Knows which chunks of keys and values are kept of how prompts begin, so that a system prompt is read once, and a chat's
turns but once each.
"""

import collections
import hashlib

import numpy as np


class Prefixes:
    """Gives each chunk a place, by all the ids up to its end; of more chunks than places the longest unused go first.

    Args:
      places: how many chunks can be kept.
      chunk: ids of a chunk.

    Attributes:
      hits: how many tokens were found.
    """

    def __init__(self, places: int, chunk: int):
        self._chunk, self._free = chunk, list(range(places))[::-1]
        self._kept: collections.OrderedDict[bytes, int] = collections.OrderedDict()
        self.hits = 0

    def find(self, ids: np.ndarray) -> list[int]:
        """Returns the places of the chunks with which `ids` begin, as many in a row as are kept."""
        keys = self._keys(ids)
        count = next((n for n, key in enumerate(keys) if key not in self._kept), len(keys))
        self._use(keys[:count])
        self.hits += count * self._chunk
        return [self._kept[key] for key in keys[:count]]

    def place(self, ids: np.ndarray) -> int | None:
        """Returns where to keep the last chunk of `ids`; None if it is kept already, or nothing is."""
        keys = self._keys(ids)
        if keys[-1] in self._kept or not (self._free or self._kept):
            return None
        place = self._free.pop() if self._free else self._kept.popitem(last=False)[1]
        self._kept[keys[-1]] = place
        self._use(keys)
        return place

    def clear(self) -> None:
        """Forgets all chunks."""
        self._free += self._kept.values()
        self._kept.clear()

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
