"""Creates a model's parameters, and returns their shapes and the logical axes by which a mesh shards them."""

import functools
import math
import operator
import re
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from jaxlm.config import ModelConfig
from jaxlm.devices import tree
from jaxlm.devices.sharding import axis_size
from jaxlm.models import init
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


def input_axes(name: str) -> int:
    """Returns how many of a kernel's leading axes are inputs: 2 for `attn/o/kernel` (heads, head dim), 1 for all others."""
    return 2 if name.endswith("attn/o/kernel") else 1


def init_params(model: Transformer, key: jax.Array) -> dict:
    """Returns new random parameters: a plain nested dict of float32 arrays, with the same values on any mesh."""
    return model.init(key, jnp.zeros((1, 2), jnp.int32))["params"]


def create_params(model: Transformer, key: jax.Array, shardings: dict) -> dict:
    """Returns the parameters of `init_params`, bit for bit, each created in its shards by a small program (see `init`).

    `key` must be concrete; `shardings` is a tree like the parameters.
    """
    return tree.nested(each_param(model, key, shardings))


def each_param(model: Transformer, key: jax.Array, shardings: dict) -> Iterator[tuple[str, jax.Array]]:
    """Yields (name, array) of the parameters of `create_params`, each created only when the iterator reaches it."""
    for draw in init.of(lambda: init_params(model, key)):
        made = init.make(draw, functools.reduce(operator.getitem, draw.path, shardings))
        yield from tree.named_leaves(tree.nested([("/".join(draw.path), made)]))  # a draw may be a tree itself (`head`)


def abstract_params(model: Transformer) -> dict:
    """Returns the parameters as ShapeDtypeStructs. Uses no device memory, and traces each model only once."""
    return jax.tree.map(lambda leaf: leaf, _abstract_params(model))  # a copy, so that no caller changes the cached dict


@functools.lru_cache(maxsize=8)
def _abstract_params(model: Transformer) -> dict:
    return jax.eval_shape(lambda: init_params(model, jax.random.key(0)))


def logical_axes(model: Transformer) -> dict:
    """Returns the logical axes of every parameter: a tree like the parameters, with tuples of names as leaves."""
    return tree.map_named(axes_of, abstract_params(model))


def axes_of(name: str, leaf: jax.ShapeDtypeStruct) -> tuple[str, ...]:
    """Returns the logical axes of a parameter. Raises KeyError if LOGICAL_AXES does not name it."""
    for pattern, names in LOGICAL_AXES.items():
        if re.fullmatch(pattern, name) and len(names) == len(leaf.shape):
            return names
    raise KeyError(f"no logical axes for parameter {name} {leaf.shape}: add it to models.params.LOGICAL_AXES")


# The products of a layer: module -> name of the product -> the kernels that it multiplies side by side.
_PRODUCTS = {
    "attn": {"qkv": ("q", "k", "v"), "o": ("o",)},
    "mlp": {"gate_up": ("gate", "up"), "up": ("up",), "down": ("down",)},
}


def pack_params(params: dict, config: ModelConfig, every_product: bool) -> tuple[dict, dict]:
    """Returns (the parameters without the packed kernels, the collection `packed`): see `pack_layer`.

    If the mesh shards parameters over `tensor`, nothing is packed, and products stay separate. Merge adapters into `params`
    first.
    """
    if axis_size("tensor") > 1:
        return params, {}
    pairs = {tree.layer_name(i): pack_layer(params[tree.layer_name(i)], every_product) for i in range(config.n_layers)}
    return params | {name: pair[0] for name, pair in pairs.items()}, {name: pair[1] for name, pair in pairs.items()}


def pack_layer(layer: dict, every_product: bool) -> tuple[dict, dict]:
    """Returns (a layer's parameters without the packed kernels, the kernels as matrices (out, in)).

    `layers.project` reads these matrices, by `ops.decode.row_product`. q, k and v are packed into one matrix, gate and up
    into another. `every_product` packs the other kernels too, which is faster on CPUs.
    """
    rest, packed = jax.tree.map(lambda leaf: leaf, layer), {"attn": {}, "mlp": {}}  # the first: a copy of the dicts
    for part, products in _PRODUCTS.items():
        for product, names in products.items():
            there = all("kernel" in rest[part].get(name, {}) for name in names)
            if there and (every_product or len(names) > 1):
                matrices = [_matrix(f"{part}/{name}/kernel", rest[part][name].pop("kernel")) for name in names]
                packed[part][product] = jnp.concatenate(matrices)
    return rest, packed


def _matrix(name: str, kernel: jax.Array) -> jax.Array:
    return kernel.reshape(math.prod(kernel.shape[: input_axes(name)]), -1).T
