"""Packs chats, pairs and answers into rows: each group into the first row with room. Documents: `document_rows`."""

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


def pack(groups: Sequence[Sequence[Segment]], seq_len: int, rows: int) -> tuple[dict[str, np.ndarray], list[int]]:
    """Packs groups of texts into one batch. Returns (batch, the row of each group that fitted).

    A group goes to the first row with room, so that no microbatch splits it. The first group that fits in no row ends
    the batch. Padding is the last segment. Raises ConfigError if a group is longer than a row, or a text has one token.
    """
    integers = ("tokens", "targets", "segment_ids", "positions")
    batch = {name: np.zeros((rows, seq_len), np.int32) for name in integers}
    batch["weights"] = np.zeros((rows, seq_len), np.float32)
    room, segments, placed = [seq_len] * rows, [0] * rows, []
    for group in groups:
        length = _group_length(group, seq_len)
        row = first_fit(length, room)
        if row is None:
            break
        start = seq_len - room[row] - length
        for segment in group:
            segments[row] += 1
            # The last token is no input, for no target follows it. So a text takes one token less than it has.
            inside = slice(start, start + len(segment.ids) - 1)
            batch["tokens"][row, inside] = segment.ids[:-1]
            batch["targets"][row, inside] = segment.ids[1:]
            batch["segment_ids"][row, inside] = segments[row]
            batch["positions"][row, inside] = np.arange(len(segment.ids) - 1)
            batch["weights"][row, inside] = segment.weights
            start = inside.stop
        placed.append(row)
    # What is left of a row is a segment of its own, since attention needs a key for each query; its weights are 0.
    for row, left in enumerate(room):
        batch["segment_ids"][row, seq_len - left :] = segments[row] + 1
        batch["positions"][row, seq_len - left :] = np.arange(left)
    return batch, placed


def _group_length(group: Sequence[Segment], seq_len: int) -> int:
    """Returns how many tokens of a row a group takes. Raises ConfigError if it can't be packed."""
    for segment in group:
        if len(segment.ids) < 2 or len(segment.weights) != len(segment.ids) - 1:
            raise ConfigError(
                f"a text of {len(segment.ids)} tokens with {len(segment.weights)} weights can't be packed: it needs two "
                "tokens or more, and a weight for each but the first"
            )
    length = sum(len(segment.ids) - 1 for segment in group)
    if length > seq_len:
        raise ConfigError(
            f"a group of {length:,} tokens exceeds train.seq_len={seq_len:,}: shorten it, or raise train.seq_len"
        )
    return length


def first_fit(length: int, room: list[int], slots: list[int] | None = None) -> int | None:
    """Takes room for `length` tokens, and one slot if `slots` is given, in the first row with enough of both.

    Returns the row's index; None if no row has enough.
    """
    row = next((r for r, left in enumerate(room) if left >= length and (slots is None or slots[r])), None)
    if row is not None:
        room[row] -= length
        if slots is not None:
            slots[row] -= 1
    return row
