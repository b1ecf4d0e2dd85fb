"""Named leaves, counts and regex masks."""

import jax.numpy as jnp
import pytest

from jaxlm.devices import tree

TREE = {"embed": {"embedding": jnp.zeros((4, 2))}, "layers_3": {"attn": {"q": {"kernel": jnp.zeros((2, 2, 1))}}}}


def test_names_and_count():
    assert [name for name, _ in tree.named_leaves(TREE)] == ["embed/embedding", "layers_3/attn/q/kernel"]
    assert tree.count(TREE) == 12
    assert tree.map_named(lambda name, x: f"{name}:{x.size}", TREE)["embed"]["embedding"] == "embed/embedding:8"


def test_names_become_the_tree_again():
    named = tree.named_leaves(TREE)
    assert dict(tree.named_leaves(tree.nested(named))) == dict(named)
    assert tree.nested(named).keys() == TREE.keys()


def test_regex_mask_covers_every_parameter():
    mask = tree.regex_mask(TREE, [".*/kernel"], ["embed/.*"])
    assert mask["layers_3"]["attn"]["q"]["kernel"] is True
    assert mask["embed"]["embedding"] is False
    with pytest.raises(ValueError, match="embed/embedding matches neither"):
        tree.regex_mask(TREE, [".*/kernel"], [])
    with pytest.raises(ValueError, match="embed/embedding matches both"):
        tree.regex_mask(TREE, [".*"], ["embed/.*"])


def test_groups():
    assert tree.group_of("layers_12/attn/q/kernel") == "layers/attn"
    assert tree.group_of("embed/embedding") == "embed"


def test_layers_by_name_and_by_number():
    assert tree.layer_of(f"{tree.layer_name(12)}/attn/q/kernel") == tree.layer_of(tree.layer_name(12)) == 12
    for name in ("embed/embedding", "final_norm/scale", "layers/attn", "layers_x/attn", "head/layers_1"):
        assert tree.layer_of(name) is None
