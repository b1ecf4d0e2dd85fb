"""Runs a model a layer at a time, so that no more of its parameters than one layer's need be in memory.

Legend: B batch, T tokens, D model, V vocabulary.
"""

import functools
import types
import typing

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.models.head import head_kernel, head_rows
from jaxlm.models.layers import TokenInfo
from jaxlm.models.transformer import Transformer, scaled

# Some top entries of the tree of parameters: {"embed": ...}, {"final_norm": ..., "head": ...}.
Part = dict[str, typing.Any]
Beside = typing.Mapping[str, Part]  # an adapter's variables, by collection
NOTHING: Beside = types.MappingProxyType({})


def embed(model: Transformer, part: Part, tokens_BxT: np.ndarray, beside: Beside = NOTHING) -> jax.Array:
    """Returns what the first layer reads, (B, T, D), for a `part` with `embed` and, in GPT-2, `pos_embed`.

    Args:
      beside: an adapter's variables by collection, as numpy arrays; `rows` and `prompt` are read.
    """
    is_virtual_BxT = tokens_BxT >= model.config.vocab_size
    x_BxTxD = part["embed"]["embedding"][np.where(is_virtual_BxT, 0, tokens_BxT)].astype(model.config.dtype)
    for place, i in enumerate(model.row_ids if "rows" in beside else ()):
        x_BxTxD[tokens_BxT == i] += beside["rows"]["embed"]["rows"][place]
    if "prompt" in beside:
        x_BxTxD[is_virtual_BxT] = beside["prompt"]["embed"]["prompt"][
            tokens_BxT[is_virtual_BxT] - model.config.vocab_size
        ]
    if "pos_embed" not in part:
        return jnp.asarray(x_BxTxD)
    return x_BxTxD + jnp.asarray(part["pos_embed"]["embedding"][: tokens_BxT.shape[1]], x_BxTxD.dtype)


@functools.cache
def layer(model: Transformer) -> typing.Callable[..., jax.Array]:
    """Returns a function, compiled once: (a layer's parameters, its input (B, T, D), its `lora`) -> its output (B, T, D).

    The third argument may be left out.
    """
    block = model.block("xla")

    @jax.jit
    def run(params: Part, x_BxTxD: jax.Array, lora: Part | None = None) -> jax.Array:
        positions_BxT = jnp.broadcast_to(jnp.arange(x_BxTxD.shape[1]), x_BxTxD.shape[:2])
        info = TokenInfo(positions_BxT, None, model.rope(positions_BxT))
        variables = {"params": params}
        if lora:
            variables["lora"] = scaled(lora, model.adapter)
        return block.apply(variables, x_BxTxD, info)[0]

    return run


def final(model: Transformer, part: Part, x_BxTxD: jax.Array) -> jax.Array:
    """Returns the hidden states (B, T, D) for the last layer's output; `part` has `final_norm`."""
    return model.norm(model.config.norm_eps, parent=None).apply({"params": part["final_norm"]}, x_BxTxD)


def logits(model: Transformer, part: Part, x_BxTxD: jax.Array, beside: Beside = NOTHING) -> jax.Array:
    """Returns the logits (B, T, V) for the last layer's output; `part` has `final_norm`, and `head` or the tied `embed`.

    Args:
      beside: an adapter's variables by collection; `rows` is read.
    """
    c = model.config
    hidden_BxTxD = final(model, part, x_BxTxD)
    head_DxV = head_kernel(part, c)[:, : c.vocab_size]
    logits_BxTxV = jnp.einsum("btd,dv->btv", hidden_BxTxD, head_DxV, preferred_element_type=jnp.float32)
    if not (rows := head_rows(model, beside)):
        return logits_BxTxV
    return logits_BxTxV.at[..., np.asarray(rows["row_ids"])].add(hidden_BxTxD @ rows["rows_NxD"].T)
