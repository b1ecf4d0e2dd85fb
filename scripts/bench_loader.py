"""Measures how fast the loader alone makes batches, from shards on local disk: `python scripts/bench_loader.py`.

Makes its own shards (three sources, Zipf-distributed tokens, documents of some 500 tokens) in a temporary folder, warms
up, and prints tokens per second: batches of the three-way mixture, at random over all tokens, with segment ids and
positions.
"""

import argparse
import json
import pathlib
import tempfile
import time

import numpy as np

from jaxlm.data.batches import document_rows, loader
from jaxlm.data.shards import shards

MIXTURE = {"prose": 87, "math": 10, "code": 3}


def make_data(root: pathlib.Path, tokens: int, vocab_size: int) -> shards.DataDir:
    """Returns a data directory with about `tokens` random tokens."""
    rng = np.random.default_rng(0)
    dtype, entries = shards.token_dtype(vocab_size), {}
    for name, weight in MIXTURE.items():
        writers = {
            split: shards.StreamWriter(root, split, name, dtype=dtype, block_tokens=8192, shard_blocks=2048)
            for split in shards.SPLITS
        }
        wanted = max(1 << 20, tokens * weight // 100)
        ids = 3 + rng.zipf(1.2, wanted).clip(max=vocab_size - 4).astype(dtype)
        cuts = np.cumsum(rng.integers(100, 900, wanted // 500))
        for i, document in enumerate(np.split(ids, cuts[cuts < wanted])):
            writers["train" if i else "val"].add(f"{name}-{i}", np.append(2, document), 4 * len(document))
        entries[name] = {"spec": "random", **{split: writer.finish() for split, writer in writers.items()}}
    manifest = {
        "tokenizer": {"vocab_size": vocab_size, "eos_id": 2, "separator_id": 2},
        "dtype": dtype,
        "block_tokens": 8192,
        "mixture": MIXTURE,
        "sources": entries,
    }
    return shards.DataDir(root, manifest, sha256="")


def measure(data: shards.DataDir, seconds: float, **options) -> float:
    """Returns tokens per second of a TrainLoader with these options, after ten batches of warm-up."""
    order = document_rows.Rows(data, data.mixture, 0, options.pop("seq_len"), options.pop("batch_size"))
    with loader.TrainLoader(order, **options) as batches:
        for _ in range(10):
            next(batches)
        steps, began = 0, time.perf_counter()
        while time.perf_counter() - began < seconds:
            next(batches)
            steps += 1
        elapsed = time.perf_counter() - began
    return steps * order.batch_size * order.seq_len / elapsed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--num-threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64_000_000)
    parser.add_argument("--data", help="an existing data directory to read instead of making one")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--smallest", action="store_true", help="few tokens, for a moment: to see that it works")
    args = parser.parse_args()
    if args.smallest:
        args.seconds, args.repeats, args.tokens, args.batch_size = 0.05, 1, 1, 4
    with tempfile.TemporaryDirectory() as folder:
        data = shards.open_data(args.data) if args.data else make_data(pathlib.Path(folder), args.tokens, 32005)
        options = {name: getattr(args, name) for name in ("seq_len", "batch_size", "num_threads")}
        rates = [measure(data, args.seconds, **options) for _ in range(args.repeats)]
    if args.json:
        print(json.dumps({**options, "tokens_per_second": rates}))
        return
    for rate in rates:
        print(f"{rate / 1e6:.2f} million tokens/s")
    print(f"median {np.median(rates) / 1e6:.2f} million tokens/s ({options})")


if __name__ == "__main__":
    main()
