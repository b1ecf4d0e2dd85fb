"""How fast a training step is, alone or in pairs with Hugging Face: `python scripts/bench_step.py --peer=hf`.

Times jaxlm's own compiled train step on random tokens; the defaults are the 32M Llama (8 layers, d 512, 8/4 heads,
SwiGLU 1408, vocabulary 16,384, tied), float32, 8 rows of 512 tokens in three documents each. The peer is transformers'
LlamaForCausalLM of the same shape in the same process, under torch.compile with AdamW and gradient clipping, its
steps alternating with ours so that both meet the same noise. It attends over whole rows (no documents), which is less
work than ours. Any key of configs/base.py can be set: `--set=loss.tile_tokens=512`.
"""

import argparse
import statistics
import time
import typing

import jax
import numpy as np

from jaxlm import models, sharding
from jaxlm.config import Config, resolve
from jaxlm.config_files import apply_override
from jaxlm.configs import base
from jaxlm.objectives import lm
from jaxlm.programs import setup
from jaxlm.train import optim, state, step

Step = typing.Callable[[], float]  # runs one step to its end; returns the loss


def make_config(batch: int, seq_len: int, overrides: list[str]) -> Config:
    """The 32M Llama, with any key of configs/base.py set by KEY=VALUE."""
    c = base.get_config()
    c.model.n_kv_heads = 4
    c.train.batch_size, c.train.seq_len = batch, seq_len
    c.data.dir = "unused"  # the tokens are random
    for override in overrides:
        apply_override(c, override)
    return setup.for_platform(resolve(c), jax.devices()[0].platform)


def random_batch(config: Config) -> dict[str, np.ndarray]:
    """One packed batch of random tokens, three documents a row."""
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


def jaxlm_step(config: Config) -> Step:
    """The product's own step on one batch, its state carried along."""
    mesh = sharding.make_mesh(config.mesh)
    model = setup.build_model(config)
    tx = optim.make(config.optim, models.abstract_params(model))
    shardings = state.shardings(state.abstract(model, tx), model, mesh, config.optim.offload)
    pure = step.make(config, lm.make(model, config.model, config.loss), tx, optim.schedule(config.optim, 1000))
    compiled = step.jit(pure, shardings, mesh)
    batch = sharding.to_global(random_batch(config), mesh, config.train.batch_size)
    now = state.create(model, tx, shardings, config.seed)

    def run() -> float:
        nonlocal now
        with jax.set_mesh(mesh):
            now, metrics = compiled(now, batch)
        return float(metrics["loss"])

    return run


def hugging_face_step(config: Config, optimizer: str, compile_model: bool) -> Step:
    """LlamaForCausalLM of the same shape and numbers: forward, backward, clipping, AdamW."""
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
    device = "cuda" if jax.default_backend() == "gpu" else "cpu"
    dtype = getattr(torch, m.dtype)
    model = transformers.LlamaForCausalLM(hf_config).to(device).train()
    tokens = torch.from_numpy(random_batch(config)["tokens"]).long().to(device)
    adamw = torch.optim.AdamW(
        model.parameters(), lr=o.lr, betas=(o.b1, o.b2), eps=o.eps, weight_decay=o.weight_decay, **{optimizer: True}
    )
    forward = torch.compile(model) if compile_model else model

    def run() -> float:
        with torch.autocast(device, dtype, enabled=dtype != torch.float32):
            loss = forward(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), o.clip_norm or float("inf"))
        adamw.step()
        adamw.zero_grad(set_to_none=True)
        return float(loss.detach())

    return run


def timed(run: Step) -> float:
    """Seconds of one step."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def versions(peer: bool) -> str:
    """What ran, in one line."""
    names = f"jax {jax.__version__} on {jax.devices()[0].device_kind} x {jax.device_count()}"
    if peer:
        import torch
        import transformers

        names += (
            f", torch {torch.__version__} ({torch.get_num_threads()} threads), transformers {transformers.__version__}"
        )
    return names


def main() -> None:
    """Prints tokens a second (median), and with a peer the ratio of every pair."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", choices=("none", "hf"), default="none")
    parser.add_argument("--optimizer", choices=("fused", "foreach"), default="fused", help="of the peer's AdamW")
    parser.add_argument("--eager", action="store_true", help="the peer without torch.compile")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq_len", type=int, default=512)
    parser.add_argument("--steps", type=int, default=7, help="timed steps of each")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a key of configs/base.py")
    args = parser.parse_args()
    config = make_config(args.batch, args.seq_len, args.set)
    sides = {"jaxlm": jaxlm_step(config)}
    if args.peer == "hf":
        sides["hf"] = hugging_face_step(config, args.optimizer, not args.eager)
    print(versions("hf" in sides))
    for name, run in sides.items():
        losses = [f"{run():.4f}" for _ in range(2)]  # compiles; random tokens start at log(vocabulary)
        print(f"{name}: first losses {' '.join(losses)}", flush=True)
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(args.steps):
        for name, run in sides.items():
            times[name].append(timed(run))
    tokens = args.batch * args.seq_len
    for name, seconds in times.items():
        spread = f"{tokens / max(seconds):.0f} to {tokens / min(seconds):.0f}"
        print(f"{name}: {tokens / statistics.median(seconds):.0f} tokens/s (median of {args.steps}; {spread})")
    if "hf" in sides:
        ratios = [peer / ours for ours, peer in zip(times["jaxlm"], times["hf"], strict=True)]
        pairs = " ".join(f"{ratio:.2f}" for ratio in ratios)
        print(f"jaxlm / hf, pair by pair: {pairs}; median {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    main()
