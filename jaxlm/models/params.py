"""A model's parameters: how they are made, their shapes, and the logical axes by which a mesh splits them."""

import functools
import re

import jax
import jax.numpy as jnp

from jaxlm import tree
from jaxlm.models.transformer import Transformer

# The one table from a parameter's name (full match) to its logical axes (see sharding.RULES).
LOGICAL_AXES = {
    r"embed/embedding": ("vocab", "embed"),
    r"pos_embed/embedding": ("position", "embed"),
    r"head/kernel": ("embed", "vocab"),
    r"(.*/)?[a-z]*_norm/(scale|bias)": ("norm",),
    r".*/attn/q/kernel": ("embed", "heads", "head_dim"),
    r".*/attn/[kv]/kernel": ("embed", "kv_heads", "head_dim"),
    r".*/attn/o/kernel": ("heads", "head_dim", "embed"),
    r".*/attn/q/bias": ("heads", "head_dim"),
    r".*/attn/[kv]/bias": ("kv_heads", "head_dim"),
    r".*/mlp/(gate|up)/kernel": ("embed", "mlp"),
    r".*/mlp/(gate|up)/bias": ("mlp",),
    r".*/mlp/down/kernel": ("mlp", "embed"),
    r".*/(attn/o|mlp/down)/bias": ("norm",),
}


def init_params(model: Transformer, key: jax.Array) -> dict:
    """New random parameters: a plain nested dict of float32 arrays, the same values on any mesh."""
    tokens_BxT = jnp.zeros((1, 2), jnp.int32)
    return model.init(key, tokens_BxT)["params"]


def abstract_params(model: Transformer) -> dict:
    """The parameters as ShapeDtypeStructs. Takes no device memory; a model is traced once, however often it is asked."""
    return jax.tree.map(lambda leaf: leaf, _abstract_params(model))  # a copy, so that no caller changes the cached dict


@functools.lru_cache(maxsize=8)
def _abstract_params(model: Transformer) -> dict:
    return jax.eval_shape(lambda: init_params(model, jax.random.key(0)))


def logical_axes(model: Transformer) -> dict:
    """The logical axes of every parameter: a tree like the parameters, with tuples of names as leaves.

    Raises:
      KeyError: a parameter that LOGICAL_AXES does not name.
    """

    def axes(name: str, leaf: jax.ShapeDtypeStruct) -> tuple[str, ...]:
        for pattern, names in LOGICAL_AXES.items():
            if re.fullmatch(pattern, name) and len(names) == len(leaf.shape):
                return names
        raise KeyError(f"no logical axes for parameter {name} {leaf.shape}: add it to models.params.LOGICAL_AXES")

    return tree.map_named(axes, abstract_params(model))
