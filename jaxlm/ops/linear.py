"""Products of activations with weights."""

import math

import jax
import jax.numpy as jnp


def dense(x: jax.Array, kernel: jax.Array, axes: int = 1) -> jax.Array:
    """Contracts the last `axes` dimensions of x with the first `axes` of the kernel: `jnp.tensordot`, as one 2-D product.

    XLA's CPU backend transposes the whole gradient for a 3-D product; flat, forward and backward of a SwiGLU of 512 x
    1408 on 4096 tokens take three quarters of the time (dev/LOG.md, 2026-11-20).

    Args:
      x: (..., *contracted).
      kernel: (*contracted, *out).

    Returns:
      (..., *out).
    """
    lead, out = x.shape[: x.ndim - axes], kernel.shape[axes:]
    inner = math.prod(kernel.shape[:axes])
    y = jnp.dot(x.reshape(math.prod(lead), inner), kernel.reshape(inner, math.prod(out)))
    return y.reshape(*lead, *out)
