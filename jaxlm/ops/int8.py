"""Products in integers: both operands in int8, with a scale for each row, summed in int32.

The weights' rows are quantised once, those of the activations at run time, so a row's codes depend on that row alone. A sum
of integers is exact, in any order: a product of one row has the bits of the same row among others (compare LLM.int8(),
arXiv:2208.07339, which keeps outliers in 16 bits; here nothing is kept apart).

Legend: M rows, I inputs, O outputs of a product.
"""

import typing

import jax
import jax.numpy as jnp

_LEVELS = 127


class Int8(typing.NamedTuple):
    """A matrix whose rows are quantised: row = codes x scale.

    Attributes:
      codes_OxI: int8, -127 to 127.
      scale_O: float32.
    """

    codes_OxI: jax.Array
    scale_O: jax.Array


def quantize(x_OxI: jax.Array) -> Int8:
    """Returns a matrix with each number rounded to a multiple of 1/127 of its row's largest magnitude."""
    x_OxI = x_OxI.astype(jnp.float32)
    scale_O = jnp.maximum(jnp.max(jnp.abs(x_OxI), axis=-1) / _LEVELS, jnp.finfo(jnp.float32).tiny)
    return Int8(jnp.round(x_OxI / scale_O[:, None]).astype(jnp.int8), scale_O)


def decode(matrix: Int8, dtype: jax.typing.DTypeLike) -> jax.Array:
    return (matrix.codes_OxI * matrix.scale_O[:, None]).astype(dtype)


def product(x_MxI: jax.Array, kernel: Int8) -> jax.Array:
    """Returns the quantised x times the transposed kernel, float32 (M, O)."""
    codes_MxI, scale_M = quantize(x_MxI)
    rows = len(codes_MxI)
    if rows == 1:
        # XLA's CPU compiler has no fast product of one row. Without the barrier it would see that the second is unused.
        codes_MxI = jax.lax.optimization_barrier(jnp.concatenate([codes_MxI, codes_MxI]))
    contract_last = (((1,), (1,)), ((), ()))
    sums_MxO = jax.lax.dot_general(codes_MxI, kernel.codes_OxI, contract_last, preferred_element_type=jnp.int32)
    return sums_MxO[:rows].astype(jnp.float32) * (scale_M[:, None] * kernel.scale_O)
