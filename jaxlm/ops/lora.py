"""The two products of a LoRA (arXiv:2106.09685), which XLA must not join with the kernel's beside them.

XLA's GPU compiler makes one product of two that read the same activations, if one of them is small. It then writes a copy
of each kernel with the factor's columns at its end, for all layers at the start of the step, and keeps each copy's whole
output as long as the few columns of the factor are wanted: a 1.04B model took 4.3 GB in place of 2.9 with one row of 2,048.
It joins none whose results have different types. So the products that share activations with a kernel's return float32.

Legend: R the ranks of all factors that read the same activations.
"""

import functools

import jax
import jax.numpy as jnp

from jaxlm.ops.linear import dense


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def down(x: jax.Array, factor: jax.Array, axes: int = 1) -> jax.Array:
    """Multiplies x (..., *in) by factors (*in, R), of which `axes` are `in`. Returns (..., R) in the type of x."""
    return dense(x, factor, axes, jnp.float32).astype(x.dtype)


def _down_fwd(x: jax.Array, factor: jax.Array, axes: int) -> tuple[jax.Array, tuple]:
    return down(x, factor, axes), (x, factor)


def _down_bwd(axes: int, kept: tuple, slope: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jax.vjp(lambda x, factor: dense(x, factor, axes), *kept)[1](slope)


down.defvjp(_down_fwd, _down_bwd)


@jax.custom_vjp
def up(low: jax.Array, factor: jax.Array) -> jax.Array:
    """Multiplies low (..., R) by a factor (R, *out). Returns (..., *out) in the type of `low`."""
    return dense(low, factor)


def _up_fwd(low: jax.Array, factor: jax.Array) -> tuple[jax.Array, tuple]:
    return up(low, factor), (low, factor)


def _up_bwd(kept: tuple, slope: jax.Array) -> tuple[jax.Array, jax.Array]:
    low, factor = kept
    (d_factor,) = jax.vjp(lambda factor: dense(low, factor), factor)[1](slope)
    back = dense(slope, jnp.moveaxis(factor, 0, -1), factor.ndim - 1, jnp.float32)
    return back.astype(low.dtype), d_factor


up.defvjp(_up_fwd, _up_bwd)
