"""Products of activations with weights: in the compute dtype, in float8, with quantised kernels, and LoRA's two products.

Legend: B batch, T tokens, M tokens of all rows, I inputs, O outputs of a product, R the ranks of all factors that read the
same activations.
"""

import functools
import math
import typing

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.devices.sharding import axis_size
from jaxlm.ops import block_codes
from jaxlm.ops.block_codes import Coded

Product = typing.Callable[[jax.Array, jax.Array, int], jax.Array]  # as `dense`
# Float8: each tensor has one scale, from its current values (current scaling), as in nanochat. The forward pass uses e4m3
# and gradients e5m2, as in Micikevicius et al. 2022 (arXiv:2209.05433). XLA's GPU compiler maps the products to cuBLASLt's
# float8 kernels (as for flax.linen.fp8_ops). Scales are powers of two, so that scaling and unscaling do not round.
FORWARD, GRADIENT = jnp.float8_e4m3fn, jnp.float8_e5m2


def dense(x: jax.Array, kernel: jax.Array, axes: int = 1, dtype: jnp.dtype | None = None) -> jax.Array:
    """Multiplies x by a kernel over the last `axes` dimensions of x: `jnp.tensordot(x, kernel, axes)`, in `dtype` or x's.

    It is computed as one product of matrices, because XLA's CPU backend transposes the whole gradient of a 3-D product:
    as matrices a SwiGLU of 512 x 1408 on 4096 tokens, forward and backward, takes a quarter less time (dev/LOG.md,
    2026-11-20). If context shards the tokens, it is a tensordot, since a reshape to rows would gather x.
    """
    if axis_size("context") > 1:
        return jnp.tensordot(x, kernel, axes, preferred_element_type=dtype)
    return _of_matrices(functools.partial(jnp.dot, preferred_element_type=dtype), x, kernel, axes)


def _of_matrices(product: typing.Callable, x: jax.Array, kernel: jax.Array, axes: int) -> jax.Array:
    lead, out = x.shape[: x.ndim - axes], kernel.shape[axes:]
    inner = math.prod(kernel.shape[:axes])
    return product(x.reshape(math.prod(lead), inner), kernel.reshape(inner, math.prod(out))).reshape(*lead, *out)


def quantize(x: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """Returns (x / scale in a float8 `dtype`, scale). The scale, a float32 power of two, puts the largest magnitude in the
    upper half of the range. A value that is not finite makes the whole product NaN, and the train step skips that update.
    """
    largest = jnp.max(jnp.abs(x)).astype(jnp.float32)
    # The exponent bits alone are the power of two at or below `largest`, exactly; exp2(floor(log2(.))) may be inexact.
    bits = jax.lax.bitcast_convert_type(largest, jnp.uint32) & jnp.uint32(0x7F800000)
    power = jax.lax.bitcast_convert_type(bits, jnp.float32)
    below_max = 2.0 ** (math.frexp(float(jnp.finfo(dtype).max))[1] - 2)  # half of the power of two at or below the max
    scale = jnp.maximum(power / below_max, jnp.finfo(jnp.float32).tiny)
    return (x.astype(jnp.float32) / scale).astype(dtype), scale


def fp8_dense(x: jax.Array, kernel: jax.Array, axes: int = 1) -> jax.Array:
    """Does what `dense` does, with both operands and the incoming gradient in float8.

    Returns (..., *out) in x's dtype, summed in float32 by the hardware; gradients in the operands' dtypes.
    """
    return _of_matrices(_product, x, kernel, axes)


@jax.custom_vjp
def _product(x_MxI: jax.Array, kernel_IxO: jax.Array) -> jax.Array:
    return _forward(x_MxI, kernel_IxO)[0]


def _forward(x_MxI, kernel_IxO):
    x, kernel = quantize(x_MxI, FORWARD), quantize(kernel_IxO, FORWARD)
    return _dot(x, kernel, (1, 0), x_MxI.dtype, jax.lax.Precision.DEFAULT), (x, kernel)


def _backward(residuals, d_y_MxO):
    x, kernel = residuals
    d_y, dtype = quantize(d_y_MxO, GRADIENT), d_y_MxO.dtype
    # HIGHEST: cuBLASLt then accumulates in full float32; its fast accumulation keeps fewer bits.
    d_x_MxI = _dot(d_y, kernel, (1, 1), dtype, jax.lax.Precision.HIGHEST)
    d_kernel_IxO = _dot(x, d_y, (0, 0), dtype, jax.lax.Precision.HIGHEST)
    return d_x_MxI, d_kernel_IxO


def _dot(a, b, contract: tuple[int, int], dtype, precision) -> jax.Array:
    (a, a_scale), (b, b_scale) = a, b
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    y = jax.lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=dtype)
    return (y.astype(jnp.float32) * (a_scale * b_scale)).astype(dtype)


_product.defvjp(_forward, _backward)


# XLA must not merge LoRA's products (arXiv:2106.09685) with the kernel's product. Its GPU compiler merges two products that
# read the same activations if one is small. At the start of the step it copies each layer's kernel, with the factor's columns
# appended, and keeps each copy's whole output as long as the factor's few columns are needed: a 1.04B model took 4.3 GB
# instead of 2.9 with one row of 2,048. XLA does not merge products whose results have different dtypes. So LoRA's products
# that share activations with a kernel's product return float32.
@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def lora_down(x: jax.Array, factor: jax.Array, axes: int = 1) -> jax.Array:
    """Multiplies x (..., *in) by a factor (*in, R), whose first `axes` axes are `in`. Returns (..., R) in x's dtype."""
    return dense(x, factor, axes, jnp.float32).astype(x.dtype)


def _lora_down_bwd(axes: int, residuals: tuple, slope: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jax.vjp(lambda x, factor: dense(x, factor, axes), *residuals)[1](slope)


lora_down.defvjp(lambda x, factor, axes: (lora_down(x, factor, axes), (x, factor)), _lora_down_bwd)


@jax.custom_vjp
def lora_up(low: jax.Array, factor: jax.Array) -> jax.Array:
    """Multiplies low (..., R) by a factor (R, *out). Returns (..., *out) in the dtype of `low`."""
    return dense(low, factor)


def _lora_up_bwd(residuals: tuple, slope: jax.Array) -> tuple[jax.Array, jax.Array]:
    low, factor = residuals
    (d_factor,) = jax.vjp(lambda factor: dense(low, factor), factor)[1](slope)
    back = dense(slope, jnp.moveaxis(factor, 0, -1), factor.ndim - 1, jnp.float32)
    return back.astype(low.dtype), d_factor


lora_up.defvjp(lambda low, factor: (lora_up(low, factor), (low, factor)), _lora_up_bwd)


def multiply(x: jax.Array, kernels: list[jax.Array | Coded], product: Product, fuse: bool) -> list[jax.Array]:
    """Returns x (B, T, *in) multiplied by each kernel (*in, *out): (B, T, *out).

    Args:
      kernels: either all arrays in x's dtype, or all quantised.
      product: `dense` or `fp8_dense`.
      fuse: True to multiply all kernels in one product, where the mesh allows it (see `layers.project`).
    """
    return (_of_codes if isinstance(kernels[0], Coded) else _of_arrays)(x, kernels, product, fuse)


def _of_arrays(x: jax.Array, kernels: list[jax.Array], product: Product, fuse: bool) -> list[jax.Array]:
    axes, ways = x.ndim - 2, axis_size("tensor")
    outs = [kernel.shape[axes:] for kernel in kernels]
    if len(kernels) == 1 or not fuse or any(out[0] % ways for out in outs):
        return [product(x, kernel, axes) for kernel in kernels]
    columns = [kernel.reshape(*kernel.shape[:axes], ways, -1) for kernel in kernels]
    return split_columns(product(x, jnp.concatenate(columns, axis=-1), axes), x.shape[:2], outs, ways)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _of_codes(x: jax.Array, kernels: list[Coded], product: Product, fuse: bool) -> list[jax.Array]:
    """Multiplies x (B, T, *in) by quantised kernels, which are frozen. The backward pass decodes them again."""
    return _decode_and_multiply(x, block_codes.after(x, kernels), product, fuse)


def _backward_of_codes(
    product: Product, fuse: bool, residuals: tuple, grads: list[jax.Array]
) -> tuple[jax.Array, None]:
    x, kernels = residuals
    kernels = block_codes.after(grads[0], kernels)
    _, transposed = jax.vjp(lambda x: _decode_and_multiply(x, kernels, product, fuse), x)
    return *transposed(grads), None


_of_codes.defvjp(lambda x, kernels, *how: (_of_codes(x, kernels, *how), (x, kernels)), _backward_of_codes)


def _decode_and_multiply(x: jax.Array, kernels: list[Coded], product: Product, fuse: bool) -> list[jax.Array]:
    shapes = [(*x.shape[2:], *kernel.codes.shape[1:]) for kernel in kernels]
    arrays = [block_codes.decode(kernel, shape, x.dtype) for kernel, shape in zip(kernels, shapes, strict=True)]
    return _of_arrays(x, arrays, product, fuse)


def split_columns(y: jax.Array, lead: tuple[int, ...], outs: list[tuple[int, ...]], ways: int = 1) -> list[jax.Array]:
    """Returns the products (*lead, *out) from y, whose columns are `ways` groups, each with a part of every product."""
    ends = np.cumsum([math.prod(out) // ways for out in outs])
    parts = jnp.split(y, ends[:-1], axis=-1)
    return [part.reshape(*lead, *out) for part, out in zip(parts, outs, strict=True)]
