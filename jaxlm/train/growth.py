"""Changes a model's parameters as they are read: gives them more ids than they were trained with, or merges an adapter in.

A base that was trained without ChatML's tokens gets them this way. A new row is the mean of all others, so that at first its
token is as likely as an average one and takes next to nothing from the others (Hewitt 2021, "Initializing New Word
Embeddings for Pretrained Language Models"), plus a little noise by which the new tokens differ. The rows depend on the
parameters alone, not on the run's seed: whoever grows the same base gets the same model, and an adapter fits it.
"""

import functools
from collections.abc import Callable

import numpy as np

from jaxlm.config import ModelConfig
from jaxlm.devices import tree
from jaxlm.models import adapters, quantized
from jaxlm.step.objectives.base import Variables

Leaf = Callable[[str], np.ndarray]  # name -> one parameter, on the host

_VOCABULARY_AXIS = {"embed/embedding": 0, "head/kernel": 1}
_SPREAD = 0.1  # of the noise, in standard deviations of each feature over the other rows


def grow(leaf: Leaf, old: ModelConfig, new: ModelConfig) -> Leaf:
    """Returns what reads the grown model's parameters, given what reads its own. Rows that stay keep every bit.

    Args:
      old, new: the model before and after; they differ in `vocab_size`.
    """

    def grown(name: str) -> np.ndarray:
        table = leaf(name)
        if name not in _VOCABULARY_AXIS:
            return table
        axis = _VOCABULARY_AXIS[name]
        rows = np.moveaxis(table, axis, 0)[: old.vocab_size]
        padding = np.zeros((new.padded_vocab_size - new.vocab_size, rows.shape[1]), rows.dtype)
        added = _new_rows(rows, new.vocab_size - old.vocab_size).astype(rows.dtype)
        return np.ascontiguousarray(np.moveaxis(np.concatenate([rows, added, padding]), 0, axis))

    return grown


def _new_rows(rows_VxD: np.ndarray, count: int) -> np.ndarray:
    """The rows of the new ids, float64 [count, D]: made on the host, so that they are the same on every mesh."""
    rows_VxD = rows_VxD.astype(np.float64)
    noise = np.random.default_rng(len(rows_VxD)).standard_normal((count, rows_VxD.shape[1]))
    return rows_VxD.mean(0) + _SPREAD * rows_VxD.std(0) * noise


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
        params = adapters.merge(tree.nested([(name, base)]), variables(), adapter)
        return np.asarray(dict(tree.named_leaves(params))[name])

    return merged
