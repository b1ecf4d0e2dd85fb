"""Times a policy's rollouts: `python scripts/bench_rollouts.py`.

8 prompts of 32 tokens, 8 answers to each, up to 64 tokens, by a Llama of 4 layers, d 256 and a vocabulary of 2,048 with
random weights (`--set=KEY=VALUE` for another): with each token's log p, and in turn without. Also times loading new
weights. A busy machine spoils the times, so its load is printed.
"""

import argparse
import dataclasses
import functools
import os
import time

import bench_decode
import jax
import numpy as np
from bench_step import SMALLEST

from jaxlm import models
from jaxlm.config import SampleConfig, resolve
from jaxlm.config.config_files import apply_override
from jaxlm.configs import base
from jaxlm.models.decode import generate, schedule
from jaxlm.models.decode.engine import Engine

SHAPE = (
    *("model.n_layers=4", "model.d_model=256", "model.n_heads=4", "model.n_kv_heads=2", "model.head_dim=64"),
    *("model.d_ff=704", "model.vocab_size=2048", "model.dtype=float32", "model.max_seq_len=256", "data.dir=unused"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--answers", type=int, default=8, help="to each prompt")
    parser.add_argument("--prompt", type=int, default=32, help="tokens of each prompt")
    parser.add_argument("--new", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--rows", type=int, default=0, help="answers drawn at once; 0 for all")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--smallest", action="store_true", help="a tiny model, four answers: to see that it works")
    args = parser.parse_args()
    if args.smallest:
        args.prompts, args.answers, args.prompt, args.new, args.repeats = 2, 2, 4, 4, 1
        args.set = [*SMALLEST, *args.set]
    c = base.get_config()
    c.sample.max_new_tokens, c.sample.temperature, c.sample.top_k, c.sample.top_p = args.new, 1.0, 0, 1.0
    for override in (*SHAPE, *args.set):
        apply_override(c, override)
    config = resolve(c)
    model = models.build(config.model, "xla")
    variables = {"params": bench_decode.random_params(model, 0)}
    distinct = np.random.default_rng(1).integers(3, config.model.vocab_size, (args.prompts, args.prompt)).tolist()
    prompts = [prompt for prompt in distinct for _ in range(args.answers)]
    rows = args.rows or len(prompts)
    engine = Engine(model, variables, rows=rows, prefix_bytes=0)
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors, {jax.devices()[0].device_kind}, {rows} rows")
    speeds = measure(engine, prompts, config.sample, args.repeats)
    for name, values in speeds.items():
        print(f"{name}: median {np.median(values):.0f} tokens/s, best {max(values):.0f}")
    pairs = np.divide(speeds["with log p"], speeds["without"])
    print(f"with log p / without: median of pairs {np.median(pairs):.2f}, lowest {min(pairs):.2f} (at least .9)")
    began = time.perf_counter()
    engine.load(variables)
    jax.block_until_ready(engine.weights)
    print(f"new weights {1e3 * (time.perf_counter() - began):.0f} ms; load {os.getloadavg()[0]:.1f}")


def measure(engine: Engine, prompts: list[list[int]], settings: SampleConfig, repeats: int) -> dict[str, list[float]]:
    """Returns tokens per second of both, from alternating runs, after a warm-up run of each."""
    rows = engine.rows

    def run(seed: int, logprobs: int | None) -> list[list[schedule.Token]]:
        asks = generate.asks(prompts, settings, seed=seed)
        return schedule.tokens_of(engine, [dataclasses.replace(ask, logprobs=logprobs) for ask in asks], rows)

    runs = {"with log p": functools.partial(run, logprobs=0), "without": functools.partial(run, logprobs=None)}
    speeds: dict[str, list[float]] = {name: [] for name in runs}
    for name, run in runs.items():
        began = time.perf_counter()
        run(0)
        print(f"{name}: compiled in {time.perf_counter() - began:.0f} s", flush=True)
    for number in range(repeats):
        for name, run in runs.items():
            began = time.perf_counter()
            tokens = sum(map(len, run(number)))
            speeds[name].append(tokens / (time.perf_counter() - began))
        print("  ".join(f"{name} {values[-1]:.0f} tokens/s" for name, values in speeds.items()), flush=True)
    return speeds


if __name__ == "__main__":
    main()
