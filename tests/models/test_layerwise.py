"""A layer at a time is the same model."""

import numpy as np
import pytest
import tiny_models as tiny

from jaxlm import models
from jaxlm.models import layerwise


@pytest.mark.parametrize("overrides", [{"tie_embeddings": False}, {"family": "gpt2"}])
def test_layer_by_layer_equals_the_whole(overrides):
    cfg = tiny.model_config(**overrides)
    model = models.build(cfg, "xla")
    params = tiny.random_params(model)
    tokens = np.arange(12)[None]
    x = layerwise.embed(model, {name: part for name, part in params.items() if "embed" in name}, tokens)
    run = layerwise.layer(model)
    for i in range(cfg.n_layers):
        x = run(params[f"layers_{i}"], x)
    wanted = np.asarray(models.logits(model, params, tokens))
    assert np.abs(layerwise.logits(model, params, x) - wanted).max() < 1e-5 * np.abs(wanted).max()
    swapped = run(params["layers_0"], run(params["layers_1"], layerwise.embed(model, params, tokens)))
    assert np.abs(layerwise.logits(model, params, swapped) - wanted).max() > 1e-3 * np.abs(wanted).max()
