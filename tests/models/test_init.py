"""Parameters made one by one are those that one program makes."""

import jax
import numpy as np
import pytest
import tiny_models as tiny
from tiny_steps import make_mesh

from jaxlm import models
from jaxlm.devices import sharding, tree
from jaxlm.models import init


def shardings_on(mesh, model):
    return sharding.tree_shardings(models.abstract_params(model), models.logical_axes(model), mesh)


@pytest.mark.parametrize(
    "overrides",
    [{"tie_embeddings": False, "qk_norm": True}, {"scan_layers": True}, {"family": "gpt2"}],
    ids=["untied", "scanned", "gpt2"],
)
def test_each_parameter_is_that_of_one_program(overrides):
    model = models.build(tiny.model_config(**overrides), "xla")
    key = jax.random.key(3)
    expected = dict(tree.named_leaves(tiny.jit(lambda key: models.init_params(model, key))(key)))
    for mesh in (make_mesh(), make_mesh(fsdp=2, tensor=2, data=2)):
        placed = shardings_on(mesh, model)
        with jax.set_mesh(mesh):
            made = dict(tree.named_leaves(models.create_params(model, key, placed)))
        assert made.keys() == expected.keys()
        for name, leaf in tree.named_leaves(placed):
            assert made[name].sharding == leaf
            np.testing.assert_array_equal(made[name], expected[name], err_msg=name)
    other = dict(tree.named_leaves(models.create_params(model, jax.random.key(4), placed)))
    assert not np.array_equal(other["embed/embedding"], expected["embed/embedding"])


def test_deeper_models_take_no_more_programs():
    def programs(n_layers: int) -> int:
        model = models.build(tiny.model_config(n_layers=n_layers), "xla")
        init._program.cache_clear()
        models.create_params(model, jax.random.key(0), shardings_on(make_mesh(), model))
        return init._program.cache_info().currsize

    assert programs(6) == programs(3)
