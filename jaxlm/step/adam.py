"""Adam (arXiv:1412.6980) whose moments are kept in float32, or in eight bits (Dettmers et al., arXiv:2110.02861).

The update is made from the new moments in float32, before they are rounded: what a step loses is only what the next
one remembers. The code of eight bits and its rounding are those of `ops.quantize`: 2.03 bytes a parameter, not 8.
"""

import re
import typing
import zlib

import jax
import jax.numpy as jnp
import optax

from jaxlm import tree
from jaxlm.ops import quantize

Moment = jax.Array | quantize.Blocked


class AdamState(typing.NamedTuple):
    """Updates done, and both moments: trees like the parameters with arrays or `quantize.Blocked` as leaves."""

    count: jax.Array
    mu: typing.Any
    nu: typing.Any


def scale_by_adam(
    b1: float,
    b2: float,
    eps: float,
    *,
    mu_dtype: str = "float32",
    full_precision: typing.Sequence[str] = (".*",),
) -> optax.GradientTransformationExtraArgs:
    """Gradients over the root of their second moments, as `optax.scale_by_adam`.

    `update(grads, state, params, ok=True)` leaves the state as it is where `ok`, a scalar, is false. Done here and not
    afterwards, this lets every moment be updated in place: the update is made of what is written, not of what was.

    Args:
      mu_dtype: of the first moment where it is not in eight bits.
      full_precision: parameters whose name fully matches none of these patterns have their moments in eight bits, but
        for those whose last axis has no divisor in 64 to 255.
    """

    def init(params: typing.Any) -> AdamState:
        def zeros(name: str, p: jax.Array, dtype: typing.Any, dtype_8bit: typing.Any) -> Moment:
            whole = any(re.fullmatch(pattern, name) for pattern in full_precision)
            if whole or not p.ndim or not quantize.block_size(p.shape[-1]):
                return jnp.zeros(p.shape, dtype)
            return quantize.zeros(p.shape, dtype_8bit)

        mu = tree.map_named(lambda name, p: zeros(name, p, mu_dtype, jnp.int8), params)
        nu = tree.map_named(lambda name, p: zeros(name, p, jnp.float32, jnp.uint8), params)
        return AdamState(jnp.zeros((), jnp.int32), mu, nu)

    def update(
        grads: typing.Any, state: AdamState, params: typing.Any = None, *, ok: bool | jax.Array = True, **extra
    ) -> tuple[typing.Any, AdamState]:
        del params, extra
        count = state.count + 1
        bias1, bias2 = (1 - b ** count.astype(jnp.float32) for b in (b1, b2))

        def one(name: str, g: jax.Array, mu: Moment, nu: Moment) -> tuple[jax.Array, Moment, Moment]:
            old_m, old_v = _read(mu), _read(nu)
            m = jnp.where(ok, b1 * old_m + (1 - b1) * g, old_m)
            v = jnp.where(ok, b2 * old_v + (1 - b2) * g * g, old_v)
            step = (m / bias1) / (jnp.sqrt(v / bias2) + eps)
            if not isinstance(mu, quantize.Blocked):
                return step, m.astype(mu.dtype), v
            # Another noise for each leaf and step: with the same for all, all layers would be rounded alike.
            seed = count.astype(jnp.uint32) ^ jnp.uint32(zlib.crc32(name.encode()))
            noise = quantize.noise(g.shape, seed)
            return step, quantize.encode(m, noise & 0xFFFF, jnp.int8), quantize.encode(v, noise >> 16, jnp.uint8)

        like_grads = jax.tree.structure(grads)
        done = like_grads.flatten_up_to(tree.map_named(one, grads, state.mu, state.nu))
        steps, mu, nu = (like_grads.unflatten(part) for part in zip(*done, strict=True))
        return steps, AdamState(jnp.where(ok, count, state.count), mu, nu)

    return optax.GradientTransformationExtraArgs(init, update)


def _read(moment: Moment) -> jax.Array:
    return quantize.decode(moment) if isinstance(moment, quantize.Blocked) else moment.astype(jnp.float32)
