"""The external shuffle: the same order whatever the memory, everything once, nothing left behind."""

import itertools
import random

import pytest

from jaxlm.data.shards.build import Shuffle

DOCUMENTS = [(f"id{i}é", "text " * (i % 50) + str(i), i * 7919) for i in range(1500)]


def shuffled(path, memory_bytes, key="k", documents=DOCUMENTS):
    shuffle = Shuffle(path, key, memory_bytes)
    for document in documents:
        shuffle.add(*document)
    assert len(shuffle) == len(documents)
    once, again = list(shuffle), list(shuffle)
    assert once == again
    return shuffle, [(doc_id, raw.decode(), content) for doc_id, raw, content in once]


@pytest.mark.parametrize("memory_bytes", [1 << 30, 100_000, 2_000])
def test_the_order_does_not_depend_on_the_memory(tmp_path, memory_bytes):
    shuffle, order = shuffled(tmp_path / "s", memory_bytes)
    assert sorted(order) == sorted(DOCUMENTS)
    assert order == shuffled(tmp_path / "whole", 1 << 30)[1]
    assert (tmp_path / "s").exists() == (memory_bytes < 1 << 20)
    shuffle.close()
    assert not (tmp_path / "s").exists()


def test_it_shuffles_and_the_key_matters(tmp_path):
    one, two = (shuffled(tmp_path / key, 1 << 30, key)[1] for key in "ab")
    assert one != two
    places = [content // 7919 for _, _, content in one]
    mean = sum(abs(place - i) for i, place in enumerate(places)) / len(places)
    assert mean == pytest.approx(len(places) / 3, rel=0.05)  # as of a random permutation
    descents = sum(a > b for a, b in itertools.pairwise(places))
    assert descents == pytest.approx(len(places) / 2, rel=0.05)


def test_an_abandoned_iteration_leaves_the_next_one_whole(tmp_path):
    shuffle, order = shuffled(tmp_path / "s", 2_000)
    for _ in range(3):
        iterator = iter(shuffle)
        for _ in range(random.Random(0).randint(1, 500)):
            next(iterator)
        iterator.close()
    assert [(a, b.decode(), c) for a, b, c in shuffle] == order
