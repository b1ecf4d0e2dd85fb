"""Quantised parameters: frozen ones, for training with adapters (QLoRA, arXiv:2305.14314), and those in int8, for decoding.

A quantised kernel is not in `params`: the collection `quantized` has its `codes` and `scales`. All other parameters,
including kernels whose number of inputs no block size divides, are stored in the compute dtype, to which the model casts
them anyway; vectors (norms) in float32.

For decoding (`in_int8`), kernels, embedding and head are in the collection `packed`, by `ops.int8`. That is another form: a
product with `quantized` decodes blocks of inputs to floats, with `packed` it is a product of integers.
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxlm.devices import tree
from jaxlm.devices.sharding import from_host
from jaxlm.models import adapters
from jaxlm.models.params import abstract_params, input_axes, logical_axes, pack_layer
from jaxlm.models.transformer import Transformer
from jaxlm.ops import block_codes, int8

Frozen = dict[str, dict]  # collection -> tree: "params" and, if kernels are quantised, "quantized"


def freeze(params: dict, kind: str, dtype: str) -> Frozen:
    """Returns the frozen form of a model's float32 parameters. A pure function: trace it for shapes, or run it on small models.

    `kind` is the config's `adapter.quantize`: "none", "nf4" or "int8"; `dtype` is the compute dtype.
    """
    leaves = {}
    for name, leaf in tree.named_leaves(params):
        own = _kind(name, leaf, kind)
        leaves |= zip(_places(name, own), _kept(leaf, input_axes(name), own, dtype), strict=True)
    return tree.nested(leaves.items())


def whole_kernels(frozen: Frozen) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns name -> shape of the layers' kernels that `freeze` did not quantise."""
    return {name: leaf for name, leaf in tree.named_leaves(frozen.get("params", {})) if _is_kernel(name)}


def frozen_axes(model: Transformer, kind: str) -> Frozen:
    """Returns the logical axes (tuples) of each array that `freeze` returns. Codes and scales are sharded like their kernel."""
    abstract = abstract_params(model)
    axes = jax.tree.structure(abstract).flatten_up_to(logical_axes(model))
    axes_of_place = {}
    for (name, leaf), names in zip(tree.named_leaves(abstract), axes, strict=True):
        own = _kind(name, leaf, kind)
        split = names if own == "none" else (names[0], *names[input_axes(name) :])
        axes_of_place |= dict.fromkeys(_places(name, own), split)
    return tree.nested(axes_of_place.items())


def load(params: Iterable[tuple[str, jax.Array]], kind: str, dtype: str, shardings: Frozen) -> Frozen:
    """Returns the same as `freeze`, made one parameter at a time, so that only one float32 array is in memory.

    Args:
      params: yields (name, array in its shards), and creates each array only when it is reached.
      shardings: a tree like the result, with a sharding for each array.
    """
    wanted, leaves = dict(tree.named_leaves(shardings)), {}
    for name, leaf in params:
        own = _kind(name, leaf, kind)
        places = _places(name, own)
        program = _program(input_axes(name), own, dtype, tuple(wanted[place] for place in places))
        # Wait: else reading would run ahead, and many float32 arrays would be in memory.
        leaves |= zip(places, jax.block_until_ready(program(leaf)), strict=True)
    return tree.nested(leaves.items())


def placed(read: Callable[[str], np.ndarray], abstract: dict, shardings: dict) -> Iterator[tuple[str, jax.Array]]:
    """Yields (name, float32 array in its shards) for each parameter; `read(name)` returns it on the host."""
    for (name, leaf), sharding in zip(tree.named_leaves(abstract), jax.tree.leaves(shardings), strict=True):
        yield name, from_host(read(name), leaf.shape, jnp.float32, sharding)


def rounded(name: str, value: np.ndarray, kind: str) -> np.ndarray:
    """Returns one parameter on the host, quantised and decoded again."""
    if _kind(name, value, kind) == "none":
        return value
    return np.asarray(_round_trip(np.asarray(value, np.float32), kind, input_axes(name)))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _round_trip(kernel: jax.Array, kind: str, axes: int) -> jax.Array:
    return block_codes.decode(block_codes.quantize(kernel, kind, axes), kernel.shape, jnp.float32)


def in_int8(model: Transformer, variables: dict) -> dict:
    """Returns a model's variables with weights in int8, adapters merged, and empties `variables`: part by part, so that only
    one part is in memory twice. Learned positions, norms, biases and the virtual tokens of a prompt keep their type.
    """
    params, kept, packed = variables.pop("params"), {}, {}
    added = {name: variables.pop(name) for name in adapters.MERGED if name in variables}
    adapter = adapters.Adapter(model.adapter, model.row_ids) if added else None
    for name in list(params):
        part = {name: params.pop(name)}
        part = adapters.merge(part, added, adapter) if adapter else part
        kind = name if tree.layer_of(name) is None else "layer"
        kept[name], packed[name] = jax.block_until_ready(_part_in_int8(part[name], kind, model.config.dtype))
    trees = {"params": kept, "packed": packed}
    return variables | {of: {name: part for name, part in whole.items() if part} for of, whole in trees.items()}


@functools.partial(jax.jit, static_argnames=("kind", "dtype"))
def _part_in_int8(part: dict, kind: str, dtype: str) -> tuple[dict, dict]:
    """Returns (what keeps its type, what is in int8) of a layer's parameters, or of those outside the layers."""
    kept, matrices = part, {}
    if kind == "layer":
        kept, matrices = pack_layer(part, every_product=True)
    elif kind in ("embed", "head"):
        kept, matrices = {}, {name: leaf.T if kind == "head" else leaf for name, leaf in part.items()}
    kept = jax.tree.map(lambda leaf: leaf.astype(dtype) if leaf.ndim > 1 else leaf, kept)
    return kept, jax.tree.map(int8.quantize, matrices)


def _is_kernel(name: str) -> bool:
    return tree.layer_of(name) is not None and name.endswith("/kernel")


def _kind(name: str, leaf: jax.Array | jax.ShapeDtypeStruct | np.ndarray, kind: str) -> str:
    """Returns how a parameter is stored: `kind` for a layer's kernel whose inputs a block size divides, else "none"."""
    fits = _is_kernel(name) and block_codes.block_size(math.prod(leaf.shape[: input_axes(name)]))
    return kind if fits else "none"


def _places(name: str, kind: str) -> tuple[str, ...]:
    stem = f"quantized/{name.removesuffix('/kernel')}"
    return (f"params/{name}",) if kind == "none" else (f"{stem}/codes", f"{stem}/scales")


def _kept(leaf: jax.Array, axes: int, kind: str, dtype: str) -> tuple[jax.Array, ...]:
    """Returns the stored arrays of a parameter, one for each of its `_places`."""
    if kind != "none":
        return block_codes.quantize(leaf.astype(jnp.float32), kind, axes)
    return (leaf.astype(dtype) if leaf.ndim > 1 else leaf,)


@functools.lru_cache(maxsize=64)
def _program(axes: int, kind: str, dtype: str, shardings: tuple[NamedSharding, ...]) -> Callable:
    return jax.jit(lambda leaf: tuple(_kept(leaf, axes, kind, dtype)), out_shardings=shardings)
