"""Computes the FLOPs per trained token, and finds the peak FLOP/s of devices in configs/prices.toml.

MFU (arXiv:2204.02311) = tokens per second x FLOPs per token / peak FLOP/s. There are two conventions. PaLM's counts
attention over all T x T pairs; the causal one counts half of them, which is what a causal kernel computes.

N counts the parameters by which a token is multiplied (`params.multiplied_params`). Of the 6N of pretraining, a forward pass
has 2N, the gradient of the activations 2N, and that of the weights 2N. Where the weights are frozen, the last 2N are not
computed. Where a step runs a reference too, a forward pass is added.
"""

import typing

from jaxlm.config import Config, ModelConfig
from jaxlm.plan import accelerators
from jaxlm.plan.params import multiplied_adapter_params, multiplied_params
from jaxlm.step.objectives import dpo


class FlopsPerToken(typing.NamedTuple):
    """FLOPs of all passes of a step for one token."""

    products: float  # 6N, or 4N with a frozen model: the products with weights
    palm: float  # + 12 L d T: attention over all T x T pairs
    causal: float  # + 6 L d T: attention over the pairs that a causal mask leaves


def flops_per_token(config: ModelConfig, seq_len: int) -> FlopsPerToken:
    return _flops(config, multiplied_params(config), seq_len, forward=1, backward=2)


def of(config: Config) -> FlopsPerToken:
    """Returns the FLOPs for one token of the config's kind of training: adapters, a reference, a policy's passes counted."""
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
    """Returns N: by how many of the model's parameters, without an adapter's, a token is multiplied."""
    return multiplied_params(config.model, head=config.program != "reward")


def draws(config: Config) -> bool:
    """True if the policy writes its batches itself: PPO and GRPO."""
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
    """Returns what `of` counts for the model, in words: ("6N", "12LdT"). An adapter's own FLOPs come to it."""
    of_model = of(config).products - 6.0 * multiplied_adapter_params(config.model, config.adapter)
    products = round(of_model / multiplied(config))
    return f"{products}N", f"{16 if reference(config) == 'each step' else 12}LdT"


def _flops(config: ModelConfig, params: int, seq_len: int, forward: int, backward: int) -> FlopsPerToken:
    """Of so many forward passes, and of a backward pass to activations (1), or to weights too (2); to none (0)."""
    products = 2.0 * (forward + backward) * params
    attention = float(config.n_layers * config.n_heads * config.head_dim * seq_len)
    attention *= 4 * forward + 8 * bool(backward)
    return FlopsPerToken(products, products + attention, products + attention / 2)


def peak_tflops(device_kind: str) -> float | None:
    """Returns the dense bf16 peak of one device, in TFLOP/s; None for CPUs and devices that prices.toml does not name."""
    prices = accelerators.load()
    return prices.peaks.get(prices.kind(device_kind))
