"""Products of activations with kernels, which are arrays or codes of four or eight bits.

Legend: B batch, T tokens.
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

Product = typing.Callable[[jax.Array, jax.Array, int], jax.Array]  # as `ops.fp8.dense`


def of(x: jax.Array, kernels: list[jax.Array | Coded], product: Product, fuse: bool) -> list[jax.Array]:
    """Returns x (B, T, *in) multiplied by each kernel (*in, *out): (B, T, *out).

    Args:
      kernels: all of them arrays in x's dtype, or all in codes.
      product: the function `dense` or `fp8_dense` of `ops.fp8`.
      fuse: True to multiply all kernels in one product, where the mesh allows it (see `layers.project`).
    """
    return (_of_codes if isinstance(kernels[0], Coded) else _of_arrays)(x, kernels, product, fuse)


def _of_arrays(x: jax.Array, kernels: list[jax.Array], product: Product, fuse: bool) -> list[jax.Array]:
    """x (B, T, *in) by each kernel, in one product if `fuse` says so and the mesh allows it."""
    axes, ways = x.ndim - 2, axis_size("tensor")
    outs = [kernel.shape[axes:] for kernel in kernels]
    if len(kernels) == 1 or not fuse or any(out[0] % ways for out in outs):
        return [product(x, kernel, axes) for kernel in kernels]
    columns = [kernel.reshape(*kernel.shape[:axes], ways, -1) for kernel in kernels]
    return split(product(x, jnp.concatenate(columns, axis=-1), axes), x.shape[:2], outs, ways)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _of_codes(x: jax.Array, kernels: list[Coded], product: Product, fuse: bool) -> list[jax.Array]:
    """x (B, T, *in) by kernels in codes, which are not trained. The backward pass decodes them again.

    So what is decoded never waits from one pass to the next, whatever `model.remat` says.
    """
    return _decode_and_multiply(x, block_codes.after(x, kernels), product, fuse)


def _forward(x: jax.Array, kernels: list[Coded], product: Product, fuse: bool) -> tuple[list[jax.Array], tuple]:
    return _of_codes(x, kernels, product, fuse), (x, kernels)


def _backward(product: Product, fuse: bool, kept: tuple, grads: list[jax.Array]) -> tuple[jax.Array, None]:
    x, kernels = kept
    kernels = block_codes.after(grads[0], kernels)
    _, transposed = jax.vjp(lambda x: _decode_and_multiply(x, kernels, product, fuse), x)
    return *transposed(grads), None


_of_codes.defvjp(_forward, _backward)


def _decode_and_multiply(x: jax.Array, kernels: list[Coded], product: Product, fuse: bool) -> list[jax.Array]:
    shapes = [(*x.shape[2:], *kernel.codes.shape[1:]) for kernel in kernels]
    arrays = [block_codes.decode(kernel, shape, x.dtype) for kernel, shape in zip(kernels, shapes, strict=True)]
    return _of_arrays(x, arrays, product, fuse)


def split(y: jax.Array, lead: tuple[int, ...], outs: list[tuple[int, ...]], ways: int = 1) -> list[jax.Array]:
    """Returns the products (*lead, *out) in the columns of y, of which each of `ways` groups has a part of every product."""
    ends = np.cumsum([math.prod(out) // ways for out in outs])
    parts = jnp.split(y, ends[:-1], axis=-1)
    return [part.reshape(*lead, *out) for part, out in zip(parts, outs, strict=True)]
