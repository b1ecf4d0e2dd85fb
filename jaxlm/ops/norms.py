"""Normalisations over the last axis, with statistics in float32.

Legend: ... any leading axes, D model (the axis that is normalised).
"""

import jax
import jax.numpy as jnp


def rms_norm(x: jax.Array, scale_D: jax.Array, eps: float = 1e-5) -> jax.Array:
    """Returns RMSNorm of x (Zhang and Sennrich 2019, arXiv:1910.07467), as in Hugging Face's LlamaRMSNorm.

    Args:
      x: [..., D], any float dtype.
      scale_D: [D], the learned gain.
      eps: added to the mean square.

    Returns:
      [..., D] in x.dtype; mean square, rsqrt and the gain are computed in float32.

    Raises:
      ValueError: if scale_D is not of shape [D].
    """
    _check_width(x, scale_D, "scale")
    x32 = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * inverse * scale_D.astype(jnp.float32)).astype(x.dtype)


def layer_norm(x: jax.Array, scale_D: jax.Array, bias_D: jax.Array | None = None, eps: float = 1e-5) -> jax.Array:
    """Returns LayerNorm of x (Ba et al. 2016, arXiv:1607.06450), as in torch.nn.LayerNorm.

    Args:
      x: [..., D], any float dtype.
      scale_D: [D], the learned gain.
      bias_D: [D] or None for no shift.
      eps: added to the (biased) variance.

    Returns:
      [..., D] in x.dtype; mean, variance, gain and shift are computed in float32.

    Raises:
      ValueError: if scale_D or bias_D is not of shape [D].
    """
    _check_width(x, scale_D, "scale")
    x32 = x.astype(jnp.float32)
    centred = x32 - jnp.mean(x32, axis=-1, keepdims=True)
    inverse = jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + eps)
    y = centred * inverse * scale_D.astype(jnp.float32)
    if bias_D is not None:
        _check_width(x, bias_D, "bias")
        y = y + bias_D.astype(jnp.float32)
    return y.astype(x.dtype)


def _check_width(x: jax.Array, vector_D: jax.Array, name: str) -> None:
    if vector_D.shape != x.shape[-1:]:
        raise ValueError(f"{name} has shape {vector_D.shape}, but the last axis of x is {x.shape[-1]}")
