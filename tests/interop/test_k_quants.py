"""K-quants, as the `gguf` package reads them back: errors, layout, blocks that are hard, and llama.cpp's mixture."""

import time

import gguf
import numpy as np
import pytest

from jaxlm.interop import k_quants

# The most relative error of normal weights (root mean square), and the bits of a weight in a block.
KINDS = {"Q4_K": (0.073, 4.5), "Q5_K": (0.037, 5.5), "Q6_K": (0.018, 6.5625)}
RNG = np.random.default_rng(0)


def read_back(rows: np.ndarray, kind: str) -> np.ndarray:
    coded = k_quants.quantize(rows, kind)
    assert coded.dtype == np.uint8
    assert coded.size * 8 == rows.size * KINDS[kind][1]
    return gguf.quants.dequantize(coded, gguf.GGMLQuantizationType[kind])


def error(rows: np.ndarray, back: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(rows - back)) / np.mean(np.square(rows))))


@pytest.mark.parametrize("kind", KINDS)
def test_every_block_of_normal_weights_is_read_back(kind):
    rows = RNG.standard_normal((64, 1024), np.float32) * 10.0 ** RNG.uniform(-3, 1, (64, 1)).astype(np.float32)
    rows = np.concatenate([rows, rows + 3 * np.abs(rows).max(1, keepdims=True)])  # all of one sign too
    back, bound = read_back(rows, kind), KINDS[kind][0]
    blocks, read = rows[:64].reshape(-1, 256), back[:64].reshape(-1, 256)
    assert error(blocks / np.std(blocks, 1, keepdims=True), read / np.std(blocks, 1, keepdims=True)) < bound
    # No block, and no weight, is out of place.
    assert (np.sqrt(np.mean(np.square(blocks - read), 1)) < 1.5 * bound * np.std(blocks, 1)).all()
    assert error(rows[64:], back[64:]) < 0.6 * bound


@pytest.mark.parametrize("kind", KINDS)
def test_hard_blocks_stay_finite_and_near(kind):
    # Of a block of 256, group g is g times as large; a row of zeros; rows of one value; one large weight; tiny weights.
    by_group = RNG.standard_normal((1, 16, 16)).astype(np.float32) * np.arange(16, dtype=np.float32)[:, None]
    hard = {
        "groups": (by_group.reshape(1, 256), 1.2 * KINDS[kind][0]),
        "zeros": (np.zeros((2, 256), np.float32), 0),
        "one value": (np.array([[3.0], [-3.0]], np.float32).repeat(256, 1), 1e-3),
        "a peak": (np.eye(4, 256, dtype=np.float32) * -7, 1e-2),
        "near 1e-5": (RNG.standard_normal((4, 256)).astype(np.float32) * 1e-5, 0.15),
        "below float16": (RNG.standard_normal((4, 256)).astype(np.float32) * 1e-12, 1),
    }
    for name, (rows, most) in hard.items():
        back = read_back(rows, kind)
        assert np.isfinite(back).all(), name
        assert np.abs(back - rows).max() == 0 if most == 0 else error(rows, back) <= most, name


@pytest.mark.parametrize("kind", KINDS)
def test_two_million_weights_take_a_second(kind):
    rows = RNG.standard_normal((256, 2048), np.float32)
    seconds = []
    for _ in range(3):
        began = time.process_time()
        k_quants.quantize(rows, kind)
        seconds.append(time.process_time() - began)
    assert rows.size / min(seconds) > 2e6


def test_the_mixture_is_llama_cpps():
    """llama-quant.cpp: `use_more_bits` of 12 layers is true for 0, then every third, then the last two."""
    more = [0, 3, 6, 9, 10, 11]
    for dtype, plain in {"q4_k_m": "Q4_K", "q5_k_m": "Q5_K"}.items():
        for part in ("attn_v", "ffn_down"):
            kinds = [k_quants.kind(f"blk.{i}.{part}.weight", dtype, 12, False) for i in range(12)]
            assert kinds == ["Q6_K" if i in more else plain for i in range(12)]
        for name in ("blk.0.attn_q.weight", "blk.0.attn_k.weight", "blk.0.attn_output.weight", "blk.0.ffn_up.weight"):
            assert k_quants.kind(name, dtype, 12, False) == plain
        assert k_quants.kind("token_embd.weight", dtype, 12, False) == plain
        assert k_quants.kind("token_embd.weight", dtype, 12, True) == "Q6_K"
        assert k_quants.kind("output.weight", dtype, 12, False) == "Q6_K"
        assert k_quants.kind("blk.1.attn_qkv.weight", dtype, 12, True) == {"Q4_K": "Q5_K", "Q5_K": "Q6_K"}[plain]
    assert k_quants.kind("blk.1.attn_v.weight", "q6_k", 12, False) == "Q6_K"
