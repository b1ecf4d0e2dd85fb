"""Grows parameters: a larger model that computes the same function, for `jaxlm grow`.

What writes into the residual stream (embeddings, `o`, `down`) gets zeros in its new rows and columns, what reads from it random
numbers. So new features are 0 at first, new heads and feed-forward features add 0, gradients reach all of them, and none is a
copy of another (arXiv:2308.06103, arXiv:2602.02472). An RMS norm over d' features in place of d divides by a root mean square
that is sqrt(d/d') of the old one: its gain is multiplied by that, and `model.norm_eps` by d/d'. A new layer is a copy of the
layer below it whose `o` and `down` are 0 (arXiv:2401.02415).
"""

import re
from collections.abc import Sequence

import jax
import numpy as np

from jaxlm.devices import tree
from jaxlm.models.params import axes_of

_AXES = ((), ("embed", "norm"), ("heads",), ("kv_heads",), ("mlp",), ("vocab",))  # with the sizes of `config.GROWS`
_WRITERS = re.compile(r"(pos_)?embed/embedding|.*/(attn/o|mlp/down)/(kernel|bias)")


def source(name: str, old: int, new: int) -> tuple[str, bool]:
    """Returns (the parameter of `old` layers from which one of `new` layers is made, True if its layer is a copy)."""
    layer = tree.layer_of(name)
    if layer is None:
        return name, False
    below = layer * old // new
    copied = layer > 0 and (layer - 1) * old // new == below
    return name.replace(tree.layer_name(layer), tree.layer_name(below), 1), copied


def old_parts(params: dict, sizes: Sequence[int]) -> dict[str, tuple[int, ...] | None]:
    """Returns parameter -> how much of each axis an older model had; None if its layer is a copy.

    Args:
      sizes: of the older model, in the order of `config.GROWS`.
    """
    named = tree.named_leaves(params)
    layers = 1 + max(tree.layer_of(name) or 0 for name, _ in named)
    of_axis = {axis: size for size, axes in zip(sizes, _AXES, strict=True) for axis in axes}

    def part(name: str, leaf: jax.ShapeDtypeStruct) -> tuple[int, ...] | None:
        axes = zip(leaf.shape, axes_of(name, leaf), strict=True)
        return None if source(name, sizes[0], layers)[1] else tuple(min(n, of_axis.get(axis, n)) for n, axis in axes)

    return {name: part(name, leaf) for name, leaf in named}


def grown(name: str, old: np.ndarray, new: np.ndarray, copied: bool) -> np.ndarray:
    """Returns a parameter of the larger model: `old` in the first rows and columns of `new`, which was drawn at random."""
    writes = _WRITERS.fullmatch(name)
    made = np.zeros_like(new) if writes else np.array(new)
    if writes and copied and tree.layer_of(name) is not None:
        return made
    gain = np.sqrt(old.size / new.size) if name.endswith("_norm/scale") else 1.0
    made[tuple(slice(size) for size in old.shape)] = old * np.float32(gain)
    return made


def moment(name: str, old: np.ndarray, shape: Sequence[int], copied: bool, second: bool) -> np.ndarray:
    """Returns an optimizer's moment for a parameter of the larger model: `old` in the first rows and columns of zeros.

    The gradients of old parts are what they were. But a norm's gain is sqrt(d/d') times the old one, so its gradient is
    sqrt(d'/d) times as large. `second`: `old` is a moment of squares.
    """
    made = np.zeros(shape, old.dtype)
    if not copied:
        ratio = made.size / old.size if name.endswith("_norm/scale") else 1.0
        made[tuple(slice(size) for size in old.shape)] = old * old.dtype.type(ratio if second else np.sqrt(ratio))
    return made
