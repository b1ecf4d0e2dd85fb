"""Rotary position embeddings in Hugging Face's half-split order. Legend: B batch, T tokens, N heads, H head dim."""

import math

import jax
import jax.numpy as jnp
import numpy as np


def rope_frequencies(
    head_dim: int,
    theta: float,
    *,
    scaling: str = "none",
    factor: float = 1.0,
    low_freq_factor: float = 1.0,
    high_freq_factor: float = 4.0,
    original_max_len: int = 8192,
) -> np.ndarray:
    """Returns the angular frequency of each pair of channels, in radians per token: float32 numpy [H // 2].

    Su et al. 2021 (arXiv:2104.09864); the scalings are those of transformers' modeling_rope_utils.py:
    "linear" divides every frequency by `factor` (Chen et al. 2023, arXiv:2306.15595); "llama3" divides the low
    frequencies by `factor`, keeps the high ones, and blends those between (Llama 3.1): wavelengths longer than
    original_max_len / low_freq_factor tokens are scaled; those shorter than original_max_len / high_freq_factor are not.
    """
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    inv_freq = (1.0 / np.power(np.float32(theta), exponent)).astype(np.float32)
    if scaling == "linear":
        inv_freq = inv_freq / np.float32(factor)
    elif scaling == "llama3":
        inv_freq = _llama3(inv_freq, factor, low_freq_factor, high_freq_factor, original_max_len)
    return inv_freq.astype(np.float32)


def _llama3(inv_freq: np.ndarray, factor: float, low: float, high: float, original_max_len: int) -> np.ndarray:
    wavelength = 2 * math.pi / inv_freq
    smooth = (original_max_len / wavelength - low) / (high - low)
    blended = (1 - smooth) * inv_freq / factor + smooth * inv_freq
    scaled = np.where(wavelength > original_max_len / low, inv_freq / factor, blended)
    return np.where(wavelength < original_max_len / high, inv_freq, scaled)


def rope_tables(positions_BxT: jax.Array, inv_freq: np.ndarray | jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns (cos, sin) of every angle, each float32 [B, T, 1, H // 2]. Compute them once per step for all layers.

    `positions_BxT` may have B = 1 to broadcast.
    """
    angles = positions_BxT.astype(jnp.float32)[:, :, None, None] * jnp.asarray(inv_freq, jnp.float32)
    # A loop, because its result is stored: else XLA computes cos and sin again in every layer, for every head, forward and
    # backward (an optimization barrier does not help: the CPU compiler drops it first).
    cos, sin = jax.lax.map(lambda is_sin: jnp.where(is_sin, jnp.sin(angles), jnp.cos(angles)), jnp.arange(2) == 1)
    return cos, sin


def rotate(x_BxTxNxH: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Returns x rotated by tables from `rope_tables`, in x's dtype. Channel i is paired with channel i + H // 2."""
    x1, x2 = jnp.split(x_BxTxNxH.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1)
    return rotated.astype(x_BxTxNxH.dtype)
