"""Runs a model a layer at a time, so that no more of its parameters than one layer's need be in memory.

Legend: B batch, T tokens, D model, V vocabulary.
"""

import functools
import typing

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.models.head import head_kernel
from jaxlm.models.layers import TokenInfo
from jaxlm.models.transformer import Transformer

Part = dict[
    str, typing.Any
]  # some top entries of the tree of parameters: {"embed": ...}, {"final_norm": ..., "head": ...}


def embed(model: Transformer, part: Part, tokens_BxT: np.ndarray) -> jax.Array:
    """Returns what the first layer reads, (B, T, D), for a `part` with `embed` and, in GPT-2, `pos_embed`."""
    rows = part["embed"]["embedding"][tokens_BxT].astype(model.config.dtype)
    if "pos_embed" not in part:
        return jnp.asarray(rows)
    return rows + jnp.asarray(part["pos_embed"]["embedding"][: tokens_BxT.shape[1]], rows.dtype)


@functools.cache
def layer(model: Transformer) -> typing.Callable[[Part, jax.Array], jax.Array]:
    """Returns (a layer's parameters, its input (B, T, D)) -> its output (B, T, D), compiled once."""
    block = model.block("xla")

    @jax.jit
    def run(params: Part, x_BxTxD: jax.Array) -> jax.Array:
        positions_BxT = jnp.broadcast_to(jnp.arange(x_BxTxD.shape[1]), x_BxTxD.shape[:2])
        info = TokenInfo(positions_BxT, None, model.rope(positions_BxT))
        return block.apply({"params": params}, x_BxTxD, info)[0]

    return run


def final(model: Transformer, part: Part, x_BxTxD: jax.Array) -> jax.Array:
    """Returns the hidden states (B, T, D) for the last layer's output; `part` has `final_norm`."""
    return model.norm(model.config.norm_eps, parent=None).apply({"params": part["final_norm"]}, x_BxTxD)


def logits(model: Transformer, part: Part, x_BxTxD: jax.Array) -> jax.Array:
    """Returns the logits (B, T, V) for the last layer's output; `part` has `final_norm`, and `head` or the tied `embed`."""
    c = model.config
    hidden_BxTxD = final(model, part, x_BxTxD)
    head_DxV = head_kernel(part, c)[:, : c.vocab_size]
    return jnp.einsum("btd,dv->btv", hidden_BxTxD, head_DxV, preferred_element_type=jnp.float32)
