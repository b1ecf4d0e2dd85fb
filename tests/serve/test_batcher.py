"""Continuous batching: what each request gets is what it gets alone, whatever the others do."""

import functools
import queue
import threading
import time

import bench_serve
import jax
import numpy as np
import pytest
import tiny_models as tiny

from jaxlm import config, models
from jaxlm.models.decode import ring
from jaxlm.models.decode.generate import generate
from jaxlm.models.decode.schedule import Ask, Token, Update
from jaxlm.serve.batcher import Batcher, Busy

PROMPTS = [[5, 7, 11], list(range(2, 21)), [42], list(range(1, 40))]


@functools.cache
def built(**keys):
    model = models.build(tiny.model_config(**{"n_layers": 1} | keys), "xla")
    return model, {"params": tiny.random_params(model)}


@pytest.fixture
def batcher():
    one = Batcher(*built(), rows=3, chunk=8, shortest=16)
    yield one
    one.close()


class Heard:
    """A request and what comes of it."""

    def __init__(self, batcher: Batcher, ids, new: int = 8, **more):
        self.updates, self._queue = [], queue.Queue()
        self.ticket = batcher.submit(Ask(tuple(ids), new, **({"temperature": 0.0} | more)), self._queue.put)

    def next(self) -> Update:
        self.updates.append(self._queue.get(timeout=60))
        return self.updates[-1]

    def end(self) -> str:
        while not self.next().ended:
            pass
        return self.updates[-1].ended

    @property
    def tokens(self) -> list[Token]:
        return [token for update in self.updates for token in update.tokens]

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]


def alone(batcher: Batcher, ids, new: int = 8, **more) -> list[int]:
    heard = Heard(batcher, ids, new, **more)
    assert heard.end() == "length"
    return heard.ids


def test_requests_together_get_what_generate_gives(batcher):
    expected = generate(*built(), PROMPTS, tiny.sample_config(max_new_tokens=12))
    asked = [Heard(batcher, ids, 12) for ids in PROMPTS]
    assert [one.end() for one in asked] == ["length"] * 4
    assert [one.ids for one in asked] == expected
    stats = batcher.stats()
    assert (stats.prompts, stats.tokens, stats.busy, stats.ended, stats.down) == (4, 48, 0, {"length": 4}, "")
    wrong = [Heard(batcher, ids[::-1], 12) for ids in PROMPTS[:2]]
    assert [one.end() and one.ids for one in wrong] != expected[:2]


def test_neighbours_change_nothing(batcher):
    settings = {"temperature": 0.9, "top_p": 0.95, "top_k": 40, "seed": 5}
    expected = alone(batcher, PROMPTS[1], 30, **settings)
    rng = np.random.default_rng(0)
    one, others = Heard(batcher, PROMPTS[1], 30, **settings), []
    for number in range(12):
        ids = rng.integers(0, 101, int(rng.integers(1, 30)))
        others.append(Heard(batcher, ids.tolist(), int(rng.integers(1, 20)), temperature=1.0, seed=number))
        if number % 3 == 0:
            others[-1].ticket.cancel()
        if len(one.updates) < 25:
            one.next()
    one.end()
    assert one.ids == expected != alone(batcher, PROMPTS[1], 30, **(settings | {"seed": 6}))
    assert {other.end() for other in others} <= {"length", "cancelled"}


def test_a_stop_is_not_among_the_tokens_and_the_context_ends_a_text(batcher):
    free = alone(batcher, PROMPTS[0], 12)
    stop = next(i for i in free if i != free[0])
    heard = Heard(batcher, PROMPTS[0], 12, stop_ids=(100, stop))
    assert heard.end() == "stop"
    assert heard.ids == free[: free.index(stop)]
    assert len(alone(batcher, [1] * 60, 30)) == 4
    heard = Heard(batcher, PROMPTS[0], 0)
    assert (heard.end(), heard.ids) == ("length", [])


def test_log_probabilities_echo_and_bias(batcher):
    heard = Heard(batcher, PROMPTS[1], 3, logprobs=2, echo=True)
    assert heard.end() == "length"
    (prompt,) = [update.prompt for update in heard.updates if update.prompt is not None]
    ids = [*PROMPTS[1], *heard.ids]
    forward = tiny.jit(lambda params, ids: jax.nn.log_softmax(tiny.logits(built()[0], params, ids)[0]))
    logp = np.asarray(forward(built()[1]["params"], np.array([ids])))
    assert [token.id for token in prompt] == PROMPTS[1]
    assert prompt[0].logp is None
    for at, token in enumerate([*prompt, *heard.tokens][1:]):
        assert token.logp == pytest.approx(logp[at, token.id], abs=1e-4)
        assert [i for i, _ in token.top] == np.argsort(-logp[at])[:2].tolist()
    assert all(token.logp is None for token in prompt[:1])
    only = Heard(batcher, PROMPTS[1], 0, logprobs=0, echo=True)
    only.end()
    assert [token.logp for token in only.updates[0].prompt] == [token.logp for token in prompt]
    biased = Heard(batcher, PROMPTS[1], 3, bias={33: 100.0}, logprobs=1)
    biased.end()
    assert biased.ids == [33] * 3
    assert biased.tokens[0].logp == pytest.approx(logp[len(PROMPTS[1]) - 1, 33], abs=1e-4)  # the model's own


class Count:
    """A guide that lets 10, 11, 12 ... follow each other, and fails after some."""

    def __init__(self, fails_at: int = 99):
        self.next, self._fails_at = 10, fails_at

    def mask(self) -> np.ndarray:
        bits = np.zeros(128, bool)
        bits[self.next] = True
        return np.packbits(bits, bitorder="little").view(np.uint32)

    def accept(self, token: int) -> None:
        if token == self._fails_at:
            raise ValueError("it broke")
        self.next = token + 1


def test_a_guide_leads_its_row_alone_and_fails_alone(batcher):
    expected = alone(batcher, PROMPTS[0], 20)
    free, led = Heard(batcher, PROMPTS[0], 20), Heard(batcher, PROMPTS[0], 6, temperature=1.0, guide=Count())
    broken = Heard(batcher, PROMPTS[0], 6, guide=Count(fails_at=12))
    assert [one.end() for one in (led, broken, free)] == ["length", "failed", "length"]
    assert led.ids == list(range(10, 16))
    assert broken.ids == [10, 11]
    assert broken.updates[-1].why == "ValueError: it broke"
    assert free.ids == expected


def test_a_step_is_started_before_the_last_one_is_told_but_never_beyond_the_end(batcher):
    def steps_at_each_update(**more) -> list[int]:
        before, seen, ended = batcher.stats().steps, [], threading.Event()

        def tell(update: Update) -> None:  # on the batcher's thread
            seen.append(batcher.stats().steps - before)
            if update.ended:
                ended.set()

        batcher.submit(Ask(tuple(PROMPTS[0]), 6, temperature=0.0, **more), tell)
        assert ended.wait(60)
        return seen

    assert steps_at_each_update() == [2, 3, 4, 5, 6, 6]
    assert steps_at_each_update(guide=Count()) == [1, 2, 3, 4, 5, 6]  # the next step needs to know
    last = alone(batcher, PROMPTS[0], 6)[-1]
    seen = steps_at_each_update(stop_ids=(last,))
    assert seen[-1] == len(seen) + (len(seen) < 6)  # a stop is not foreseen


def test_the_ring_is_as_long_as_the_rows_are_and_not_as_they_may_become(batcher):
    count, left = 0, threading.Event()

    def leave(update: Update) -> None:
        nonlocal count
        count += len(update.tokens)
        if count == 10:
            left.set()
            raise OSError("gone")

    batcher.submit(Ask(tuple(PROMPTS[0]), 60, temperature=0.0), leave)
    assert left.wait(60)
    assert batcher.stats().ring == 16
    alone(batcher, PROMPTS[0], 60)
    assert batcher.stats().ring == 64


def test_cancelled_rows_are_free_at_once(batcher):
    held = [Heard(batcher, [number], 60) for number in range(1, 4)]
    for one in held:
        one.next()
    waiting = [Heard(batcher, [9], 4) for _ in range(2)]
    waiting[1].ticket.cancel()
    held[1].ticket.cancel()
    assert held[1].end() == "cancelled"
    assert [one.end() for one in waiting] == ["length", "cancelled"]
    assert [one.end() for one in (held[0], held[2])] == ["length"] * 2


def test_nothing_is_compiled_once_it_is_warm():
    one = Batcher(*built(max_seq_len=32), rows=1, chunk=8, shortest=16)
    programs = (ring.empty, ring.step, ring.read_chunk, ring.keep, ring.paste, ring.insert, ring.resized, ring.cache)
    lines: list[str] = []
    one.warm(lines.append)
    assert lines == ["for 16 slots", "for 32 slots"]
    before = [program._cache_size() for program in programs]
    for _ in range(2):  # the second finds prefixes
        for ids in ([5], list(range(20))):
            for settings in ({}, {"temperature": 1.0, "top_p": 0.5}, {"logprobs": 2, "echo": True}, {"guide": Count()}):
                alone(one, ids, 9, **settings)
    alone(one, [5], 3 * 31)
    for _ in range(25):  # the ring shrinks again
        alone(one, [5], 3)
    assert one.stats().ring == 16
    assert [program._cache_size() for program in programs] == before
    one.close()


def test_a_full_queue_says_so():
    one = Batcher(*built(), rows=1, queue=2, chunk=8, shortest=16)
    first = Heard(one, [1], 60)
    first.next()
    rest = [Heard(one, [1], 1) for _ in range(2)]
    with pytest.raises(Busy, match="queue is full") as error:
        Heard(one, [1], 1)
    assert error.value.retry_after_s >= 1
    one.close()
    assert {heard.end() for heard in [first, *rest]} <= {"cancelled", "length"}
    assert one.stats().down == "it was closed"
    with pytest.raises(config.RunError, match="closed"):
        Heard(one, [1], 1)


def test_a_full_queue_counts_no_wait_twice():
    one = Batcher(*built(max_seq_len=32), rows=1, queue=8, chunk=8, shortest=16)
    one.warm(lambda line: None)
    ended = threading.Semaphore(0)

    def slow(update: Update) -> None:
        time.sleep(0.1)
        ended.release()

    for _ in range(2):
        tickets = [one.submit(Ask((1,), 1, temperature=0.0), slow) for _ in range(9)]
        with pytest.raises(Busy) as error:
            one.submit(Ask((1,), 1, temperature=0.0), slow)
        assert [ended.acquire(timeout=60) for _ in tickets] == [True] * 9
    one.close()
    assert 1 <= error.value.retry_after_s < 6  # 8 wait .1 s each; at the start 1 s each is assumed


def test_a_dead_thread_tells_all_why(monkeypatch):
    one = Batcher(*built(), rows=1, chunk=8, shortest=16)
    held = [Heard(one, [1], 60), Heard(one, [2], 60)]
    held[0].next()

    def broken(*_: object) -> None:
        raise MemoryError("no room on the device")

    monkeypatch.setattr(one.engine, "start", broken)
    for heard in held:
        assert heard.end() == "failed"
        assert heard.updates[-1].why == "MemoryError: no room on the device"
    with pytest.raises(config.RunError, match="no room on the device"):
        Heard(one, [1], 1)
    assert one.stats().down == "MemoryError: no room on the device"


def test_hundreds_of_requests_leave_nothing_behind(batcher):
    rng, done = np.random.default_rng(3), threading.Barrier(5)
    ends: list[str] = []

    def client(seed: int) -> None:
        own = np.random.default_rng(seed)
        for number in range(20):
            new = int(own.integers(1, 12))
            cut = int(own.integers(0, new)) if number % 2 else None
            ids = tuple(own.integers(0, 101, int(own.integers(1, 50))).tolist())
            ends.append(bench_serve.Answer(batcher, Ask(ids, new, seed=number), cut).wait().ended)
        done.wait(timeout=60)

    alone(batcher, [1])
    threads = [threading.Thread(target=client, args=(int(rng.integers(1 << 30)),)) for _ in range(4)]
    for thread in threads:
        thread.start()
    done.wait(timeout=60)
    assert len(ends) == 80
    assert set(ends) == {"length", "cancelled"}
    stats = batcher.stats()
    assert (stats.busy, stats.queued, sum(stats.ended.values())) == (0, 0, 81)
    before = len(jax.live_arrays())
    for number in range(20):
        alone(batcher, [number] * 7)  # no whole chunk to keep
    until = time.monotonic() + 20
    while len(jax.live_arrays()) > before:  # the last step's go once it is told
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_bench_counts_all_tokens(batcher):
    rows = bench_serve.by_clients(batcher, clients=(1, 2), prompt=9, new=5, requests=2)
    assert [row["clients"] for row in rows] == [1, 2, 3]
    assert batcher.stats().tokens == (1 + 2 + 3) * 2 * 5
    assert all(row["tokens/s"] > 0 and row["GB/s"] > 0 and row["failed"] == 0 for row in rows)
