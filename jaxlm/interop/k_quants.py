"""llama.cpp's K-quants Q4_K, Q5_K and Q6_K, written with numpy: the `gguf` package reads them, and writes none.

A block holds 256 weights of one row; its layout is that of ggml's block_q4_K, block_q5_K and block_q6_K (ggml-common.h). In
Q4_K and Q5_K 32 weights share a scale and a minimum of 6 bits each, in Q6_K 16 weights a scale of 8 bits. As in ggml-quants.c,
several ranges are tried for each group, and the scale that fits the rounded weights best (least squares) is kept.
Legend: N blocks, S groups of all blocks, G weights of a group.
"""

import numpy as np

BLOCK = 256  # weights
_AT_A_TIME = 512  # blocks, few enough for the CPU's cache
_WIDER = np.arange(-2, 1.1, 0.2)  # by how many steps a tried range is wider than that of the group's weights
_GROUPS = {"Q4_K": 32, "Q5_K": 32, "Q6_K": 16}


def kind(name: str, dtype: str, n_layers: int, tied: bool) -> str:
    """Returns the type of a matrix in a file of `dtype` ("q4_k_m", "q5_k_m", "q6_k"), by llama-quant.cpp's mixture.

    Args:
      name: of the matrix in GGUF.
      tied: True if the embedding is the output matrix too.
    """
    plain = dtype[:4].upper()
    if name == "output.weight" or (tied and name == "token_embd.weight"):
        return "Q6_K"
    if name.endswith("attn_qkv.weight"):
        return "Q5_K" if plain == "Q4_K" else "Q6_K"
    if name.endswith(("attn_v.weight", "ffn_down.weight")):
        layer, eighth = int(name.split(".")[1]), n_layers // 8
        if layer < eighth or layer >= 7 * n_layers // 8 or (layer - eighth) % 3 == 2:
            return "Q6_K"
    return plain


def quantize(rows: np.ndarray, kind: str) -> np.ndarray:
    """Returns the blocks of a matrix, uint8 [rows, bytes]. `kind`: "Q4_K", "Q5_K" or "Q6_K"; 256 must divide its columns."""
    blocks_NxB = np.ascontiguousarray(rows, np.float32).reshape(-1, BLOCK)
    parts = []
    for start in range(0, len(blocks_NxB), _AT_A_TIME):
        # Groups along the last axis: sums over a group's weights then add whole rows.
        x_GxS = np.ascontiguousarray(blocks_NxB[start : start + _AT_A_TIME].reshape(-1, _GROUPS[kind]).T)
        parts.append(_six_bits(x_GxS) if kind == "Q6_K" else _with_minimum(x_GxS, 4 if kind == "Q4_K" else 5))
    return np.concatenate(parts).reshape(len(rows), -1)


def _with_minimum(x_GxS: np.ndarray, bits: int) -> np.ndarray:
    """Returns blocks of Q4_K or Q5_K: weight = d * scale * q - dmin * minimum."""
    fitted = _fit_with_minimum(x_GxS, 2**bits - 1)
    (d, scale), (dmin, least) = (_shared(y_S.reshape(-1, 8), 0, 63) for y_S in fitted)
    a_S, b_S = ((half.astype(np.float32) * six).ravel() for half, six in ((d, scale), (dmin, least)))
    q_GxS = _rounded((x_GxS + b_S) / _or_one(a_S), 0, 2**bits - 1)
    q_Nx8xG = q_GxS.astype(np.uint8).T.reshape(-1, 8, 32)
    low, high = q_Nx8xG & 15, []
    if bits == 5:
        high = [np.packbits(q_Nx8xG >> 4, axis=1, bitorder="little").reshape(-1, 32)]
    scale, least = scale.view(np.uint8), least.view(np.uint8)
    sixes = [six[:, :4] | six[:, 4:] >> 4 << 6 for six in (scale, least)]
    sixes.append(scale[:, 4:] & 15 | (least[:, 4:] & 15) << 4)
    codes = (low[:, 0::2] | low[:, 1::2] << 4).reshape(-1, 128)
    return np.concatenate([d.view(np.uint8), dmin.view(np.uint8), *sixes, *high, codes], axis=1)


def _fit_with_minimum(x_GxS: np.ndarray, top: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns (scale, minimum >= 0) of each group, for x = scale * q - minimum and q from 0 to `top`."""
    n, sum_x = len(x_GxS), x_GxS.sum(0)
    low = np.minimum(x_GxS.min(0), 0)
    shifted, width = x_GxS - low, _or_one(x_GxS.max(0) - low)
    scale, least, best = np.zeros_like(low), -low, np.full_like(low, np.inf)
    for wider in _WIDER:
        q = _rounded(shifted * ((top + wider) / width).astype(np.float32), 0, top)
        sum_q, sum_qq, sum_qx = q.sum(0), np.einsum("gs,gs->s", q, q), np.einsum("gs,gs->s", q, x_GxS)
        a = (n * sum_qx - sum_x * sum_q) / _or_one(n * sum_qq - sum_q**2)
        b = (a * sum_q - sum_x) / n
        a, b = np.where(b < 0, sum_qx / _or_one(sum_qq), a), np.maximum(b, 0)
        # The squared error, without the sum of x * x.
        error = a * a * sum_qq + n * b * b - 2 * (a * b * sum_q + a * sum_qx - b * sum_x)
        better = error < best
        scale, least, best = (np.where(better, *y) for y in ((a, scale), (b, least), (error, best)))
    return scale, least


def _six_bits(x_GxS: np.ndarray) -> np.ndarray:
    """Returns blocks of Q6_K: weight = d * scale * q, q from -32 to 31."""
    peak = np.take_along_axis(x_GxS, np.abs(x_GxS).argmax(0)[None], 0)[0]
    scale, best = np.zeros_like(peak), np.zeros_like(peak)
    for wider in _WIDER:
        q = _rounded(x_GxS * (-(32 + wider) / _or_one(peak)).astype(np.float32), -32, 31)
        sum_qx = np.einsum("gs,gs->s", q, x_GxS)
        a = sum_qx / _or_one(np.einsum("gs,gs->s", q, q))
        better = a * sum_qx > best  # by which the squared error falls
        scale, best = np.where(better, a, scale), np.where(better, a * sum_qx, best)
    d, scale = _shared(scale.reshape(-1, 16), -128, 127)
    q_GxS = _rounded(x_GxS / _or_one((d.astype(np.float32) * scale).ravel()), -32, 31) + 32
    q = q_GxS.astype(np.uint8).T.reshape(-1, 2, 4, 32)  # each half of a block: four runs of 32 weights
    low, high = q & 15, q >> 4 << np.array([0, 2, 4, 6], np.uint8)[:, None]
    codes = [(low[:, :, :2] | low[:, :, 2:] << 4).reshape(-1, 128), high.sum(2, dtype=np.uint8).reshape(-1, 64)]
    return np.concatenate([*codes, scale.view(np.uint8), d.view(np.uint8)], axis=1)


def _shared(y_NxG: np.ndarray, low: int, high: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns (d, float16 [N, 1], integers from `low` to `high`) for y = d * integer."""
    peak = np.take_along_axis(y_NxG, np.abs(y_NxG).argmax(1)[:, None], 1) / (low or high)
    # Never 0, or weights near 1e-5 would keep their minimum and lose their scale.
    d = np.copysign(np.maximum(np.abs(peak), 2.0**-24), peak).astype(np.float16)
    return d, _rounded(y_NxG / d, low, high).astype(np.int8)


def _rounded(x: np.ndarray, low: int, high: int) -> np.ndarray:
    return np.rint(x, out=x).clip(low, high, out=x)


def _or_one(x: np.ndarray) -> np.ndarray:
    """Returns float32 divisors: 1 in place of 0."""
    x = x.astype(np.float32, copy=False)
    return np.where(x == 0, np.float32(1), x)
