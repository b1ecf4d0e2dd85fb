"""Decides which examples are in which row of which batch, from their lengths alone.

The order is permuted for each epoch. An example goes into the first row with room; one that fits in none begins the
next batch. Pieces of pretraining text between them are a fixed share of the targets that count.
"""

import dataclasses
import functools
import threading
import typing

import numpy as np

from jaxlm.data.batches.rows import permute

_EPOCHS = 4  # whose orders are remembered
_TOKENS_A_PAIR = 64


def pairs_in_row(seq_len: int) -> int:
    return max(1, seq_len // _TOKENS_A_PAIR)


class Item(typing.NamedTuple):
    """The example of this number, or the `number`-th piece of pretraining text of the run (`replay`)."""

    number: int
    replay: bool = False


class _At(typing.NamedTuple):
    """Where a batch begins: how many examples and pieces came before, and how many targets of these examples count."""

    examples: int = 0
    pieces: int = 0
    counted: int = 0


@dataclasses.dataclass(frozen=True)
class Replay:
    """How much pretraining text is between the examples."""

    share: float  # of all targets that count, below 1
    tokens: int  # of each piece; all its targets count


class Plan:
    """The map from steps to rows of examples.

    `lengths`: tokens of a row that each takes; `counted`: its targets that count; `most`: examples in a row, 0 for any
    number.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        counted: np.ndarray,
        *,
        seed: int,
        seq_len: int,
        batch_size: int,
        most: int = 0,
        replay: Replay | None = None,
    ):
        self._lengths, self._counted, self._seed = lengths.tolist(), counted.tolist(), seed
        self._seq_len, self.batch_size, self._most, self._replay = seq_len, batch_size, most or seq_len, replay
        # Where a batch begins follows from all batches before it. The loader's threads ask for several at once.
        self._begins, self._lock = [_At()], threading.Lock()
        self._order = functools.lru_cache(maxsize=_EPOCHS)(self._order)

    def rows(self, batch: int) -> list[list[Item]]:
        """Returns what is in each row of a batch, which counts from 0. The first time it plans all batches before it."""
        return self._fill(self._begin(batch))[0]

    def used(self, batches: int) -> tuple[int, int]:
        """Returns (examples, pieces of pretraining text) in the first batches, those that came again counted again."""
        return self._begin(batches)[:2]

    def _begin(self, batch: int) -> _At:
        with self._lock:
            while len(self._begins) <= batch:
                self._begins.append(self._fill(self._begins[-1])[1])
            return self._begins[batch]

    def _fill(self, at: _At) -> tuple[list[list[Item]], _At]:
        """(the rows of the batch that begins at a place, where the next one begins)."""
        examples, pieces, counted = at
        rows: list[list[Item]] = [[] for _ in range(self.batch_size)]
        room = [self._seq_len] * self.batch_size
        slots = [self._most] * self.batch_size
        while True:
            item = self._next(examples, pieces, counted)
            length = self._replay.tokens if item.replay else self._lengths[item.number]
            row = _place(length, room, slots)
            if (
                row is None
            ):  # what did not fit begins the next batch: nothing overtakes it, so no example waits for ever
                return rows, _At(examples, pieces, counted)
            rows[row].append(item)
            if item.replay:
                pieces += 1
            else:
                examples, counted = examples + 1, counted + self._counted[item.number]

    def _next(self, examples: int, pieces: int, counted: int) -> Item:
        """The next example or, as soon as too few targets are of replay, the next piece."""
        replay = self._replay
        # With p pieces of t tokens and c targets of examples, replay has its share where p * t = share * (p * t + c).
        if replay and pieces * replay.tokens * (1 - replay.share) < replay.share * counted:
            return Item(pieces, replay=True)
        epoch, position = divmod(examples, len(self._lengths))
        return Item(int(self._order(epoch)[position]))

    def _order(self, epoch: int) -> np.ndarray:
        n = len(self._lengths)
        return permute(np.arange(n, dtype=np.int64), n, f"{self._seed}/examples/{epoch}")


def once(lengths: np.ndarray, *, seq_len: int, batch_size: int, most: int = 0) -> list[list[list[Item]]]:
    """Returns the rows of batches that hold each example once, in order; the last one may be in part empty."""
    batches: list[list[list[Item]]] = []
    room: list[int] = []
    slots: list[int] = []
    for number, length in enumerate(lengths.tolist()):
        row = _place(length, room, slots)
        if row is None:
            batches.append([[] for _ in range(batch_size)])
            room, slots = [seq_len] * batch_size, [most or seq_len] * batch_size
            row = _place(length, room, slots)
        batches[-1][row].append(Item(number))
    return batches


def _place(length: int, room: list[int], slots: list[int]) -> int | None:
    """The first row with room for `length` tokens, which are taken from it; None if there is none."""
    row = next((r for r, left in enumerate(room) if left >= length and slots[r]), None)
    if row is not None:
        room[row] -= length
        slots[row] -= 1
    return row
