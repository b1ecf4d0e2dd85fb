"""A model with more ids than it was trained with: what it had keeps every bit, new rows are the mean and a little noise."""

import dataclasses

import jax
import numpy as np
import pytest
import tiny_models as tiny
from tiny_steps import make_mesh

from jaxlm import models, sharding, tree
from jaxlm.train import growth


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def grown(request):
    """(config before and after, parameters before, readers of the grown ones). 126 ids become 131: more padding rows."""
    old = tiny.model_config(vocab_size=126, tie_embeddings=request.param)
    new = dataclasses.replace(old, vocab_size=131)
    given = tiny.random_params(models.build(old, "xla"))

    def params(abstract, shardings):
        jax.tree.map(lambda shape, x: np.testing.assert_equal(shape.shape, x.shape), abstract, given)
        return jax.device_put(given, shardings)

    host = {name: np.asarray(x) for name, x in tree.named_leaves(given)}
    return old, new, given, growth.grow(params, host.get, old, new)


def test_what_was_there_stays_and_gives_the_same_logits(grown):
    old, new, given, (params, leaf) = grown
    model, mesh = models.build(new, "xla"), make_mesh(fsdp=2, tensor=4)
    abstract = models.abstract_params(model)
    placed = sharding.tree_shardings(abstract, models.logical_axes(model), mesh)
    found = params(abstract, placed)
    jax.tree.map(lambda x, shape: np.testing.assert_equal(x.shape, shape.shape), found, abstract)
    assert jax.tree.map(lambda x: x.sharding, found) == placed
    for name, x in tree.named_leaves(found):
        np.testing.assert_array_equal(x, leaf(name))
    batch = tiny.packed_batch(old)
    before, after = (
        tiny.hidden(models.build(old, "xla"), {"params": given}, batch),
        tiny.hidden(model, {"params": jax.device_get(found)}, batch),
    )
    np.testing.assert_array_equal(after, before)
    logits = np.asarray(after) @ np.asarray(models.head_kernel(jax.device_get(found), new))
    np.testing.assert_allclose(
        logits[..., :126], (before @ models.head_kernel(given, old))[..., :126], rtol=1e-5, atol=1e-6
    )


def test_new_rows_are_near_the_mean_and_differ(grown):
    old, _, given, (_, leaf) = grown
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
