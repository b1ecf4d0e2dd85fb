"""What a model wrote, found in the training data: beside a search of every place, and over the ends of pieces."""

import time

import numpy as np
import pytest
import tiny_data

from jaxlm.data.shards import overlap


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return tiny_data.make(tmp_path_factory.mktemp("data"), {"a": 0.5, "b": 0.5})


def everywhere(stream: np.ndarray, text: np.ndarray) -> list[int]:
    """The longest run from each token on, by trying all places."""
    found = []
    for start in range(len(text)):
        longest = 0
        for place in range(len(stream)):
            n = 0
            while start + n < len(text) and place + n < len(stream) and text[start + n] == stream[place + n]:
                n += 1
            longest = max(longest, n)
        found.append(longest if longest >= overlap.SEED else 0)
    return found


def test_runs_are_those_of_a_search_of_every_place(data, monkeypatch):
    monkeypatch.setattr(overlap, "_CHUNK", 100)
    rng, streams = np.random.default_rng(0), {name: data.stream(name) for name in data.sources}
    first, second = (streams[name].read(0, streams[name].tokens) for name in data.sources)
    planted = rng.integers(5, data.vocab_size, 60)
    planted[5:35], planted[40:49] = first[85:115], second[200:209]
    texts = [planted, first[50:90], np.full(30, first[7]), rng.integers(5, data.vocab_size, 40), [], first[:7]]
    found, told = overlap.runs(data, texts), []
    whole = np.concatenate([first, [-1], second])
    assert [of_text.tolist() for of_text in found] == [everywhere(whole, np.asarray(text)) for text in texts]
    assert (overlap.longest(found[0]), overlap.longest(found[1])) == (30, 40)
    assert overlap.share(found[0], 13) == pytest.approx(30 / 60)
    assert overlap.share(found[0], 8) == pytest.approx(39 / 60)
    assert [overlap.longest(found[number]) for number in (3, 4, 5)] == [0, 0, 0]
    assert overlap.share(found[4], 13) == 0.0
    overlap.runs(data, texts, 0, told.append)
    assert told == sorted(told)
    assert told[-1] == sum(data.token_counts().values())


def test_a_shorter_run_takes_no_longer_one_away():
    """The second piece holds the end of another text right behind nine of the first one's tokens."""
    texts = [np.arange(20), np.concatenate([np.arange(9), np.arange(50, 70)])]
    found = overlap.Found(texts)
    found.look(texts[0][:15])
    found.look(texts[1])
    assert found.runs[0][0] == 15
    assert found.runs[1][0] == 29


def test_a_part_of_the_data_is_searched_where_all_is_too_much(data):
    stream = data.stream("a")
    ends = [stream.read(0, 30), stream.read(stream.tokens - 30, stream.tokens)]
    assert [overlap.longest(found) for found in overlap.runs(data, ends)] == [30, 30]
    part = overlap.runs(data, ends, sum(data.token_counts().values()) // 2)
    assert overlap.longest(part[0]) == 30 > overlap.longest(part[1])


def test_a_stretch_of_equal_tokens_is_compared_once():
    """A model that knows little repeats one token, and data hold long rows of dashes: 100,000 took a minute."""
    began = time.monotonic()
    found = overlap.Found([np.full(64, 7)] * 40)
    found.look(np.full(100_000, 7))
    assert all(of_text.tolist() == [*range(64, overlap.SEED - 1, -1), *[0] * 7] for of_text in found.runs)
    assert time.monotonic() - began < 10
