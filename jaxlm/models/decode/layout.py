"""Lays a model's variables out for decoding: an adapter added to the kernels, and the kernels as matrices read by row."""

import functools
import typing

import jax

from jaxlm.config import ModelConfig
from jaxlm.models import adapters
from jaxlm.models.params import pack_params
from jaxlm.models.transformer import Transformer


class Weights(typing.NamedTuple):
    """Variables laid out for decoding.

    Attributes:
      variables: collection -> tree; the parameters are in the compute dtype, with what can be added to them.
      packed: the collection `packed` (see `params.pack_params`).
      head_VxD: the output head by rows.
    """

    variables: dict
    packed: dict
    head_VxD: jax.Array


def lay_out(model: Transformer, variables: dict, every_product: bool) -> Weights:
    """Returns a model's variables for decoding. The same shapes are compiled once, so that new values cost little.

    Args:
      variables: collection -> tree. Kernels in the collection `quantized` stay as they are, with low-rank products beside
        them: in the compute dtype they would take four times the memory.
      every_product: see `params.pack_params`.
    """
    coded = "quantized" in variables
    added = {name: variables[name] for name in adapters.MERGED if name in variables and not (coded and name == "lora")}
    adapter = adapters.Adapter(model.adapter, model.row_ids) if added else None
    params, packed, head_VxD = _laid_out(variables["params"], added, adapter, model.config, every_product, coded)
    if head_VxD is None:
        head_VxD = params["embed"]["embedding"]
    rest = {name: part for name, part in variables.items() if name not in added}
    return Weights(rest | {"params": params}, packed, head_VxD)


@functools.partial(jax.jit, static_argnames=("adapter", "config", "every_product", "coded"))
def _laid_out(
    params: dict,
    added: adapters.Variables,
    adapter: adapters.Adapter | None,
    config: ModelConfig,
    every_product: bool,
    coded: bool,
) -> tuple[dict, dict, jax.Array | None]:
    """(the parameters with an adapter added to them, in the compute dtype; packed; the head by rows, unless it is tied)."""
    params = adapters.merge(params, added, adapter) if adapter else params
    params = jax.tree.map(lambda p: p.astype(config.dtype) if p.ndim > 1 else p, params)
    packed = {} if coded else pack_params(params, config, every_product)
    return params, packed, None if config.tie_embeddings else params["head"]["kernel"].T
