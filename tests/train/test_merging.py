"""An adapter is merged into what it was trained beside, one parameter at a time."""

import dataclasses

import jax
import numpy as np
import pytest
import tiny_models as tiny

from jaxlm import config, models
from jaxlm.config import config_files
from jaxlm.devices import tree
from jaxlm.models import adapters, quantized
from jaxlm.train import origin


@pytest.mark.parametrize("quantize", ["nf4", "int8"])
def test_one_by_one_equals_all_at_once(quantize):
    settings = config.resolve(config_files.load("base", ["data.path=x", "adapter.kind=lora", "adapter.rank=2"])).adapter
    adapter = adapters.of(dataclasses.replace(settings, quantize=quantize), (3, 7))
    model = models.build(tiny.model_config(n_layers=1, d_model=64, tie_embeddings=False), "xla")
    params = jax.device_get(tiny.random_params(model))
    rng = np.random.default_rng(0)
    drawn = jax.eval_shape(lambda: adapter.init(model, jax.random.key(0)))
    trained = jax.tree.map(lambda x: rng.normal(0, 0.1, x.shape).astype(np.float32), drawn)
    leaf = origin.merged_leaf(dict(tree.named_leaves(params)).get, adapter, lambda: trained)
    beside = tree.map_named(lambda name, x: quantized.rounded(name, x, quantize), params)
    expected = adapters.merge(beside, trained, adapter)
    for name, value in tree.named_leaves(expected):
        np.testing.assert_allclose(leaf(name), value, rtol=1e-6)
    changed = {name for name, x in tree.named_leaves(params) if not np.array_equal(leaf(name), x)}
    assert changed == {name for name in dict(tree.named_leaves(params)) if "norm" not in name}
