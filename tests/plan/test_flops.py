"""FLOPs per token in both conventions, and the table of peaks."""

import pytest
import tiny_models as tiny

from jaxlm.plan.flops import flops_per_token, peak_tflops


def test_one_billion_at_2048():
    shape = {"n_layers": 16, "d_model": 2048, "n_heads": 32, "n_kv_heads": 8, "d_ff": 8192, "vocab_size": 32005}
    flops = flops_per_token(tiny.model_config(**shape), 2048)
    assert [round(value / 1e9, 2) for value in flops] == [6.23, 7.04, 6.63]
    assert flops.products == 6 * 1_038_692_352
    assert flops.palm - flops.causal == flops.causal - flops.products


def test_attention_counts_head_dim_not_d_model():
    narrow = flops_per_token(tiny.model_config(head_dim=8), 100)
    wide = flops_per_token(tiny.model_config(head_dim=16), 100)
    assert wide.palm - wide.products == 2 * (narrow.palm - narrow.products)


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA L40S", 362),
        ("NVIDIA L4", 121),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 3060", 25.5),
        ("NVIDIA GeForce RTX 4070 SUPER", 71),
        ("NVIDIA B200", 2250),
        ("TPU v4", 275),
        ("TPU v5 lite", 197),
        ("TPU v5e", 197),
        ("TPU v5p", 459),
        ("TPU v6e", 918),
        ("cpu", None),
        ("NVIDIA RTX A4000", None),
    ],
)
def test_peaks(kind, peak):
    assert peak_tflops(kind) == peak
