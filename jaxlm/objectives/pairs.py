"""What all objectives of preference pairs share: how pairs lie in a batch, and sums over them.

A pair is two neighbouring segments of a row, so that no microbatch parts it: pair p is segments 2p + 1 (chosen) and
2p + 2 (rejected), counted from 1. The prompt stands in both segments with weight 0.

Legend: B rows, P pairs of a row.
"""

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from jaxlm import sharding
from jaxlm.config import Config
from jaxlm.data.packing import pairs_in_row
from jaxlm.objectives import base


def shapes(config: Config, mesh: Mesh | AbstractMesh) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes of a packed batch of pairs: those of `base.token_shapes`, and `pair` and `margin`, float32 [B, P].

    `pair` is 1 where there is a pair, else 0. `margin` is by how much the chosen answer was preferred; 0 if unknown.
    """
    shape = (config.train.batch_size, pairs_in_row(config.train.seq_len))
    by_pair = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding.row_sharding(mesh))
    return base.token_shapes(config, mesh) | {"pair": by_pair, "margin": by_pair}


def sums(loss_BxP: jax.Array, metrics: dict[str, jax.Array], pair_BxP: jax.Array) -> base.Sums:
    """Returns the sums over the pairs that there are, of the loss and of each metric [B, P]; the weight is their number."""
    return base.Sums(
        total(loss_BxP, pair_BxP), jnp.sum(pair_BxP), {name: total(x, pair_BxP) for name, x in metrics.items()}
    )


def total(x_BxP: jax.Array, pair_BxP: jax.Array) -> jax.Array:
    """Returns the sum over the pairs that there are, a scalar."""
    return jnp.sum(jnp.where(pair_BxP > 0, x_BxP, 0))


def accuracy(margin_BxP: jax.Array) -> jax.Array:
    """Returns 1 for each margin above 0, 1/2 for 0, 0 below, [B, P]."""
    return (jnp.sign(margin_BxP) + 1) / 2
