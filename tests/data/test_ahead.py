"""Items made ahead come in order, whoever is fast; nothing waits for what hangs. (Workers: test_loader.py)"""

import itertools
import queue
import random
import threading
import time

import pytest

from jaxlm.data import ahead


class Source:
    """Item i is i, after a random pause; fails at `bad`."""

    def __init__(self, bad=None):
        self.bad, self.asked = bad, []

    def __getitem__(self, i):
        self.asked.append(i)
        time.sleep(random.Random(i).random() / 500)
        if i == self.bad:
            raise OSError(f"item {i}")
        return i

    def waits_for(self):
        return "nothing"


def take(items, n):
    return [items.get(5) for _ in range(n)]


@pytest.mark.parametrize(("num_threads", "prefetch"), [(1, 1), (3, 1), (3, 10), (8, 2)])
def test_items_come_in_order_and_not_too_many_ahead(num_threads, prefetch):
    items = ahead.Threads(source := Source(), num_threads, prefetch, first=2, stride=3)
    assert take(items, 50) == list(range(2, 152, 3))
    time.sleep(0.05)
    lane = -(-prefetch // num_threads)
    assert len(source.asked) <= 50 + num_threads * (lane + 1)  # what is ahead, and one in hand for each thread
    items.close()


def test_an_error_comes_in_its_place():
    items = ahead.Threads(Source(bad=7), 3, 6)
    assert take(items, 7) == list(range(7))
    with pytest.raises(OSError, match="item 7"):
        items.get(5)
    items.close()


def test_a_lane_that_hangs_costs_the_timeout_and_close_a_second():
    never = threading.Event()
    lanes = ahead.Lanes([itertools.count(), (never.wait(60) for _ in itertools.count())], 2)
    assert lanes.get(5) == 0
    assert lanes.turn == 1
    with pytest.raises(queue.Empty):
        lanes.get(0.05)
    began = time.monotonic()
    lanes.close()
    assert 0.9 < time.monotonic() - began < 3
    never.set()


def test_close_ends_threads_whose_lanes_are_full():
    before = set(threading.enumerate())
    items = ahead.Threads(Source(), 4, 4)
    take(items, 3)
    items.close()
    assert not [thread for thread in set(threading.enumerate()) - before if thread.is_alive()]
