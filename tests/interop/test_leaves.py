"""The table of names: a tensor and its leaves, both ways, without the vocabulary's padding."""

import threading

import numpy as np
import pytest
import tiny_models as tiny

from jaxlm import models
from jaxlm.devices import tree
from jaxlm.interop import leaves


@pytest.mark.parametrize(
    "overrides", [{"qkv_bias": True, "tie_embeddings": False}, {"family": "gpt2"}, {"qk_norm": True}]
)
def test_every_leaf_is_in_one_tensor_and_comes_back(overrides):
    cfg = tiny.model_config(**overrides)
    values = {name: np.asarray(leaf) for name, leaf in tree.named_leaves(tiny.random_params(models.build(cfg, "xla")))}
    assert leaves.by_leaf(cfg).keys() == values.keys()
    total = 0
    for tensor in leaves.tensors(cfg):
        own = [values[leaf] for leaf in tensor.leaves]
        made = tensor.from_leaves(own)
        assert made.shape == tensor.shape
        assert made.flags.c_contiguous
        total += made.size
        backs = [tensor.to_leaf(made, place) for place in range(len(own))]
        np.testing.assert_array_equal(tensor.from_leaves(backs), made)
        for leaf, back in zip(own, backs, strict=True):
            assert back.shape == leaf.shape
            same = np.moveaxis(back == leaf, -1 if tensor.leaves[0].startswith("head/") else 0, 0)
            assert same[: tensor.vocab_size or None].all()
            assert not back[back != leaf].any()  # the vocabulary's padding is 0
    assert total == leaves.parameters(cfg)
    with pytest.raises(Exception, match="has shape"):
        tensor.from_leaves([value[..., :-1] for value in own])


def test_the_next_tensor_is_read_while_one_is_worked_on():
    wanted, ahead = [leaves.Tensor(name, (name, f"{name}2"), ((1,), (1,))) for name in "abc"], threading.Event()

    def read(leaf):
        if leaf == "b2":
            ahead.set()
        if leaf == "c2":
            raise OSError("gone")
        return leaf

    pairs = leaves.read_ahead(read, wanted)
    assert next(pairs) == (wanted[0], ["a", "a2"])
    assert ahead.wait(10)
    assert next(pairs) == (wanted[1], ["b", "b2"])
    with pytest.raises(OSError, match="gone"):
        next(pairs)
    assert list(leaves.read_ahead(read, wanted[:1])) == [(wanted[0], ["a", "a2"])]


@pytest.mark.parametrize("shape", [(70, 33), (1, 5), (5, 1), (4, 3, 2), (7,)])
def test_contiguous_copies_any_view(shape):
    value = np.arange(np.prod(shape), dtype=np.float16).reshape(shape)
    for view in (value, value.T, value[::-1], value.T[:, 1:] if value.ndim > 1 else value[1:]):
        made = leaves.contiguous(view)
        np.testing.assert_array_equal(made, view)
        assert made.flags.c_contiguous
