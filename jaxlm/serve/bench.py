"""Measures a batcher: tokens a second, time to the first token, gaps between tokens and bandwidth, by number of clients."""

import threading
import time

import numpy as np

from jaxlm.serve.asks import Ask, Busy, Update
from jaxlm.serve.batcher import Batcher, Ticket


class Answer:
    """One request, waited for.

    Attributes:
      times: when it was asked and when each update with tokens came, in seconds.
      tokens: how many came.
      ended, why: as `Update` has them.
    """

    def __init__(self, batcher: Batcher, ask: Ask, cut_after: int | None = None):
        self.times, self.tokens, self.ended, self.why = [time.perf_counter()], 0, "", ""
        self._cut_after, self._done = cut_after, threading.Event()
        self.ticket: Ticket | None = None  # until `submit` returns, during which the first tokens may come
        while True:
            try:
                self.ticket = batcher.submit(ask, self._hear)
                return
            except Busy as busy:
                time.sleep(min(busy.retry_after_s, 0.05))

    def _hear(self, update: Update) -> None:
        self.tokens += len(update.tokens)
        if update.tokens:
            self.times.append(time.perf_counter())
        if update.ended:
            self.ended, self.why = update.ended, update.why
            self._done.set()
        elif self.ticket and self._cut_after is not None and self.tokens >= self._cut_after:
            self.ticket.cancel()

    def wait(self) -> "Answer":
        """Returns itself, once it ended."""
        self._done.wait()
        return self

    @property
    def first_s(self) -> float:
        """Returns the seconds to the first token."""
        return self.times[1] - self.times[0]

    def gaps_s(self, begin: float = 0.0, end: float = float("inf")) -> list[float]:
        """Returns the seconds between two updates, of those that came between two times."""
        pairs = zip(self.times[1:], self.times[2:], strict=False)
        return [after - before for before, after in pairs if begin <= after <= end]


def run(
    batcher: Batcher, clients: tuple[int, ...] = (1, 2, 4, 8), prompt: int = 32, new: int = 128, requests: int = 2
) -> list[dict]:
    """Returns a row of figures for each number of clients, with that of all rows added; `batcher` is warm and idle.

    Each client sends `requests` requests of `prompt` random ids, one after the other, and reads `new` tokens of each,
    the likeliest.
    """
    rng = np.random.default_rng(0)
    highest = batcher.engine.model.config.vocab_size
    room = batcher.engine.model.config.max_seq_len
    prompt = min(prompt, room // 2)
    new = min(new, room - prompt)
    return [
        _measure(batcher, rng.integers(0, highest, (count, requests, prompt)).tolist(), new)
        for count in sorted({*clients, batcher.engine.rows})
        if count <= batcher.engine.rows
    ]


def _measure(batcher: Batcher, prompts: list[list[list[int]]], new: int) -> dict:
    """The figures of one client for each list of prompts."""
    before, answers = batcher.stats(), []

    def client(own: list[list[int]]) -> None:
        for ids in own:
            answers.append(Answer(batcher, Ask(tuple(ids), new, temperature=0.0)).wait())

    threads = [threading.Thread(target=client, args=(own,)) for own in prompts]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds, after = time.perf_counter() - start, batcher.stats()
    firsts = [answer.first_s for answer in answers if answer.tokens]
    gaps = [gap for answer in answers for gap in answer.gaps_s()]
    return {
        "clients": len(prompts),
        "tokens/s": sum(answer.tokens for answer in answers) / seconds,
        "first token, ms": 1e3 * float(np.median(firsts)),
        "first token p95, ms": 1e3 * float(np.quantile(firsts, 0.95)),
        "gap, ms": 1e3 * float(np.median(gaps)),
        "gap p99, ms": 1e3 * float(np.quantile(gaps, 0.99)),
        "GB/s": (after.step_bytes - before.step_bytes) / seconds / 1e9,
        "failed": sum(answer.ended == "failed" for answer in answers),
    }
