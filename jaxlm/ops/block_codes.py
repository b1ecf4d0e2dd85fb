"""Stores kernels in four or eight bits: a code for each weight, and a scale for each block of 32 to 64 inputs of an output.

nf4 is the 4-bit NormalFloat of QLoRA (arXiv:2305.14314, appendix E); int8 has evenly spaced values instead. Blocks run along
the inputs, as in bitsandbytes, whose matrices are (out, in). The mesh changes no value.

Legend: I inputs (of all input axes together), O outputs (one axis or two).
"""

import math
import typing

import jax
import jax.numpy as jnp

BLOCK, SMALLEST_BLOCK = 64, 32

# Quantiles of the normal distribution, scaled to [-1, 1], with an exact 0 (appendix E).
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


class Coded(typing.NamedTuple):
    """A quantised kernel.

    Attributes:
      codes: nf4: uint8 (I / 2, *O), in which input 2i has the low bits and input 2i + 1 the high bits. int8: (I, *O).
      scales: float32 (I / block, *O).
    """

    codes: jax.Array
    scales: jax.Array


def block_size(inputs: int) -> int:
    """Returns 64 if it divides `inputs`, else the largest even divisor below 64; 0 if that divisor is below 32."""
    sizes = [size for size in range(SMALLEST_BLOCK, BLOCK + 1, 2) if inputs % size == 0]
    return max(sizes, default=0)


def quantize(kernel: jax.Array, kind: str, axes: int = 1) -> Coded:
    """Returns a float32 kernel (*in, *O) quantised. Each weight is rounded to the nearest value that its block can hold.

    Args:
      kind: "nf4" or "int8".
      axes: the number of input axes, whose `block_size` must not be 0.
    """
    import qwix  # here, because the import takes 0.2 s and few runs quantise

    inputs, outputs = math.prod(kernel.shape[:axes]), kernel.shape[axes:]
    kernel_IxO = kernel.reshape(inputs, *outputs)
    each = tuple(range(1, kernel_IxO.ndim))
    coded = qwix.quantize(kernel_IxO, kind, channelwise_axes=each, tiled_axes={0: block_size(inputs)})
    if kind == "int8":
        return Coded(coded.qvalue, coded.scale)
    pairs = coded.qvalue.astype(jnp.uint8).reshape(inputs // 2, 2, *outputs)
    return Coded(pairs[:, 0] | pairs[:, 1] << 4, coded.scale)


def after(x: jax.Array, kernels: list[Coded]) -> list[Coded]:
    """Returns the quantised kernels, with a dependency on `x`, so that they are not decoded before `x` is computed.

    Without the dependency XLA decodes once for the forward and the backward pass, and outside a loop over microbatches:
    then all layers' decoded kernels are in memory at once.
    """

    def barrier(x: jax.Array, kernels: list[Coded]) -> list[Coded]:
        return jax.lax.optimization_barrier((x, kernels))[1]

    def zero_added(x: jax.Array, kernels: list[Coded]) -> list[Coded]:
        # XLA's CPU compiler drops barriers. This adds 0, which the compiler does not know.
        zero = jnp.minimum(jnp.abs(x[(0,) * x.ndim]), 0)
        return [Coded(codes + zero.astype(codes.dtype), scales) for codes, scales in kernels]

    return jax.lax.platform_dependent(x, kernels, cpu=zero_added, default=barrier)


def decode(coded: Coded, shape: typing.Sequence[int], dtype: jnp.dtype) -> jax.Array:
    """Returns the decoded kernel in its original shape (*in, *O). XLA fuses the decoding into one elementwise loop."""
    codes, scales = coded
    outputs = codes.shape[1:]
    if codes.dtype == jnp.uint8:
        shifts = jnp.array([0, 4], jnp.uint8).reshape(1, 2, *(1,) * len(outputs))
        values = jnp.array(NF4, jnp.float32)[codes[:, None] >> shifts & 15]
    else:
        values = codes.astype(jnp.float32)
    blocks = values.reshape(scales.shape[0], -1, *outputs) * scales[:, None]
    return blocks.astype(dtype).reshape(shape)
