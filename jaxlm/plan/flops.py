"""Floating-point operations per trained token, and what devices can do of them.

MFU (arXiv:2204.02311) = tokens per second x FLOPs per token / peak FLOPs per second, here in two conventions: PaLM's
counts attention over the whole square of T x T, the causal one over the half below the diagonal, which is what a
causal kernel computes.
"""

import re
import typing

from jaxlm.config import ModelConfig
from jaxlm.plan.params import count_params

# Dense bf16 peak in TFLOP/s by whole words of the device kind (`jax.Device.device_kind`), case ignored; the first match
# counts, so the longer names come first. Sources: the vendors' data sheets, without sparsity.
PEAK_TFLOPS = {
    "H200 NVL": 835.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H800": 989.0,
    "GB200": 2500.0,
    "B200": 2250.0,
    "A100": 312.0,
    "A800": 312.0,
    "A6000": 155.0,
    "A40": 150.0,
    "A10G": 70.0,
    "A10": 125.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "V100": 125.0,
    "T4": 65.0,
    "MI300X": 1307.0,
    "RTX 5090": 210.0,
    "RTX 4090": 165.0,
    "RTX 3090": 71.0,
    "TPU v4": 275.0,
    "TPU v5 lite": 197.0,
    "TPU v5e": 197.0,
    "TPU v5p": 459.0,
    "TPU v5": 459.0,
    "TPU v6 lite": 918.0,
    "TPU v6e": 918.0,
    "TPU v3": 123.0,
    "TPU v2": 45.0,
}


class FlopsPerToken(typing.NamedTuple):
    """FLOPs of forward and backward for one token."""

    six_n: float  # 6N: the products with weights
    palm: float  # 6N + 12 L d T: attention over all T x T pairs
    causal: float  # 6N + 6 L d T: attention over the pairs that a causal mask leaves


def flops_per_token(config: ModelConfig, seq_len: int) -> FlopsPerToken:
    """FLOPs of training on one token in rows of `seq_len`, N counting all parameters; d is n_heads * head_dim."""
    six_n = 6.0 * count_params(config)
    attention = float(config.n_layers * config.n_heads * config.head_dim * seq_len)
    return FlopsPerToken(six_n, six_n + 12 * attention, six_n + 6 * attention)


def peak_tflops(device_kind: str) -> float | None:
    """Dense bf16 peak of one device in TFLOP/s, None for CPUs and devices that the table does not hold."""
    matches = (peak for name, peak in PEAK_TFLOPS.items() if re.search(rf"\b{name}\b", device_kind, re.IGNORECASE))
    return next(matches, None)
