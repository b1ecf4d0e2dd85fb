"""Parameters made of an origin's, one at a time: an adapter is merged, new ids get rows near the mean, all else stays."""

import dataclasses

import jax
import jax.numpy as jnp
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


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def grown(request):
    """(config before and after, parameters before, what reads the grown ones). 126 ids become 131: more padding rows."""
    old = tiny.model_config(n_layers=1, vocab_size=126, tie_embeddings=request.param)
    new = dataclasses.replace(old, vocab_size=131)
    given = tiny.random_params(models.build(old, "xla"))
    host = {name: np.asarray(x) for name, x in tree.named_leaves(given)}
    return old, new, given, origin.grown_leaf(host.get, old, new)


def test_what_was_there_stays_and_gives_the_same_logits(grown):
    old, new, given, leaf = grown
    model = models.build(new, "xla")
    abstract = models.abstract_params(model)
    found = tree.map_named(lambda name, _: leaf(name), abstract)
    jax.tree.map(lambda x, shape: np.testing.assert_equal(x.shape, shape.shape), found, abstract)
    batch = tiny.packed_batch(old)
    before = tiny.hidden(models.build(old, "xla"), {"params": given}, batch)
    after = tiny.hidden(model, {"params": found}, batch)
    np.testing.assert_array_equal(after, before)
    logits = after @ models.head_kernel(jax.tree.map(jnp.asarray, found), new)
    assert logits.shape[-1] == 256
    np.testing.assert_allclose(
        logits[..., :126], (before @ models.head_kernel(given, old))[..., :126], rtol=1e-5, atol=1e-6
    )


def test_new_rows_are_near_the_mean_and_differ(grown):
    old, _, given, leaf = grown
    for name, axis in (("embed/embedding", 0), ("head/kernel", 1)):
        if name.startswith("head") and old.tie_embeddings:
            continue
        table, before = (
            np.moveaxis(x, axis, 0) for x in (leaf(name), np.asarray(dict(tree.named_leaves(given))[name]))
        )
        rows, mean, spread = table[126:131], before[:126].mean(0), before[:126].std(0)
        assert np.abs((rows - mean) / spread).max() < 0.5  # five draws of a tenth of the deviation
        assert len({row.tobytes() for row in rows}) == 5
        assert not table[131:].any()
        np.testing.assert_array_equal(table[:126], before[:126])
