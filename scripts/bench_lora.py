"""How much faster a LoRA's step is than full fine-tuning's, in pairs: `python scripts/bench_lora.py`.

Times jaxlm's own compiled train steps on one packed batch of random tokens, alternating, so that all meet the same noise.
The defaults are the shape of configs/local_35m.py in 8 rows of 512 tokens; the adapter is that of configs/base.py: rank 16
on all kernels, with five rows of the embedding. `--quantize=nf4` puts a third side beside them, a LoRA on that base. Any
key of configs/base.py can be set: `--set=adapter.rank=64`.
"""

import argparse
import dataclasses
import statistics

import bench_step
import jax

from jaxlm import config_files, sharding
from jaxlm.config import Config, ConfigError, resolve
from jaxlm.models import adapters, hardware
from jaxlm.objectives import lm
from jaxlm.step import parts as parts_lib

ROWS = tuple(range(5))  # as many as ChatML has; which ones takes the same time


def config_of(name: str, overrides: list[str]) -> Config:
    """A shipped config of any tokens, with attention and dtype for this machine."""
    c = resolve(config_files.load(name, ["data.dir=unused", *overrides]))
    return dataclasses.replace(c, model=hardware.for_platform(c.model, jax.devices()[0].platform))


def side(config: Config) -> bench_step.Side:
    """The step of full fine-tuning, or of the config's adapter."""
    mesh = sharding.make_mesh(config.mesh)
    parts = parts_lib.make(config, mesh, lm.make, adapters.of(config.adapter, ROWS))
    batch = sharding.to_global(bench_step.random_batch(config), mesh, config.train.batch_size)
    now, frozen = parts.create()
    with jax.set_mesh(mesh):
        compiled = parts.jit().lower(frozen, now, batch).compile()

    def run() -> jax.Array:
        nonlocal now
        now, metrics = compiled(frozen, now, batch)
        return metrics["loss"]

    return bench_step.Side(run, jax.block_until_ready, compiled)


def main() -> None:
    """Prints tokens a second (median) of each side, and the ratio to full fine-tuning of every pair."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="local_35m", help="a shipped config, for its shape")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq_len", type=int, default=512)
    parser.add_argument("--steps", type=int, default=7, help="timed steps of each")
    parser.add_argument("--quantize", choices=("none", "nf4", "int8"), default="none", help="a third side: QLoRA")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a key of configs/base.py")
    args = parser.parse_args()
    if min(args.batch, args.seq_len, args.steps) < 1:
        parser.error("--batch, --seq_len and --steps must be at least 1")
    sizes = [f"train.{key}={args.batch}" for key in ("batch_size", "microbatch_size")] + [
        f"train.seq_len={args.seq_len}"
    ]
    kinds = {"full": [], "lora": ["adapter.kind=lora"]}
    if args.quantize != "none":
        kinds[args.quantize] = ["adapter.kind=lora", f"adapter.quantize={args.quantize}"]
    try:
        configs = {kind: config_of(args.config, [*sizes, *keys, *args.set]) for kind, keys in kinds.items()}
    except ConfigError as error:
        parser.error(str(error))
    print(bench_step.versions(peer=False))
    sides = {kind: side(config) for kind, config in configs.items()}
    for kind in kinds:
        losses = [f"{bench_step.timed(sides[kind])[1]:.4f}" for _ in range(2)]  # the first steps take longer
        print(f"{kind}: first losses {' '.join(losses)}", flush=True)
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(args.steps):
        for kind in kinds:
            times[kind].append(bench_step.timed(sides[kind])[0])
    for kind, seconds in times.items():
        ratios = [full / own for full, own in zip(times["full"], seconds, strict=True)]
        speed = args.batch * args.seq_len / statistics.median(seconds)
        pairs = " ".join(f"{ratio:.2f}" for ratio in ratios)
        print(f"{kind}: {speed:.0f} tokens/s (median of {args.steps})")
        print(f"full's time / {kind}'s, pair by pair: {pairs}; median {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    main()
