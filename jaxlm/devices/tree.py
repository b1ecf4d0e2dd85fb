"""Names the leaves of a tree of parameters (`layers_0/attn/q/kernel`), and maps, groups and matches them by name."""

import re
import typing

import jax
import numpy as np


def path_name(path: tuple) -> str:
    return "/".join(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path)


def named_leaves(tree: typing.Any) -> list[tuple[str, typing.Any]]:
    """Returns (name, leaf) of all leaves, in tree order. A name is the path to the leaf, such as `a/b/c`."""
    return [(path_name(path), leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]]


def nested(named: typing.Iterable[tuple[str, typing.Any]]) -> dict:
    """Returns the tree of dicts with the leaves `named`, pairs of (name, leaf); inverse of `named_leaves`."""
    tree: dict = {}
    for name, leaf in named:
        *parents, last = name.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return tree


def map_named(fn: typing.Callable, tree: typing.Any, *rest: typing.Any) -> typing.Any:
    """Returns the tree of `fn(name, leaf, ...)`: like `jax.tree.map`, but with the leaf's name as a first argument."""
    return jax.tree_util.tree_map_with_path(lambda path, *leaves: fn(path_name(path), *leaves), tree, *rest)


def count(tree: typing.Any) -> int:
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(tree))


def regex_mask(tree: typing.Any, yes: typing.Sequence[str], no: typing.Sequence[str]) -> typing.Any:
    """Returns a tree of booleans: True if a leaf's whole name matches a pattern in `yes`, False if it matches one in `no`.

    Raises ValueError if a name matches neither list or both, so that no new parameter gets a default by accident.
    """

    def decide(name: str, _) -> bool:
        in_yes, in_no = (any(re.fullmatch(p, name) for p in patterns) for patterns in (yes, no))
        if in_yes == in_no:
            raise ValueError(f"parameter {name} matches {'both' if in_yes else 'neither'} of {yes} and {no}")
        return in_yes

    return map_named(decide, tree)


def layer_name(i: int) -> str:
    return f"layers_{i}"


def layer_of(name: str) -> int | None:
    """Returns the index of the layer that a parameter is in; None if it is in no layer (`embed/embedding`)."""
    match = re.match(r"layers_(\d+)(/|$)", name)
    return int(match[1]) if match else None


def group_of(name: str) -> str:
    """Returns the group in which a parameter's norm is logged: `layers/attn` (all layers together), `embed`, ..."""
    parts = name.split("/")
    return parts[0] if layer_of(name) is None else "/".join(["layers", *parts[1:2]])


def merge(collections: dict[str, dict]) -> dict:
    """Merges all collections of variables into one tree, in which a leaf's name does not contain its collection.

    {"params": {"layers_0": {"q": a}}, "lora": {"layers_0": {"q_a": b}}} becomes {"layers_0": {"q": a, "q_a": b}}. So
    patterns of names (decay, groups, Muon's matrices) match in every collection. `split` undoes the merge.

    Raises ValueError if two collections have a leaf of the same name.
    """
    merged: dict = {}
    for collection in collections.values():
        merged = _merge(merged, collection, "")
    return merged


def _merge(a: dict, b: dict, name: str) -> dict:
    if not (isinstance(a, dict) and isinstance(b, dict)):
        raise ValueError(f"two collections of variables have a leaf {name}: give one of them another name")
    return a | {key: _merge(a[key], part, f"{name}/{key}".lstrip("/")) if key in a else part for key, part in b.items()}


def split(merged: dict, like: dict[str, dict]) -> dict[str, dict]:
    """Undoes `merge`: sorts the leaves of a merged tree into the collections of `like`."""
    leaves = dict(named_leaves(merged))
    return {name: map_named(lambda path, _: leaves[path], collection) for name, collection in like.items()}
