"""Pairs of answers for tests: packed by hand, from random ids or from the real transcripts beside the checkout."""

import gzip
import json
import pathlib
import zlib

import jax.numpy as jnp
import numpy as np

from jaxlm.data.batches import pack_examples

HH = pathlib.Path(__file__).resolve().parents[2] / "shared" / "data" / "posttrain" / "hh_harmless_test.jsonl.gz"
TURN, OTHER = "\n\nAssistant:", "\n\nHuman:"


def segment(prompt: list[int], answer: list[int], closed: bool = False) -> pack_examples.Segment:
    """A prompt of weight 0 and an answer of weight 1; `closed` by one more target of weight 0, as reward models need."""
    weights = [0.0] * (len(prompt) - 1) + [1.0] * len(answer) + [0.0] * closed
    return pack_examples.Segment([*prompt, *answer, *[0] * closed], weights)


def pack(groups, seq_len: int, row_count: int) -> tuple[dict, list[int]]:
    """(a batch with each group in the first row with room, the row of each); ends with the first group without room."""
    room, slots = [seq_len] * row_count, [len(groups)] * row_count
    rows, placed = [[] for _ in range(row_count)], []
    for group in groups:
        row = pack_examples.first_fit(sum(len(one.ids) - 1 for one in group), room, slots)
        if row is None:
            break
        rows[row] += group
        placed.append(row)
    return pack_examples.pack(rows, seq_len), placed


def random_pairs(count: int, vocab_size: int, longest: int, seed: int = 0) -> list[tuple[list, list, list]]:
    """(prompt, chosen, rejected) ids, at most `longest` a side in all; every prompt begins with 0, the separator."""
    rng = np.random.default_rng(seed)

    def ids(least: int) -> list[int]:
        return rng.integers(1, vocab_size, rng.integers(least, longest // 2 + 1)).tolist()

    return [([0, *ids(1)[1:]], ids(1), ids(1)) for _ in range(count)]


def batch(pairs, seq_len: int, row_count: int, margins=None, closed=False, room: int = 0, apart=False) -> dict:
    """All pairs packed into rows of at most `room` pairs; they must fit. `apart`: each in a row of its own."""
    room = room or max(1, seq_len // 64)
    groups = [[segment(prompt, side, closed) for side in (chosen, rejected)] for prompt, chosen, rejected in pairs]
    packed, placed = pack(groups, seq_len, row_count)
    if apart:
        packed, placed = pack_examples.pack(groups, seq_len), range(len(groups))
    assert len(placed) == len(pairs), f"{len(placed)} of {len(pairs)} pairs fit"
    packed["pair"], packed["margin"] = (np.zeros((row_count, room), np.float32) for _ in range(2))
    for row, margin in zip(placed, [0.0] * len(pairs) if margins is None else margins, strict=True):
        at = int(packed["pair"][row].sum())
        packed["pair"][row, at], packed["margin"][row, at] = 1, margin
    return {name: jnp.asarray(x) for name, x in packed.items()}


def hh(count: int, longest: int) -> list[tuple[str, str, str]]:
    """The first (prompt, chosen, rejected) of the real transcripts with at most `longest` words a side."""
    found = []
    with gzip.open(HH, "rt", encoding="utf-8") as file:
        for line in file:
            chosen, rejected = (json.loads(line)[name] for name in ("chosen", "rejected"))
            cut = chosen.rindex(TURN) + len(TURN)
            answers = [text[cut:] for text in (chosen, rejected)]
            whole = chosen[:cut] == rejected[:cut] and all(a and OTHER not in a for a in answers)
            short = max(len(text.split()) for text in (chosen, rejected)) <= longest
            if whole and short and answers[0] != answers[1]:
                found.append((chosen[:cut], *answers))
            if len(found) == count:
                break
    return found


def words(text: str, vocab_size: int) -> list[int]:
    """Ids of a text, from 3 on: a word is one token, by its hash. So a row is short, and its text still real."""
    return [3 + zlib.crc32(word.encode()) % (vocab_size - 3) for word in text.split()]


def hh_ids(count: int, longest: int, vocab_size: int) -> list[tuple[list, list, list]]:
    """`hh` as ids: the separator (0) in front, the end token (2) behind each answer."""
    found = [[words(text, vocab_size) for text in texts] for texts in hh(count, longest)]
    return [([0, *p], [*c, 2], [*r, 2]) for p, c, r in found]
