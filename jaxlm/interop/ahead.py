"""Reads the next leaf in a thread while the one before is worked on."""

from collections.abc import Callable, Sequence
from concurrent import futures

import numpy as np


class Ahead:
    """Reads leaves in a known order, one ahead. Call it with a name, as the function it wraps.

    Args:
      read: leaf -> its value.
      names: the leaves in the order in which they will be asked for. Any other is read at once.
    """

    def __init__(self, read: Callable[[str], np.ndarray], names: Sequence[str]):
        self._read, self._names, self._at = read, list(names), 0
        self._pool = futures.ThreadPoolExecutor(1)
        self._next: futures.Future | None = None

    def __enter__(self) -> "Ahead":
        return self

    def __exit__(self, *exc: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def __call__(self, name: str) -> np.ndarray:
        if self._at >= len(self._names) or self._names[self._at] != name:
            return self._read(name)
        value = self._next.result() if self._next else self._read(name)
        self._at += 1
        more = self._at < len(self._names)
        self._next = self._pool.submit(self._read, self._names[self._at]) if more else None
        return value
