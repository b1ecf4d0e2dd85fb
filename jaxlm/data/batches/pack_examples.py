"""Packs chats, pairs and answers into rows, and finds the first row with room. Documents: `document_rows`."""

import typing
from collections.abc import Sequence

import numpy as np

from jaxlm.config import ConfigError

_TOKENS_A_PAIR = 64  # shapes are static: arrays by pair have a slot for each pair that a row may hold


def pairs_in_row(seq_len: int) -> int:
    return max(1, seq_len // _TOKENS_A_PAIR)


class Segment(typing.NamedTuple):
    """A text to be packed."""

    ids: Sequence[int]
    weights: Sequence[float]  # of each token but the first, as a target


def pack(rows: Sequence[Sequence[Segment]], seq_len: int) -> dict[str, np.ndarray]:
    """Returns a batch with the texts of each row, one after the other. Padding is a row's last segment.

    Raises ConfigError if the texts of a row are longer than it is, or a text has one token.
    """
    integers = ("tokens", "targets", "segment_ids", "positions")
    batch = {name: np.zeros((len(rows), seq_len), np.int32) for name in integers}
    batch["weights"] = np.zeros((len(rows), seq_len), np.float32)
    for row, segments in enumerate(rows):
        _check(segments, seq_len)
        start = 0
        for number, segment in enumerate(segments, start=1):
            # The last token is no input, for no target follows it. So a text takes one token less than it has.
            inside = slice(start, start + len(segment.ids) - 1)
            batch["tokens"][row, inside] = segment.ids[:-1]
            batch["targets"][row, inside] = segment.ids[1:]
            batch["segment_ids"][row, inside] = number
            batch["positions"][row, inside] = np.arange(len(segment.ids) - 1)
            batch["weights"][row, inside] = segment.weights
            start = inside.stop
        # What is left of a row is a segment of its own, since attention needs a key for each query; its weights are 0.
        batch["segment_ids"][row, start:] = len(segments) + 1
        batch["positions"][row, start:] = np.arange(seq_len - start)
    return batch


def _check(segments: Sequence[Segment], seq_len: int) -> None:
    for segment in segments:
        if len(segment.ids) < 2 or len(segment.weights) != len(segment.ids) - 1:
            text = f"a text of {len(segment.ids)} tokens with {len(segment.weights)} weights can't be packed"
            raise ConfigError(f"{text}: it needs two tokens or more, and a weight for each but the first")
    if (length := sum(len(segment.ids) - 1 for segment in segments)) > seq_len:
        raise ConfigError(f"a group of {length:,} tokens exceeds train.seq_len={seq_len:,}: shorten it, or raise that")


def first_fit(length: int, room: list[int], slots: list[int]) -> int | None:
    """Takes room for `length` tokens, and one slot, in the first row with enough of both.

    Returns the row's index; None if no row has enough.
    """
    row = next((r for r, left in enumerate(room) if left >= length and slots[r]), None)
    if row is not None:
        room[row] -= length
        slots[row] -= 1
    return row
