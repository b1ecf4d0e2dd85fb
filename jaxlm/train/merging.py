"""Adds an adapter to a model's parameters as they are read, so that a run can begin with the two as one."""

import functools
from collections.abc import Callable

import jax
import numpy as np

from jaxlm import tree
from jaxlm.models import adapters
from jaxlm.objectives.base import Variables

Params = Callable[[dict, dict], dict]  # (shapes, shardings) -> the model's parameters
Leaf = Callable[[str], np.ndarray]  # name -> one parameter, on the host
COLLECTIONS = ("lora", "rows")  # what can be merged; the vectors of a prompt stay what they are


def merge(
    params: Params, leaf: Leaf | None, adapter: adapters.Adapter, trained: Callable[[], Variables]
) -> tuple[Params, Leaf | None]:
    """Returns readers of the parameters with the adapter merged into them, given those of its base.

    Args:
      params, leaf: read the base's parameters; see `train.origin.Origin`.
      trained: reads the adapter's variables, on the host.
    """
    variables = functools.cache(trained)

    def merged_params(abstract: dict, shardings: dict) -> dict:
        # Donated, so that no second copy of the model is made.
        merged = jax.jit(lambda p, v: adapters.merge(p, v, adapter), out_shardings=shardings, donate_argnums=0)
        return merged(params(abstract, shardings), variables())

    def merged_leaf(name: str) -> np.ndarray:
        one = adapters.merge(tree.nested([(name, leaf(name))]), variables(), adapter)
        return np.asarray(dict(tree.named_leaves(one))[name])

    return merged_params, merged_leaf if leaf else None
