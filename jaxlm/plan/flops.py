"""Computes the FLOPs per trained token, and finds the peak FLOP/s of devices in configs/prices.toml.

MFU (arXiv:2204.02311) = tokens per second x FLOPs per token / peak FLOP/s. There are two conventions. PaLM's counts
attention over all T x T pairs; the causal one counts half of them, which is what a causal kernel computes.
"""

import re
import typing

from jaxlm.config import ModelConfig
from jaxlm.plan import accelerators
from jaxlm.plan.params import count_params


class FlopsPerToken(typing.NamedTuple):
    """FLOPs of the forward and the backward pass for one token."""

    six_n: float  # 6N: the products with weights
    palm: float  # 6N + 12 L d T: attention over all T x T pairs
    causal: float  # 6N + 6 L d T: attention over the pairs that a causal mask leaves


def flops_per_token(config: ModelConfig, seq_len: int) -> FlopsPerToken:
    """Returns the FLOPs of training on one token in rows of `seq_len`. N counts all parameters; d = n_heads * head_dim."""
    six_n = 6.0 * count_params(config)
    attention = float(config.n_layers * config.n_heads * config.head_dim * seq_len)
    return FlopsPerToken(six_n, six_n + 12 * attention, six_n + 6 * attention)


def peak_tflops(device_kind: str) -> float | None:
    """Returns the dense bf16 peak of one device, in TFLOP/s; None for CPUs and devices that prices.toml does not name."""
    peaks = accelerators.load().peaks
    for kind in sorted(peaks, key=len, reverse=True):  # "H200 NVL" before "H200"
        if re.search(rf"\b{kind}\b", device_kind, re.IGNORECASE):
            return peaks[kind]
    return None
