"""Normalisations over the last axis, D, with statistics in float32."""

import jax
import jax.numpy as jnp


def rms_norm(x: jax.Array, scale_D: jax.Array, eps: float = 1e-5) -> jax.Array:
    """Returns RMSNorm of x [..., D] (arXiv:1910.07467) in its dtype, computed in float32, as LlamaRMSNorm of Hugging Face."""
    x32 = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * inverse * scale_D.astype(jnp.float32)).astype(x.dtype)


def layer_norm(x: jax.Array, scale_D: jax.Array, bias_D: jax.Array | None = None, eps: float = 1e-5) -> jax.Array:
    """Returns LayerNorm of x [..., D] (arXiv:1607.06450) in its dtype, computed in float32, as torch.nn.LayerNorm."""
    x32 = x.astype(jnp.float32)
    centred = x32 - jnp.mean(x32, axis=-1, keepdims=True)
    inverse = jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + eps)
    y = centred * inverse * scale_D.astype(jnp.float32)
    if bias_D is not None:
        y = y + bias_D.astype(jnp.float32)
    return y.astype(x.dtype)
