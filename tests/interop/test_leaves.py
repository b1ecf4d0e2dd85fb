"""The table of names: a tensor and its leaves, both ways, without the vocabulary's padding."""

import numpy as np
import pytest
import tiny_models as tiny

from jaxlm import models, tree
from jaxlm.interop import leaves
from jaxlm.interop.ahead import Ahead


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
        for leaf, back in zip(own, tensor.to_leaves(made), strict=True):
            np.testing.assert_array_equal(tensor.cut(back), tensor.cut(leaf))
            assert back.shape == leaf.shape
    assert total == leaves.parameters(cfg)
    with pytest.raises(Exception, match="has shape"):
        tensor.from_leaves([value[..., :-1] for value in own])


def test_leaves_are_read_one_ahead_and_in_any_order():
    asked = []

    def read(name):
        asked.append(name)
        if name == "bad":
            raise OSError("gone")
        return np.array(len(asked))

    with Ahead(read, ["a", "b", "bad"]) as ahead:
        assert ahead("a") == 1
        assert ahead("other").shape == ()
        assert ahead("b").shape == ()
        with pytest.raises(OSError, match="gone"):
            ahead("bad")
    assert sorted(asked) == ["a", "b", "bad", "other"]


@pytest.mark.parametrize("shape", [(70, 33), (1, 5), (5, 1), (4, 3, 2), (7,)])
def test_contiguous_copies_any_view(shape):
    value = np.arange(np.prod(shape), dtype=np.float16).reshape(shape)
    for view in (value, value.T, value[::-1], value.T[:, 1:] if value.ndim > 1 else value[1:]):
        made = leaves.contiguous(view)
        np.testing.assert_array_equal(made, view)
        assert made.flags.c_contiguous
