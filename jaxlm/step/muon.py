"""Muon (Jordan 2024, https://kellerjordan.github.io/posts/muon): momentum, orthogonalised, for the matrices of the layers.

Momentum (Nesterov's) and state are those of `optax.contrib.scale_by_muon`; the orthogonalisation is `ops.polar`'s.
"""

import math

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from jax.sharding import PartitionSpec

from jaxlm import sharding, tree
from jaxlm.models.params import axes_of, input_axes
from jaxlm.ops import polar

BETA = 0.95


def is_matrix(name: str) -> bool:
    """True if a parameter is the kernel of a layer: with its axes as inputs by outputs, (D, N, H) is a matrix too."""
    return tree.layer_of(name) is not None and name.endswith("/kernel")


def scale_by_muon(mu_dtype: str, dtype: str, iterations: int) -> optax.GradientTransformationExtraArgs:
    """Returns Muon without a learning rate, for trees of matrices alone.

    Updates are scaled by 0.2 sqrt(max(inputs, outputs)) (arXiv:2502.16982). That gives them the root mean square of
    AdamW's. `update(grads, state, params, ok=True)` leaves the state as it is if the scalar `ok` is false.

    Args:
      mu_dtype: the dtype of the momentum.
      dtype: the dtype in which matrices are orthogonalised.
      iterations: of the orthogonalisation, 3 or 5.
    """

    def update(
        grads: dict, state: optax.contrib.MuonState, params: dict | None = None, *, ok: bool | jax.Array = True, **extra
    ) -> tuple[dict, optax.contrib.MuonState]:
        del params, extra
        count = state.count + 1
        now, following = (1 - BETA ** n.astype(jnp.float32) for n in (count, count + 1))
        named, structure = tree.named_leaves(grads), jax.tree.structure(grads)
        momenta, ahead = [], []
        for (_, g), mu in zip(named, structure.flatten_up_to(state.mu), strict=True):
            old = mu.astype(jnp.float32)
            m = jnp.where(ok, BETA * old + (1 - BETA) * g, old)
            momenta.append(m.astype(mu_dtype))
            ahead.append((BETA / following * m + (1 - BETA) / now * g).astype(dtype))
        inputs = [input_axes(name) for name, _ in named]
        found = polar.each(ahead, inputs, [_spec(name, g) for name, g in named], iterations)
        state = state._replace(count=jnp.where(ok, count, state.count), mu=structure.unflatten(momenta))
        return structure.unflatten(found), state

    # Optax's own state, with coefficients that nothing reads any more, so that checkpoints keep their form.
    init = optax.contrib.scale_by_muon(beta=BETA, mu_dtype=mu_dtype).init
    scaled = optax.stateless(lambda updates, _: tree.map_named(_scaled, updates))
    return optax.chain(optax.GradientTransformationExtraArgs(init, update), scaled)


def _scaled(name: str, update: jax.Array) -> jax.Array:
    inputs = input_axes(name)
    sides = math.prod(update.shape[:inputs]), math.prod(update.shape[inputs:])
    return 0.2 * math.sqrt(max(sides)) * update.astype(jnp.float32)


def _spec(name: str, leaf: jax.Array) -> PartitionSpec:
    """How the current mesh splits a parameter."""
    mesh = jax.sharding.get_abstract_mesh()
    return PartitionSpec() if mesh.empty else sharding.spec(axes_of(name, leaf), leaf.shape, mesh)
