"""Lays a model's variables out for decoding: an adapter added to the kernels, and the kernels as matrices read by row."""

import functools
import typing

import jax

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
    """Returns a model's variables for decoding.

    Args:
      variables: collection -> tree. Kernels in the collection `quantized` stay as they are, with low-rank products beside
        them: in the compute dtype they would take four times the memory.
      every_product: see `params.pack_params`.
    """
    c = model.config
    apart = {"lora"} if "quantized" in variables else set()
    added = {name: variables[name] for name in adapters.MERGED if name in variables and name not in apart}
    adapter = adapters.Adapter(model.adapter, model.row_ids) if added else None
    params = _added(variables["params"], added, adapter, c.dtype)
    head_VxD = params["embed"]["embedding"] if c.tie_embeddings else params["head"]["kernel"].T
    packed = {} if "quantized" in variables else pack_params(params, c, every_product)
    rest = {name: part for name, part in variables.items() if name not in added}
    return Weights(rest | {"params": params}, packed, head_VxD)


@functools.partial(jax.jit, static_argnames=("adapter", "dtype"))
def _added(params: dict, added: adapters.Variables, adapter: adapters.Adapter | None, dtype: str) -> dict:
    """The parameters with an adapter added to them, in the compute dtype."""
    params = adapters.merge(params, added, adapter) if adapter else params
    return jax.tree.map(lambda p: p.astype(dtype) if p.ndim > 1 else p, params)
