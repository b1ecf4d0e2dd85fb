"""The cache of how prompts begin: what it finds, what it drops, and that long prompts cost it little."""

import time

import numpy as np

from jaxlm.models.prefixes import Prefixes

IDS = np.arange(40, dtype=np.int32)


def filled(most_bytes: int, *prompts: np.ndarray) -> Prefixes:
    """A cache of chunks of 8 ids, each with 100 bytes that begin with the number of its last id."""
    kept = Prefixes(most_bytes, 8)
    for ids in prompts:
        for end in range(8, len(ids) + 1, 8):
            kept.keep(ids[:end], lambda last=ids[end - 1]: np.full(100, last, np.uint8))
    return kept


def test_it_finds_the_chunks_with_which_a_prompt_begins():
    kept = filled(10_000, IDS)
    assert [chunk[0] for chunk in kept.find(IDS[:30])] == [7, 15, 23]
    assert kept.hits == 24
    other = IDS.copy()
    other[9] += 1
    assert [chunk[0] for chunk in kept.find(other)] == [7]
    assert kept.find(IDS[8:]) == []  # the same ids elsewhere are other keys and values
    assert kept.find(IDS[:7]) == []


def test_the_longest_unused_go_and_the_end_of_a_prompt_before_its_beginning():
    kept = filled(550, IDS)
    assert kept.size == 500
    kept.find(IDS[:16])
    kept.keep(IDS[:8][::-1], lambda: np.zeros(100, np.uint8))
    assert kept.size == 500
    assert len(kept.find(IDS)) == 4
    assert filled(50, IDS).size == 0  # one chunk alone is too much
    assert filled(0, IDS).size == 0


def test_a_long_prompt_costs_little():
    ids, began = np.arange(2**17, dtype=np.int32), time.perf_counter()
    kept = Prefixes(2**30, 256)
    for end in range(256, len(ids) + 1, 256):
        kept.keep(ids[:end], lambda: np.zeros(1, np.uint8))
    assert len(kept.find(ids)) == 512
    assert time.perf_counter() - began < 10
