"""Measures continuous batching against batch generation: `python scripts/bench_serve.py` (random weights, 35M, float32).

Prints tokens per second, time to the first token, gaps between tokens and bandwidth by number of clients. Then each figure
with its target: 8 clients against the device loop with 8 rows and against one client, the first token under load, gaps while
another client sends 900 tokens, and many requests of random sizes, half of them cancelled. A busy machine spoils the figures,
so its load is printed. With `--urls` it asks running servers instead, over HTTP and in turn: ours, and llama.cpp's
`llama-server -np 8`.
"""

import argparse
import json
import os
import pathlib
import threading
import time
import urllib.request
from collections.abc import Sequence

import bench_decode
import numpy as np
from bench_step import SMALLEST

from jaxlm import models
from jaxlm.config import resolve
from jaxlm.config.config_files import apply_override
from jaxlm.configs import local_35m
from jaxlm.eval.completions import greedy
from jaxlm.host.console import print_table
from jaxlm.models.decode import generate, schedule
from jaxlm.models.decode.engine import Engine
from jaxlm.models.decode.schedule import Ask, Ticket, Update
from jaxlm.serve.batcher import Batcher, Busy

_WORDS = (
    "the",
    "of",
    "and",
    "to",
    "in",
    "is",
    "that",
    "for",
    "it",
    "as",
    "was",
    "with",
    "be",
    "by",
    "on",
    "not",
    "he",
    "but",
)


class Answer:
    """One request, whose answer is waited for.

    Attributes:
      times: when the request was sent and when each update with tokens came, in seconds.
      tokens: the number of tokens received.
      ended, why: as in `Update`.
    """

    def __init__(self, batcher: Batcher, ask: Ask, cut_after: int | None = None):
        self.times, self.tokens, self.ended, self.why = [time.perf_counter()], 0, "", ""
        self._cut_after, self._done = cut_after, threading.Event()
        self.ticket: Ticket | None = None  # None until `submit` returns; tokens may come before
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
        """Waits until the answer has ended; returns self."""
        self._done.wait()
        return self

    @property
    def first_s(self) -> float:
        """Returns the seconds to the first token."""
        return self.times[1] - self.times[0]

    def gaps_s(self, begin: float = 0.0, end: float = float("inf")) -> list[float]:
        """Returns the seconds between successive updates that came between `begin` and `end`."""
        pairs = zip(self.times[1:], self.times[2:], strict=False)
        return [after - before for before, after in pairs if begin <= after <= end]


def by_clients(
    batcher: Batcher, clients: tuple[int, ...] = (1, 2, 4, 8), prompt: int = 32, new: int = 128, requests: int = 2
) -> list[dict]:
    """Returns a row of figures for each number of clients, and for as many as there are rows; `batcher` is warm and idle.

    Each client sends `requests` requests of `prompt` random ids, one after the other, and reads `new` greedy tokens of
    each.
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
    """Returns the figures for one client per list of prompts."""
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


def prompt(rng: np.random.Generator, tokens: int) -> tuple[int, ...]:
    """Returns random ids."""
    return tuple(rng.integers(3, 20_000, tokens).tolist())


def first_tokens(batcher: Batcher, load: int, new: int, number: int) -> list[float]:
    """Returns seconds to the first token of requests sent one by one at random times, while `load` clients send others."""
    rng, stop = np.random.default_rng(2), threading.Event()

    def client(seed: int) -> None:
        own = np.random.default_rng(seed)
        while not stop.is_set():
            Answer(batcher, Ask(prompt(own, 24), int(own.integers(new // 2, new)), temperature=0.0)).wait()

    threads = [threading.Thread(target=client, args=(seed,)) for seed in range(load)]
    for thread in threads:
        thread.start()
    time.sleep(1.0)
    firsts = []
    for _ in range(number):
        firsts.append(Answer(batcher, Ask(prompt(rng, 24), 4, temperature=0.0)).wait().first_s)
        time.sleep(float(rng.uniform(0, 0.1)))
    stop.set()
    for thread in threads:
        thread.join()
    return firsts


def gaps_beside(batcher: Batcher, tokens: int) -> list[float]:
    """Returns seconds between the tokens of a few clients while another repeatedly sends a long prompt."""
    rng = np.random.default_rng(3)
    others = [Answer(batcher, Ask(prompt(rng, 24), 400, temperature=0.0)) for _ in range(4)]
    while any(other.tokens < 10 for other in others):
        time.sleep(0.01)
    begin = time.perf_counter()
    for _ in range(3):
        Answer(batcher, Ask(prompt(rng, tokens), 1, temperature=0.0)).wait()
    end = time.perf_counter()
    for other in others:
        other.ticket.cancel()
        other.wait()
    return [gap for other in others for gap in other.gaps_s(begin, end)]


def resident() -> float:
    """Returns this process's resident MB."""
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / 1e6


def storm(batcher: Batcher, number: int) -> tuple[int, float, float]:
    """Sends requests of random sizes, cancels every second; returns (failures, MB after a fifth of them, MB at the end)."""
    rng, answers, early = np.random.default_rng(4), [], 0.0
    for count in range(number):
        new = int(rng.integers(1, 48))
        ask = Ask(prompt(rng, int(rng.integers(1, 300))), new, temperature=float(rng.integers(0, 2)), seed=count)
        answers.append(Answer(batcher, ask, cut_after=int(rng.integers(0, new)) if count % 2 else None))
        if count == number // 5:
            early = resident()
    for answer in answers:
        answer.wait()
    return sum(answer.ended not in ("length", "cancelled") for answer in answers), early, resident()


def over_http(urls: Sequence[str], clients: int, new: int, temperature: float, turns: int) -> None:
    """Prints tokens/s of some OpenAI servers in turn, each asked by `clients` at once for streams of `new` tokens."""
    rng = np.random.default_rng()

    def ask(url: str, firsts: list[float]) -> None:
        text = " ".join(rng.choice(_WORDS, 32))
        body = {"model": "m", "prompt": text, "max_tokens": new, "temperature": temperature, "stream": True}
        headers, began, first = {"Content-Type": "application/json"}, time.perf_counter(), 0.0
        request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request) as answer:
            for line in answer:  # to its end; several tokens may share a line, and none may end before `new`
                first = first or (time.perf_counter() if line.startswith(b"data: {") else 0.0)
        firsts.append(first - began)

    def turn(url: str) -> float:
        firsts, began = [], time.perf_counter()
        threads = [threading.Thread(target=ask, args=(url, firsts)) for _ in range(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        rate = clients * new / (time.perf_counter() - began)
        print(f"{url}: {rate:.0f} tokens/s, first {1e3 * np.median(firsts):.0f} ms", flush=True)
        return rate

    rates = [[turn(url) for url in urls] for _ in range(turns + 1)][1:]  # the first warms up
    for url, ratios in zip(urls[1:], (np.array(rates)[:, :1] / np.array(rates)[:, 1:]).T, strict=True):
        print(f"{urls[0]} / {url}: {np.median(ratios):.2f} ({ratios.min():.2f} to {ratios.max():.2f})")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000, help="of the last measurement")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--smallest", action="store_true", help="a tiny model, few requests: to see that it works")
    parser.add_argument("--urls", nargs="+", default=[], help="ask these servers over HTTP, in turn, and nothing else")
    parser.add_argument("--clients", type=int, default=8, help="of each URL at once")
    parser.add_argument("--temperature", type=float, default=0.0, help="of what the URLs are asked for")
    return parser.parse_args()


def main() -> None:
    args = _arguments()
    if args.urls:
        return over_http(args.urls, args.clients, 128, args.temperature, turns=5)
    turns, new, asked = 3, 128, (30, 60)
    if args.smallest:
        turns, new, asked, args.requests = 1, 8, (2, 4), 10
        args.set = [*SMALLEST, "model.vocab_size=20480", *args.set]
    c = local_35m.get_config()
    for override in ("model.dtype=float32", "model.max_seq_len=1024", "data.dir=unused", *args.set):
        apply_override(c, override)
    config = resolve(c).model
    model = models.build(config, "xla")
    variables = {"params": bench_decode.random_params(model, 0)}
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors")
    batcher, engine = Batcher(model, variables, rows=8), Engine(model, variables, prefix_bytes=0)
    began = time.perf_counter()
    batcher.warm(lambda line: print(line, flush=True))
    print(f"compiled in {time.perf_counter() - began:.0f} s", flush=True)

    rng, rates = np.random.default_rng(1), []
    asks = generate.asks([prompt(rng, 32) for _ in range(8)], greedy(new))
    schedule.tokens_of(engine, asks)
    tables = []
    for _ in range(turns):  # in turn, so that both meet the same noise
        began = time.perf_counter()
        tokens = sum(map(len, schedule.tokens_of(engine, asks)))
        rates.append(tokens / (time.perf_counter() - began))
        tables.append(by_clients(batcher, prompt=32, new=new))
    print_table(tables[-1], False)
    eight = [table[-1]["tokens/s"] for table in tables]
    one = [table[0]["tokens/s"] for table in tables]
    print(f"a batch of 8 rows: {np.median(rates):.0f} tokens/s")
    print(f"8 clients / the batch: {np.median(np.divide(eight, rates)):.2f} (at least .75)")
    print(f"8 clients / 1 client: {np.median(np.divide(eight, one)):.2f} (at least 5)", flush=True)

    idle, busy = first_tokens(batcher, 0, 0, asked[0]), first_tokens(batcher, 7, 64, asked[1])
    ratio = np.quantile(busy, 0.95) / np.median(idle)
    print(
        f"first token: idle {1e3 * np.median(idle):.0f} ms (p95 {1e3 * np.quantile(idle, 0.95):.0f}), under load p95 "
        f"{1e3 * np.quantile(busy, 0.95):.0f} ms: {ratio:.2f} times (at most 3)",
        flush=True,
    )
    gaps = gaps_beside(batcher, 900)
    print(
        f"gap beside 900 tokens: median {1e3 * np.median(gaps):.0f} ms, p99 {1e3 * np.quantile(gaps, 0.99):.0f} ms: "
        f"{np.quantile(gaps, 0.99) / np.median(gaps):.2f} times (at most 4)",
        flush=True,
    )
    failed, early, late = storm(batcher, args.requests)
    print(
        f"{args.requests} requests: {failed} failed, memory {early:.0f} -> {late:.0f} MB ({late / early - 1:+.1%}, at most 5%)"
    )
    print(batcher.stats())
    print(f"load {os.getloadavg()[0]:.1f}")
    batcher.close()


if __name__ == "__main__":
    main()
