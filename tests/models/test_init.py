"""Parameters made one by one are those that one program makes."""

import jax
import numpy as np
import pytest
import tiny_models as tiny
from tiny_steps import make_mesh

from jaxlm import models
from jaxlm.devices import sharding, tree
from jaxlm.models import init


def create(model, key, **mesh):
    """(parameters by name, their shardings by name) on a mesh."""
    mesh = make_mesh(**mesh)
    placed = sharding.tree_shardings(models.abstract_params(model), models.logical_axes(model), mesh)
    with jax.set_mesh(mesh):
        return dict(tree.named_leaves(models.create_params(model, key, placed))), dict(tree.named_leaves(placed))


@pytest.mark.parametrize(
    "overrides", [{"tie_embeddings": False, "qk_norm": True, "scan_layers": True}, {"family": "gpt2"}]
)
def test_each_parameter_is_that_of_one_program(overrides):
    model, key = models.build(tiny.model_config(**overrides), "xla"), jax.random.key(3)
    expected = dict(tree.named_leaves(tiny.jit(lambda key: models.init_params(model, key))(key)))
    made, placed = create(model, key, fsdp=2, tensor=2, data=2)
    assert made.keys() == expected.keys()
    for name, leaf in placed.items():
        assert made[name].sharding == leaf
        np.testing.assert_array_equal(made[name], expected[name], err_msg=name)
    other, _ = create(model, jax.random.key(4))
    assert not np.array_equal(other["embed/embedding"], expected["embed/embedding"])


def test_deeper_models_take_no_more_programs():
    def programs(n_layers: int) -> int:
        init._program.cache_clear()
        create(models.build(tiny.model_config(n_layers=n_layers), "xla"), jax.random.key(0))
        return init._program.cache_info().currsize

    assert programs(4) == programs(2)
