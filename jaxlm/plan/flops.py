"""Counts parameters and FLOPs per trained token from the config, and finds the peak FLOP/s of devices in prices.toml.

MFU (arXiv:2204.02311) = tokens per second x FLOPs per token / peak FLOP/s. There are two conventions. PaLM's counts
attention over all T x T pairs; the causal one counts half of them, which is what a causal kernel computes.

N counts the parameters by which a token is multiplied (`multiplied_params`). Of the 6N of pretraining, a forward pass
has 2N, the gradient of the activations 2N, and the gradient of the weights 2N. Frozen weights save the last 2N. A reference
that runs in each step adds a forward pass.
"""

import math
import re
import typing

from jaxlm.config import CHAT_TOKENS, AdapterConfig, Config, ModelConfig
from jaxlm.plan import accelerators
from jaxlm.step.objectives import dpo


def count_params(config: ModelConfig) -> int:
    return sum(params_by_component(config).values())


def params_by_component(config: ModelConfig) -> dict[str, int]:
    """Returns the number of parameters by component: embed, pos_embed, attn, mlp, norm and head (0 if embeddings are tied)."""
    c = config
    gpt2 = c.family == "gpt2"
    d, heads, kv = c.d_model, c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
    bias = gpt2 or c.bias
    attn, mlp = (sum(math.prod(kernel) for kernel in kernels(c, part).values()) for part in ("attn", "mlp"))
    attn += (heads + 2 * kv) if bias or c.qkv_bias else 0
    attn += d if bias else 0
    mlp += ((1 if gpt2 else 2) * c.d_ff + d) if bias else 0
    norm = (2 * d if gpt2 else d) * (2 * c.n_layers + 1)
    norm += 2 * c.head_dim * c.n_layers if c.qk_norm else 0
    return {
        "embed": c.vocab_size * d,
        "pos_embed": c.max_seq_len * d if gpt2 else 0,
        "attn": c.n_layers * attn,
        "mlp": c.n_layers * mlp,
        "norm": norm,
        "head": 0 if c.tie_embeddings else d * c.vocab_size,
    }


def multiplied_params(config: ModelConfig, head: bool = True) -> int:
    """Returns the number of parameters that multiply each token: no lookup tables, and the head only if `head`."""
    parts = params_by_component(config)
    tied = parts["embed"] if config.tie_embeddings else 0
    return parts["attn"] + parts["mlp"] + parts["norm"] + head * (tied + parts["head"])


def kernels(config: ModelConfig, part: str = "") -> dict[str, tuple[int, int]]:
    """Returns name -> (inputs, outputs) of each kernel of one layer: `attn/q`. `part`: "attn" or "mlp"; "" for both."""
    c = config
    d, heads, kv = c.d_model, c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
    shapes = {"attn/q": (d, heads), "attn/k": (d, kv), "attn/v": (d, kv), "attn/o": (heads, d)}
    shapes |= {} if c.family == "gpt2" else {"mlp/gate": (d, c.d_ff)}
    shapes |= {"mlp/up": (d, c.d_ff), "mlp/down": (c.d_ff, d)}
    return {name: sizes for name, sizes in shapes.items() if name.startswith(part)}


def targets(config: ModelConfig, adapter: AdapterConfig) -> dict[str, tuple[int, int]]:
    """Returns the kernels of one layer that get a LoRA, as `kernels` does; {} for another kind of adapter."""
    patterns = adapter.targets if adapter.kind == "lora" else ()
    return {name: sizes for name, sizes in kernels(config).items() if any(re.fullmatch(t, name) for t in patterns)}


def trained_rows(adapter: AdapterConfig) -> int:
    """Returns the number of tokens whose rows of embedding and head are trained besides an adapter, or at their own rate."""
    if adapter.without_rows:
        return 0
    return len(CHAT_TOKENS) if adapter.rows == ("auto",) else len(adapter.rows)


def adapter_params(config: ModelConfig, adapter: AdapterConfig) -> int:
    """Returns the number of parameters of an adapter, with the trained rows of tokens; 0 without an adapter."""
    if adapter.kind == "none":
        return 0
    looked_up = adapter.prompt_tokens if adapter.kind == "prompt" else 0
    looked_up += 0 if config.tie_embeddings else trained_rows(adapter)
    return multiplied_adapter_params(config, adapter) + looked_up * config.d_model


def multiplied_adapter_params(config: ModelConfig, adapter: AdapterConfig) -> int:
    """Returns the number of an adapter's parameters that multiply each token: its kernels, the head's rows."""
    if adapter.kind == "none":
        return 0
    each = sum(adapter.rank * (inputs + outputs) for inputs, outputs in targets(config, adapter).values())
    return config.n_layers * each + trained_rows(adapter) * config.d_model


class FlopsPerToken(typing.NamedTuple):
    """FLOPs of all passes of a step for one token."""

    products: float  # 6N, or 4N with a frozen model: the products with weights
    palm: float  # + 12 L d T: attention over all T x T pairs
    causal: float  # + 6 L d T: attention over the pairs that a causal mask leaves


def flops_per_token(config: ModelConfig, seq_len: int) -> FlopsPerToken:
    return _flops(config, multiplied_params(config), seq_len, forward=1, backward=2)


def of(config: Config) -> FlopsPerToken:
    """Returns the FLOPs per token of the config's kind of training, with adapters, a reference and a policy's passes."""
    frozen = config.adapter.kind != "none"
    forward = 2 if reference(config) == "each step" else 1
    per_token = _flops(config.model, multiplied(config), config.train.seq_len, forward, backward=1 if frozen else 2)
    more = 6.0 * multiplied_adapter_params(config.model, config.adapter)
    if not draws(config):
        return FlopsPerToken(*(value + more for value in per_token))
    judged, epochs = judging(config), config.policy.epochs
    passes = 1 + config.policy.reference
    return FlopsPerToken(*(epochs * (a + more) + passes * b for a, b in zip(per_token, judged, strict=True)))


def multiplied(config: Config) -> int:
    """Returns N: the number of the model's parameters, without an adapter's, that multiply a token."""
    return multiplied_params(config.model, head=config.program != "reward")


def draws(config: Config) -> bool:
    """True if the policy generates its batches itself: PPO and GRPO."""
    return config.program in ("ppo", "grpo")


def judging(config: Config) -> FlopsPerToken:
    return _flops(config.model, multiplied(config), config.train.seq_len, forward=1, backward=0)


def reference(config: Config) -> str:
    """Returns when a reference is run: "each step", "once" before step 0, "each batch" before its updates; "" if never."""
    if draws(config):
        return "each batch" if config.policy.reference else ""
    if config.program != "dpo" or not dpo.has_reference(config.dpo):
        return ""
    return "once" if dpo.judged(config) else "each step"


def formula(config: Config) -> tuple[str, str]:
    """Returns the terms that `of` counts for the model, without an adapter's own, such as ("6N", "12LdT")."""
    of_model = of(config).products - 6.0 * multiplied_adapter_params(config.model, config.adapter)
    products = round(of_model / multiplied(config))
    return f"{products}N", f"{16 if reference(config) == 'each step' else 12}LdT"


def _flops(config: ModelConfig, params: int, seq_len: int, forward: int, backward: int) -> FlopsPerToken:
    """Returns the FLOPs of `forward` forward passes and a backward pass: none (0), to activations (1), to weights too (2)."""
    products = 2.0 * (forward + backward) * params
    attention = float(config.n_layers * config.n_heads * config.head_dim * seq_len)
    attention *= 4 * forward + 8 * bool(backward)
    return FlopsPerToken(products, products + attention, products + attention / 2)


def peak_tflops(device_kind: str) -> float | None:
    """Returns the dense bf16 peak of one device, in TFLOP/s; None for CPUs and devices that prices.toml does not name."""
    prices = accelerators.load()
    return prices.peaks.get(prices.kind(device_kind))
