"""Items read ahead come in order, whoever is fast; nothing waits for what hangs. (Batches: test_loader.py)"""

import queue
import random
import threading
import time

import grain
import pytest

from jaxlm.data.batches.loader import Ahead


class Source:
    """Item i is i, after a random pause; fails at `bad`, and waits for ever at those for which `hangs` is true."""

    def __init__(self, bad=None, hangs=lambda i: False):
        self.bad, self.hangs, self.asked = bad, hangs, []

    def __len__(self):
        return 1 << 62

    def __getitem__(self, i):
        self.asked.append(i)
        time.sleep(random.Random(i).random() / 500)
        if i == self.bad:
            raise OSError(f"item {i}")
        while self.hangs(i):
            time.sleep(0.01)
        return i


def ahead(source, start, num_threads, prefetch):
    return Ahead(grain.MapDataset.source(source), start, num_threads, prefetch)


def take(items, n):
    return [items.get(5) for _ in range(n)]


@pytest.mark.parametrize(("num_threads", "prefetch"), [(1, 1), (3, 1), (3, 10), (8, 2)])
def test_items_come_in_order_and_not_too_many_ahead(num_threads, prefetch):
    items = ahead(source := Source(), 37, num_threads, prefetch)
    assert take(items, 50) == list(range(37, 87))
    time.sleep(0.05)
    lane = -(-prefetch // num_threads)
    assert len(source.asked) <= 50 + num_threads * (lane + 1)  # what is ahead, and one in hand for each thread
    items.close()


def test_an_error_comes_in_its_place_and_nothing_of_its_lane_is_asked_for_again():
    items = ahead(source := Source(bad=7), 0, 3, 6)
    assert take(items, 7) == list(range(7))
    with pytest.raises(OSError, match="item 7"):
        items.get(5)
    time.sleep(0.05)
    assert not {10, 13} & set(source.asked)
    items.close()


def test_a_lane_that_hangs_costs_the_timeout_and_close_a_second():
    never = threading.Event()
    items = ahead(Source(hangs=lambda i: i % 2 and not never.is_set()), 0, 2, 4)
    assert items.get(5) == 0
    with pytest.raises(queue.Empty):
        items.get(0.05)
    began = time.monotonic()
    items.close()
    assert 0.9 < time.monotonic() - began < 3
    never.set()
