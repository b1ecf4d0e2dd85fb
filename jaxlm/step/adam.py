"""Adam (arXiv:1412.6980) with its moments in float32, or in eight bits (Dettmers et al., arXiv:2110.02861).

The update is computed from the new moments before they are rounded to eight bits, so rounding affects later steps only.
Both moments together take 2.03 bytes a parameter instead of 8; `ops.quantize` does the rounding.
"""

import re
import typing
import zlib

import jax
import jax.numpy as jnp
import optax

from jaxlm.devices import tree
from jaxlm.ops import quantize

Moment = jax.Array | quantize.Blocked


class AdamState(typing.NamedTuple):
    """The state that Adam keeps between two updates.

    Attributes:
      count: the number of updates done.
      mu, nu: the first and the second moments, as trees like the parameters with a `Moment` at each leaf.
    """

    count: jax.Array
    mu: dict
    nu: dict


def scale_by_adam(
    b1: float, b2: float, eps: float, *, mu_dtype: str = "float32", full_precision: typing.Sequence[str] = (".*",)
) -> optax.GradientTransformationExtraArgs:
    """Returns Adam without a learning rate, like `optax.scale_by_adam`.

    `update(grads, state, params, ok=True)` leaves the state as it is if the scalar `ok` is false.

    Args:
      b1, b2, eps: the paper's two decay rates and its epsilon.
      mu_dtype: the dtype of first moments that are not in eight bits.
      full_precision: regular expressions. A parameter keeps its moments out of eight bits if its whole name matches one
        of them, or if its last axis has no divisor from 64 to 255.
    """

    def init(params: dict) -> AdamState:
        def zeros(name: str, p: jax.Array, dtype: str | jnp.dtype, dtype_8bit: jnp.dtype) -> Moment:
            whole = any(re.fullmatch(pattern, name) for pattern in full_precision)
            if whole or not p.ndim or not quantize.block_size(p.shape[-1]):
                return jnp.zeros(p.shape, dtype)
            return quantize.zeros(p.shape, dtype_8bit)

        mu = tree.map_named(lambda name, p: zeros(name, p, mu_dtype, jnp.int8), params)
        nu = tree.map_named(lambda name, p: zeros(name, p, jnp.float32, jnp.uint8), params)
        return AdamState(jnp.zeros((), jnp.int32), mu, nu)

    def update(
        grads: dict, state: AdamState, params: dict | None = None, *, ok: bool | jax.Array = True, **extra
    ) -> tuple[dict, AdamState]:
        del params, extra
        count = state.count + 1
        bias1, bias2 = (1 - b ** count.astype(jnp.float32) for b in (b1, b2))

        def one(name: str, g: jax.Array, mu: Moment, nu: Moment) -> tuple[jax.Array, Moment, Moment]:
            old_m, old_v = _read(mu), _read(nu)
            # Why the gate is in here: a choice between the old and the new state after the update would hold both. Here the
            # update needs only what is written, so each moment is overwritten in place.
            m = jnp.where(ok, b1 * old_m + (1 - b1) * g, old_m)
            v = jnp.where(ok, b2 * old_v + (1 - b2) * g * g, old_v)
            step = (m / bias1) / (jnp.sqrt(v / bias2) + eps)
            if not isinstance(mu, quantize.Blocked):
                return step, m.astype(mu.dtype), v
            # Other noise for each parameter and step: with the same noise, all layers would be rounded alike.
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
