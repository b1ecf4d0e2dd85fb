"""The cache of how prompts begin: what it finds, what it drops, and that long prompts cost it little."""

import time

import numpy as np

from jaxlm.models.decode.engine import Prefixes

IDS = np.arange(40, dtype=np.int32)


def filled(places: int, *prompts: np.ndarray) -> Prefixes:
    """A cache of chunks of 8 ids, in which all chunks of some prompts were kept, one after the other."""
    kept = Prefixes(places, 8)
    for ids in prompts:
        for end in range(8, len(ids) + 1, 8):
            kept.place(ids[:end])
    return kept


def test_it_finds_the_chunks_with_which_a_prompt_begins():
    kept = filled(100, IDS)
    assert kept.find(IDS[:30]) == [0, 1, 2]
    assert kept.hits == 24
    other = IDS.copy()
    other[9] += 1
    assert kept.find(other) == [0]
    assert kept.place(other[:16]) == 5
    assert kept.find(other) == [0, 5]
    assert kept.find(IDS[8:]) == []  # the same ids elsewhere are other keys and values
    assert kept.find(IDS[:7]) == []
    assert kept.place(IDS[:16]) is None  # it is there


def test_the_longest_unused_go_and_the_end_of_a_prompt_before_its_beginning():
    kept = filled(5, IDS)
    kept.find(IDS[:16])
    assert kept.place(IDS[:8][::-1].copy()) == 4  # where the prompt's last chunk was
    assert kept.find(IDS) == [0, 1, 2, 3]
    assert filled(0, IDS).find(IDS) == []
    assert filled(0).place(IDS) is None


def test_what_is_cleared_is_found_no_more_and_leaves_its_places():
    kept = filled(5, IDS)
    kept.clear()
    assert kept.find(IDS) == []
    assert sorted(kept.place(IDS[:end]) for end in range(8, 41, 8)) == [0, 1, 2, 3, 4]
    assert len(kept.find(IDS)) == 5


def test_a_long_prompt_costs_little():
    ids, began = np.arange(2**17, dtype=np.int32), time.perf_counter()
    kept = Prefixes(1000, 256)
    for end in range(256, len(ids) + 1, 256):
        kept.place(ids[:end])
    assert len(kept.find(ids)) == 512
    assert time.perf_counter() - began < 10
