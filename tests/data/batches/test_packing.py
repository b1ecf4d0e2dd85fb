"""Which example is in which row: as `rows.pack` does it, each once an epoch, and the same in whatever order it is asked."""

import itertools

import numpy as np
import pytest

from jaxlm.data.batches import packed, rows

RNG = np.random.default_rng(0)
LENGTHS = RNG.integers(2, 33, 50)
COUNTED = LENGTHS // 2
SIZES = {"seed": 3, "seq_len": 32, "batch_size": 4}


def plan(**changes) -> packed.Plan:
    return packed.Plan(LENGTHS, COUNTED, **SIZES | changes)


def items(planned) -> list[packed.Item]:
    return list(itertools.chain.from_iterable(planned))


def test_rows_are_those_of_pack():
    """Example by example, on batches until all were in twice."""
    made, stream = plan(), []
    for epoch in range(3):
        stream += rows.permute(np.arange(50), 50, f"3/examples/{epoch}").tolist()
    at = 0
    for batch in range(20):
        rest = [[rows.Segment([0] * (LENGTHS[i] + 1), [0.0] * LENGTHS[i])] for i in stream[at:]]
        _, placed = rows.pack(rest, 32, 4)
        want = [[stream[at + n] for n, row in enumerate(placed) if row == r] for r in range(4)]
        assert [[item.number for item in row] for row in made.rows(batch)] == want
        at += len(placed)
        assert made.used(batch + 1) == (at, 0)
    assert at > 100


def test_each_epoch_has_every_example_once():
    made, seen = plan(), np.zeros(50, int)
    for batch in range(40):
        for item in items(made.rows(batch)):
            seen[item.number] += 1
        epoch = made.used(batch + 1)[0] // 50
        assert seen.min() >= epoch
        assert seen.max() <= epoch + 1
    assert plan(seed=4).rows(0) != made.rows(0)


def test_the_order_of_asking_is_no_matter():
    made = [plan().rows(batch) for batch in range(6)]  # each from a new plan
    later = plan()
    assert [later.rows(batch) for batch in (5, 0, 3)] == [made[5], made[0], made[3]]


def test_a_row_has_at_most_so_many():
    short = packed.Plan(np.full(50, 2), np.full(50, 1), **SIZES, most=3)
    assert [len(row) for row in short.rows(0)] == [3] * 4
    assert [len(row) for row in packed.Plan(np.full(50, 2), np.full(50, 1), **SIZES).rows(0)] == [16] * 4


@pytest.mark.parametrize("share", [0.05, 0.3])
def test_replay_is_its_share_of_what_counts(share):
    """After every batch, to the tokens of a piece."""
    replay = packed.Replay(share, 20)
    made, counted, replayed, numbers = plan(replay=replay), 0, 0, []
    for batch in range(60):
        found = items(made.rows(batch))
        numbers += sorted(item.number for item in found if item.replay)
        replayed += 20 * sum(item.replay for item in found)
        counted += sum(COUNTED[item.number] for item in found if not item.replay)
        assert abs(replayed - share * (replayed + counted)) <= 20
    assert numbers == list(range(len(numbers)))  # each piece once, one behind the other
    assert len(numbers) > 5
    assert made.used(60)[1] == len(numbers)


def test_once_has_each_in_order():
    found = packed.once(LENGTHS, seq_len=32, batch_size=4)
    assert sorted(item.number for planned in found for item in items(planned)) == list(range(50))
    assert all(len(planned) == 4 for planned in found)
    assert max(sum(LENGTHS[item.number] for item in row) for planned in found for row in planned) <= 32
    assert [max(item.number for item in items(planned)) for planned in found] == sorted(
        max(item.number for item in items(planned)) for planned in found
    )
    assert packed.once(LENGTHS[:0], seq_len=32, batch_size=4) == []
