"""Adds an adapter to a model's parameters as they are read, so that a run can begin with the two as one."""

import functools
from collections.abc import Callable

import numpy as np

from jaxlm import tree
from jaxlm.models import adapters, quantized
from jaxlm.objectives.base import Variables

Leaf = Callable[[str], np.ndarray]  # name -> one parameter, on the host


def merge(leaf: Leaf, adapter: adapters.Adapter, trained: Callable[[], Variables]) -> Leaf:
    """Returns what reads the parameters with the adapter merged into them, given what reads those of its base.

    An adapter that was trained beside quantised kernels is added to what these stood for: to the model that it has learnt
    beside.

    Args:
      trained: reads the adapter's variables, on the host.
    """
    variables = functools.cache(trained)

    def merged(name: str) -> np.ndarray:
        base = quantized.rounded(name, leaf(name), adapter.settings.quantize)
        one = adapters.merge(tree.nested([(name, base)]), variables(), adapter)
        return np.asarray(dict(tree.named_leaves(one))[name])

    return merged
