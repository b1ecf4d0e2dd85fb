"""Packs texts that begin alike into rows in which each beginning stands once: the choices of a question, worked examples.

The texts are sorted, so that those which begin alike are neighbours, and laid into a row as one walks a tree: each text
adds only what it does not share with the one before it. A token is seen by the tokens that follow it in the row up to the
last one of its branch; `until` says where that ends (`kv_until_BxS` of `ops.attention.attention`). So the result is that of
each text alone, and the work is that of the tree.

Legend: B rows, T tokens of a row, M scored tokens of a row.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

Request = tuple[Sequence[int], Sequence[int]]  # (ids of the context, at least one; ids to score)


@dataclasses.dataclass
class Row:
    """One row: a tree of texts.

    Attributes:
      tokens, positions, until: of each token; see the module.
      sources: of each scored token, the index in the row of the token before it.
      targets: the scored tokens.
      spans: (number of the request, its first scored token among `targets`, one past its last).
    """

    tokens: list[int]
    positions: list[int]
    until: list[int]
    sources: list[int]
    targets: list[int]
    spans: list[tuple[int, int, int]]
    _path: list[int] = dataclasses.field(default_factory=list)  # index in the row of each token of the newest text

    @classmethod
    def empty(cls) -> "Row":
        return cls([], [], [], [], [], [])

    def add(self, number: int, ids: Sequence[int], shared: int, targets: Sequence[int]) -> None:
        """Adds a text, of which the first `shared` tokens are those of the text before it."""
        for index in self._path[shared:]:
            self.until[index] = len(self.tokens)
        del self._path[shared:]
        for position in range(shared, len(ids)):
            self._path.append(len(self.tokens))
            self.tokens.append(ids[position])
            self.positions.append(position)
            self.until.append(-1)
        first = len(self.targets)
        self.sources += self._path[len(ids) - len(targets) :] if targets else []
        self.targets += targets
        self.spans.append((number, first, len(self.targets)))

    def close(self) -> "Row":
        """Returns the row, in which every branch ends."""
        self.until = [len(self.tokens) if end < 0 else end for end in self.until]
        return self


def pack(requests: Sequence[Request], length: int) -> list[Row]:
    """Returns rows of at most `length` tokens that hold all requests.

    A request's inputs are its ids but the last, at most `length` of them. Requests with one context stay in one row where
    they fit.
    """
    inputs = [(*context, *scored[:-1]) for context, scored in requests]
    order = sorted(range(len(requests)), key=inputs.__getitem__)
    rows, row, before = [], Row.empty(), ()
    for place, number in enumerate(order):
        ids = inputs[number]
        shared = _shared(before, ids) if row.tokens else 0
        room = length - len(row.tokens)
        first_of_context = not place or requests[order[place - 1]][0] != requests[number][0]
        need = _size(requests, inputs, order, place, length) if first_of_context else len(ids)
        if len(ids) - shared > room or (first_of_context and room < need - shared and need <= length):
            rows.append(row.close())
            row, shared = Row.empty(), 0
        row.add(number, ids, shared, list(requests[number][1]))
        before = ids
    return [*rows, row.close()] if row.spans else rows


def _size(requests: Sequence[Request], inputs: list[tuple], order: list[int], place: int, length: int) -> int:
    """Returns the tokens of the tree of the requests from `place` on that have its context; past `length`, some above it."""
    context, before, size = requests[order[place]][0], (), 0
    for number in order[place:]:
        if requests[number][0] != context or size > length:
            break
        size += len(inputs[number]) - _shared(before, inputs[number])
        before = inputs[number]
    return size


def _shared(a: Sequence[int], b: Sequence[int]) -> int:
    """Returns with how many equal tokens two texts begin."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low


def batch(rows: Sequence[Row], count: int, length: int, scored: int) -> dict[str, np.ndarray]:
    """Returns rows as arrays [B, T] or [B, M], B = `count`, T = `length`, M = `scored`.

    They are `tokens`, `positions` and `until`, [B, T], and `sources` and `targets`, [B, M]. What fills them up sees itself
    alone.
    """
    arrays = {name: np.zeros((count, length), np.int32) for name in ("tokens", "positions")}
    arrays["until"] = np.tile(np.arange(1, length + 1, dtype=np.int32), (count, 1))
    arrays |= {name: np.zeros((count, scored), np.int32) for name in ("sources", "targets")}
    for place, row in enumerate(rows):
        for name, array in arrays.items():
            values = getattr(row, name)
            array[place, : len(values)] = values
    return arrays
