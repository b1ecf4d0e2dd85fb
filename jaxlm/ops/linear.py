"""The product of activations with weights."""

import math

import jax
import jax.numpy as jnp

from jaxlm.sharding import axis_size


def dense(x: jax.Array, kernel: jax.Array, axes: int = 1, dtype: jnp.dtype | None = None) -> jax.Array:
    """Multiplies x by a kernel over the last `axes` dimensions of x: `jnp.tensordot(x, kernel, axes)`.

    It is computed as one product of matrices, because XLA's CPU backend transposes the whole gradient of a 3-D product:
    as matrices a SwiGLU of 512 x 1408 on 4096 tokens, forward and backward, takes a quarter less time (dev/LOG.md,
    2026-11-20). If context splits the tokens it stays a tensordot, since flat rows would have to be gathered.

    Args:
      x: the activations (..., *contracted).
      kernel: the kernel (*contracted, *out).
      axes: the number of contracted dimensions.
      dtype: the type of the result; None for that of x.

    Returns:
      (..., *out).
    """
    if axis_size("context") > 1:
        return jnp.tensordot(x, kernel, axes, preferred_element_type=dtype)
    lead, out = x.shape[: x.ndim - axes], kernel.shape[axes:]
    inner = math.prod(kernel.shape[:axes])
    y = jnp.dot(x.reshape(math.prod(lead), inner), kernel.reshape(inner, math.prod(out)), preferred_element_type=dtype)
    return y.reshape(*lead, *out)
