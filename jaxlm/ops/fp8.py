"""Products of activations with weights in float8. Each tensor has one scale, from its current values (current scaling).

The forward pass uses e4m3 and gradients use e5m2, as in Micikevicius et al. 2022 (arXiv:2209.05433). Whole tensors are
scaled by their current values, as in nanochat. The operands of the products are float8, which XLA's GPU compiler maps
to cuBLASLt's float8 kernels (as for flax.linen.fp8_ops). Scales are powers of two, so that scaling and unscaling do not
round.

Legend: M tokens, I inputs, O outputs of a product.
"""

import math

import jax
import jax.numpy as jnp

FORWARD, GRADIENT = jnp.float8_e4m3fn, jnp.float8_e5m2


def quantize(x: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """Returns (x / scale in a float8 `dtype`, scale). The scale puts the largest magnitude in the upper half of the range.

    Args:
      x: an array of any shape. A value that is not finite makes the whole product NaN, and the train step skips that
        update.
      dtype: the float8 format, FORWARD or GRADIENT.

    Returns:
      A float8 array of x's shape, and a float32 power of two.
    """
    largest = jnp.max(jnp.abs(x)).astype(jnp.float32)
    # The exponent bits alone are the power of two at or below it: exact, where exp2(floor(log2(.))) may not be.
    bits = jax.lax.bitcast_convert_type(largest, jnp.uint32) & jnp.uint32(0x7F800000)
    power = jax.lax.bitcast_convert_type(bits, jnp.float32)
    below_max = 2.0 ** (math.frexp(float(jnp.finfo(dtype).max))[1] - 2)  # half of the power of two at or below the max
    scale = jnp.maximum(power / below_max, jnp.finfo(jnp.float32).tiny)
    return (x.astype(jnp.float32) / scale).astype(dtype), scale


def dense(x: jax.Array, kernel: jax.Array, axes: int = 1) -> jax.Array:
    """Does what `ops.linear.dense` does, with both operands and the incoming gradient in float8.

    Args:
      x: the activations (..., *contracted) in the compute dtype.
      kernel: the kernel (*contracted, *out) in the same dtype.
      axes: the number of contracted dimensions.

    Returns:
      (..., *out) in x's dtype, summed in float32 by the hardware; gradients in the operands' dtypes.
    """
    lead, out = x.shape[: x.ndim - axes], kernel.shape[axes:]
    inner = math.prod(kernel.shape[:axes])
    y = _product(x.reshape(math.prod(lead), inner), kernel.reshape(inner, math.prod(out)))
    return y.reshape(*lead, *out)


@jax.custom_vjp
def _product(x_MxI: jax.Array, kernel_IxO: jax.Array) -> jax.Array:
    return _forward(x_MxI, kernel_IxO)[0]


def _forward(x_MxI, kernel_IxO):
    x, kernel = quantize(x_MxI, FORWARD), quantize(kernel_IxO, FORWARD)
    return _dot(x, kernel, (1, 0), x_MxI.dtype, jax.lax.Precision.DEFAULT), (x, kernel)


def _backward(residuals, d_y_MxO):
    x, kernel = residuals
    d_y, dtype = quantize(d_y_MxO, GRADIENT), d_y_MxO.dtype
    # HIGHEST: cuBLASLt then adds up in full float32, where its fast accumulation keeps fewer bits.
    d_x_MxI = _dot(d_y, kernel, (1, 1), dtype, jax.lax.Precision.HIGHEST)
    d_kernel_IxO = _dot(x, d_y, (0, 0), dtype, jax.lax.Precision.HIGHEST)
    return d_x_MxI, d_kernel_IxO


def _dot(a, b, contract: tuple[int, int], dtype, precision) -> jax.Array:
    (a, a_scale), (b, b_scale) = a, b
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    y = jax.lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=dtype)
    return (y.astype(jnp.float32) * (a_scale * b_scale)).astype(dtype)


_product.defvjp(_forward, _backward)
