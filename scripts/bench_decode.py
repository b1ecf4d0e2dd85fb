"""Measures how fast text is generated, alone or in pairs with Hugging Face: `python scripts/bench_decode.py --peer=hf`.

The default is the 32M Llama (8 layers, d 512, 8/4 heads, SwiGLU 1408, vocabulary 16,384, tied) in float32 on the CPU,
greedy, 8 prompts of 32 tokens with 256 new tokens each. The peer is transformers' `generate` with its cache, on the same
weights in the same process; its runs alternate with ours, so that both meet the same noise, and its tokens are compared
with ours. `--weights=int8` quantises ours. Any key of configs/base.py can be set: `--set=model.dtype=bfloat16`.
`--smallest` runs everything on a tiny model, in seconds.
"""

import argparse
import importlib.util
import statistics
import time
import typing

import jax
import numpy as np
from bench_step import SMALLEST

from jaxlm import models
from jaxlm.config import Config, ModelConfig, resolve
from jaxlm.config.config_files import apply_override
from jaxlm.configs import base
from jaxlm.models import quantized
from jaxlm.models.decode import generate, schedule
from jaxlm.models.decode.engine import Engine
from jaxlm.models.transformer import Transformer

Run = typing.Callable[[], list[list[int]]]


def make_config(overrides: list[str], new: int) -> Config:
    """Returns the config: the 32M Llama in float32, greedy, `new` tokens per row, with overrides KEY=VALUE."""
    c = base.get_config()
    c.sample.max_new_tokens, c.sample.temperature, c.sample.top_k, c.sample.top_p = new, 0.0, 0, 1.0
    c.model.n_kv_heads, c.model.vocab_size, c.model.dtype, c.model.max_seq_len = 4, 16384, "float32", 2048
    c.data.dir = "unused"
    for override in overrides:
        apply_override(c, override)
    return resolve(c)


def random_params(model: Transformer, seed: int) -> dict:
    """Returns normally distributed weights, with norms at 1."""
    rng = np.random.default_rng(seed)

    def draw(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        values = rng.normal(0, 0.02, leaf.shape) if len(leaf.shape) > 1 else np.ones(leaf.shape)
        return jax.numpy.asarray(values, leaf.dtype)

    return jax.tree.map(draw, models.abstract_params(model))


def hugging_face(config: ModelConfig, params: dict, prompts: list[list[int]], new: int, threads: int) -> Run:
    """Returns a run of transformers' `generate`, greedy, with its cache, without early stops."""
    import torch
    import transformers

    from jaxlm.devices import tree
    from jaxlm.interop import hf_config, leaves

    torch.set_num_threads(threads)
    fields = hf_config.content(config)
    kind = getattr(transformers, fields.pop("architectures")[0])
    peer = kind(transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)).eval()
    ours, state = {name: np.asarray(leaf, np.float32) for name, leaf in tree.named_leaves(params)}, {}
    for tensor in leaves.tensors(config):
        state[tensor.name] = torch.from_numpy(tensor.from_leaves([ours[leaf] for leaf in tensor.leaves]).copy())
    peer.load_state_dict(state, strict=False)
    ids = torch.tensor(prompts)
    settings = {"do_sample": False, "use_cache": True, "eos_token_id": None, "pad_token_id": 0}
    lengths = {"min_new_tokens": new, "max_new_tokens": new}

    def run() -> list[list[int]]:
        with torch.inference_mode():
            out = peer.generate(ids, attention_mask=torch.ones_like(ids), **settings, **lengths)
        return out[:, ids.shape[1] :].tolist()

    return run


def measure(runs: dict[str, Run], repeats: int, tokens: int) -> dict[str, list[float]]:
    """Returns tokens per second of each, from alternating runs, after a warm-up run of each."""
    outputs = {name: run() for name, run in runs.items()}
    if "hf" in outputs:
        agree = np.mean(np.array(outputs["hf"]) == np.array(outputs["jaxlm"]))
        print(f"greedy tokens that agree with Hugging Face: {agree:.1%}")
    speeds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            speeds[name].append(tokens / (time.perf_counter() - start))
        print("  ".join(f"{name} {values[-1]:.0f} tokens/s" for name, values in speeds.items()), flush=True)
    return speeds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", choices=["hf"], help="measure Hugging Face generate in turn")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=32, help="tokens of each prompt")
    parser.add_argument("--new", type=int, default=256, help="new tokens of each row")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--weights", choices=["float", "int8"], default="float", help="of jaxlm's model")
    parser.add_argument("--threads", type=int, default=2, help="of PyTorch")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--smallest", action="store_true", help="a tiny model, two tokens: to see that it works")
    args = parser.parse_args()
    if args.smallest:
        args.batch, args.prompt, args.new, args.repeats, args.set = 2, 4, 2, 1, [*SMALLEST, *args.set]
    if args.peer and not importlib.util.find_spec("transformers"):
        parser.error("the peer is not installed: pip install -e '.[parity]'")
    config = make_config(args.set, args.new)
    model = models.build(config.model, "xla")
    params = random_params(model, 0)
    prompts = np.random.default_rng(1).integers(3, config.model.vocab_size, (args.batch, args.prompt)).tolist()
    variables = {"params": params}
    if args.weights == "int8":
        variables = quantized.in_int8(model, {"params": random_params(model, 0)})  # takes what it is given
    engine = Engine(model, variables, prefix_bytes=0)

    def run() -> list[list[int]]:
        drawn = schedule.tokens_of(engine, generate.asks(prompts, config.sample))
        return [[token.id for token in tokens] for tokens in drawn]

    runs: dict[str, Run] = {"jaxlm": run}
    if args.peer:
        runs["hf"] = hugging_face(config.model, params, prompts, args.new, args.threads)
    speeds = measure(runs, args.repeats, args.batch * args.new)
    for name, values in speeds.items():
        print(f"{name}: median {statistics.median(values):.0f} tokens/s, best {max(values):.0f}")
    if args.peer:
        pairs = [ours / theirs for ours, theirs in zip(speeds["jaxlm"], speeds["hf"], strict=True)]
        print(f"ratio jaxlm / hf: median of pairs {statistics.median(pairs):.2f}, lowest {min(pairs):.2f}")


if __name__ == "__main__":
    main()
