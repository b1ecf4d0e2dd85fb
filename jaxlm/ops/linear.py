"""Products of activations with weights."""

import math

import jax
import jax.numpy as jnp

from jaxlm.sharding import axis_size


def dense(x: jax.Array, kernel: jax.Array, axes: int = 1) -> jax.Array:
    """Contracts the last `axes` dimensions of x with the first `axes` of the kernel: `jnp.tensordot`, as one 2-D product.

    XLA's CPU backend transposes the whole gradient for a 3-D product; flat, forward and backward of a SwiGLU of 512 x
    1408 on 4096 tokens take three quarters of the time (dev/LOG.md, 2026-11-20). Where tokens are split over devices,
    flat rows would have to be gathered: the product stays as it is.

    Args:
      x: (..., *contracted).
      kernel: (*contracted, *out).

    Returns:
      (..., *out).
    """
    if axis_size("context") > 1:
        return jnp.tensordot(x, kernel, axes)
    lead, out = x.shape[: x.ndim - axes], kernel.shape[axes:]
    inner = math.prod(kernel.shape[:axes])
    y = jnp.dot(x.reshape(math.prod(lead), inner), kernel.reshape(inner, math.prod(out)))
    return y.reshape(*lead, *out)
