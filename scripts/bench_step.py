"""Measures how fast a training step is, alone or in pairs with Hugging Face: `python scripts/bench_step.py --peer=hf`.

Times jaxlm's own compiled train step on random tokens; the defaults are the 32M Llama (8 layers, d 512, 8/4 heads,
SwiGLU 1408, vocabulary 16,384, tied), float32, 8 rows of 512 tokens in three documents each. The peer is transformers'
LlamaForCausalLM of the same shape in its own process, under torch.compile with AdamW and gradient clipping; its steps
alternate with ours, so that both meet the same noise. It attends over whole rows (no documents), which is less work than
ours. Any key of configs/base.py can be set: `--set=loss.tile_tokens=512`. Two settings of our own, in pairs:
`--peer=jaxlm --set=optim.name=muon --peer_set=optim.name=adamw`. `--smallest` runs everything on a tiny model, in seconds.
"""

import argparse
import dataclasses
import functools
import importlib.util
import multiprocessing
import statistics
import time
import typing
from concurrent import futures

import jax
import numpy as np

from jaxlm.config import Config, ConfigError, resolve
from jaxlm.config.config_files import apply_override
from jaxlm.configs import base
from jaxlm.devices import sharding
from jaxlm.models import hardware
from jaxlm.step import parts as parts_lib
from jaxlm.step.objectives import lm

Batches = typing.Iterator[dict[str, np.ndarray]]
SMALLEST = ["model.n_layers=1", "model.d_model=32", "model.n_heads=2", "model.n_kv_heads=1", "model.d_ff=64"]
SMALLEST += ["model.vocab_size=256"]


class Side(typing.NamedTuple):
    """A timed side: `run` queues a step, `wait` blocks until the step is done; both return the loss."""

    run: typing.Callable[[], typing.Any]
    wait: typing.Callable[[typing.Any], typing.Any]
    compiled: jax.stages.Compiled | None = None


def make_config(batch: int, seq_len: int, overrides: list[str]) -> Config:
    """Returns the config of the 32M Llama, with overrides KEY=VALUE of configs/base.py."""
    c = base.get_config()
    c.model.n_kv_heads, c.model.vocab_size = 4, 16384
    c.train.batch_size, c.train.seq_len = batch, seq_len
    c.data.dir = "unused"  # the tokens are random
    for override in overrides:
        apply_override(c, override)
    return settled(resolve(c))


def settled(config: Config) -> Config:
    """Returns the config with the model's settings chosen for this machine."""
    return dataclasses.replace(config, model=hardware.for_platform(config.model, jax.devices()[0].platform))


def random_batch(config: Config) -> dict[str, np.ndarray]:
    """Returns a packed batch of random tokens, three documents per row."""
    shape = config.train.batch_size, config.train.seq_len
    tokens = np.random.default_rng(0).integers(3, config.model.vocab_size, (shape[0], shape[1] + 1), dtype=np.int32)
    index = np.arange(shape[1])
    document = index * 3 // shape[1]
    first = np.array([np.flatnonzero(document == d)[0] for d in range(3)])
    rows = {"segment_ids": document + 1, "positions": index - first[document]}
    batch = {name: np.broadcast_to(row, shape).astype(np.int32) for name, row in rows.items()}
    return batch | {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "weights": np.ones(shape, np.float32),
    }


def jaxlm_step(config: Config, batches: Batches | None = None) -> Side:
    """Returns the product's own step, which carries its state along, on successive batches (one random batch if None)."""
    mesh = sharding.make_mesh(config.mesh)
    parts = parts_lib.make(config, mesh, lm.make)

    def to_device(batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        return sharding.to_global(batch, mesh, config.train.batch_size)

    batch = to_device(next(batches) if batches else random_batch(config))
    now, frozen = parts.create()
    with jax.set_mesh(mesh):
        compiled = parts.jit().lower(frozen, now, batch).compile()

    def run() -> jax.Array:
        nonlocal now
        now, metrics = compiled(frozen, now, to_device(next(batches)) if batches else batch)
        return metrics["loss"]

    return Side(run, jax.block_until_ready, compiled)


def hugging_face_step(config: Config, optimizer: str, compile_model: bool, batches: Batches | None = None) -> Side:
    """Returns a step of LlamaForCausalLM of the same shape and settings: forward, backward, clipping, AdamW."""
    import torch
    import transformers

    m, o = config.model, config.optim
    hf_config = transformers.LlamaConfig(
        hidden_size=m.d_model,
        num_hidden_layers=m.n_layers,
        num_attention_heads=m.n_heads,
        num_key_value_heads=m.n_kv_heads,
        head_dim=m.head_dim,
        intermediate_size=m.d_ff,
        vocab_size=m.vocab_size,
        max_position_embeddings=config.train.seq_len,
        tie_word_embeddings=m.tie_embeddings,
        rms_norm_eps=m.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": m.rope.theta},
        attn_implementation="sdpa",
        use_cache=False,
    )
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, m.dtype)
    model = transformers.LlamaForCausalLM(hf_config).to(device).train()
    fixed = torch_tokens(random_batch(config)["tokens"], device)
    adamw = torch.optim.AdamW(
        model.parameters(), lr=o.lr, betas=(o.b1, o.b2), eps=o.eps, weight_decay=o.weight_decay, **{optimizer: True}
    )
    forward = torch.compile(model) if compile_model else model

    def run() -> typing.Any:
        tokens = torch_tokens(next(batches)["tokens"], device) if batches else fixed
        with torch.autocast(device, dtype, enabled=dtype != torch.float32):
            loss = forward(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), o.clip_norm or float("inf"))
        adamw.step()
        adamw.zero_grad(set_to_none=True)
        return marked(loss.detach())

    return Side(run, wait_for)


def torch_tokens(ids: np.ndarray, device: str) -> typing.Any:
    """Returns ids on the peer's device, without waiting for the copy."""
    import torch

    tokens = torch.from_numpy(np.ascontiguousarray(ids)).long()
    return tokens.pin_memory().to(device, non_blocking=True) if device == "cuda" else tokens


def marked(loss: typing.Any) -> tuple:
    """Returns a queued loss and an event after it, so that one step can be waited for while the next is queued."""
    import torch

    if not loss.is_cuda:
        return loss, None
    event = torch.cuda.Event()
    event.record()
    return loss, event


def wait_for(queued: tuple) -> typing.Any:
    """Blocks until a marked step is done, but not for later steps; returns the loss."""
    loss, event = queued
    if event is not None:
        event.synchronize()
    return loss


def timed(side: Side) -> tuple[float, float]:
    """Returns (seconds of one step alone, its loss)."""
    start = time.perf_counter()
    loss = side.wait(side.run())
    return time.perf_counter() - start, float(loss)


class Apart:
    """A side in its own process, so that the two sides share no threads and no memory."""

    def __init__(self, make: typing.Callable[..., Side], *args: typing.Any):
        spawn = multiprocessing.get_context("spawn")
        self._pool = futures.ProcessPoolExecutor(1, mp_context=spawn, initializer=_begin, initargs=(make, args))

    def timed(self) -> tuple[float, float]:
        """Returns (seconds of one step alone, its loss)."""
        return self._pool.submit(_timed_here).result()


_here: list[Side] = []  # this process's side, in a process of Apart


def _begin(make: typing.Callable[..., Side], args: tuple) -> None:
    _here.append(make(*args))


def _timed_here() -> tuple[float, float]:
    return timed(_here[0])


def versions(peer: bool) -> str:
    """Returns a line with the versions that ran."""
    names = f"jax {jax.__version__} on {jax.devices()[0].device_kind} x {jax.device_count()}"
    if peer:
        import torch
        import transformers

        names += (
            f", torch {torch.__version__} ({torch.get_num_threads()} threads), transformers {transformers.__version__}"
        )
    return names


def main() -> None:
    """Prints tokens per second (median), and with a peer the ratio of every pair."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", choices=("none", "hf", "jaxlm"), default="none")
    parser.add_argument("--optimizer", choices=("fused", "foreach"), default="fused", help="of the peer's AdamW")
    parser.add_argument("--eager", action="store_true", help="the peer without torch.compile")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq_len", type=int, default=512)
    parser.add_argument("--steps", type=int, default=7, help="timed steps of each")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a key of configs/base.py")
    parser.add_argument("--peer_set", action="append", default=[], metavar="KEY=VALUE", help="of --peer=jaxlm")
    parser.add_argument("--smallest", action="store_true", help="a tiny model and one step: to see that it works")
    args = parser.parse_args()
    if args.smallest:
        args.batch, args.seq_len, args.steps, args.eager, args.set = 2, 32, 1, True, [*SMALLEST, *args.set]
    if min(args.batch, args.seq_len, args.steps) < 1:
        parser.error("--batch, --seq_len and --steps must be at least 1")
    if args.peer == "hf" and not importlib.util.find_spec("transformers"):
        parser.error("the peer is not installed: pip install -e '.[parity]'")
    try:
        config = make_config(args.batch, args.seq_len, args.set)
        other = make_config(args.batch, args.seq_len, [*args.set, *args.peer_set])
    except ConfigError as error:
        parser.error(str(error))
    sides = {"jaxlm": functools.partial(timed, jaxlm_step(config))}
    if args.peer == "hf":
        sides["hf"] = Apart(hugging_face_step, config, args.optimizer, not args.eager).timed
    elif args.peer == "jaxlm":
        sides["peer"] = functools.partial(timed, jaxlm_step(other))
    print(versions("hf" in sides))
    for name, side in sides.items():
        losses = [f"{side()[1]:.4f}" for _ in range(2)]  # compiles; random tokens start at log(vocabulary)
        print(f"{name}: first losses {' '.join(losses)}", flush=True)
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(args.steps):
        for name, side in sides.items():
            times[name].append(side()[0])
    tokens = args.batch * args.seq_len
    for name, seconds in times.items():
        spread = f"{tokens / max(seconds):.0f} to {tokens / min(seconds):.0f}"
        print(f"{name}: {tokens / statistics.median(seconds):.0f} tokens/s (median of {args.steps}; {spread})")
    for name in sides.keys() - {"jaxlm"}:
        ratios = [peer / ours for ours, peer in zip(times["jaxlm"], times[name], strict=True)]
        pairs = " ".join(f"{ratio:.2f}" for ratio in ratios)
        print(f"jaxlm / {name}, pair by pair: {pairs}; median {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    main()
