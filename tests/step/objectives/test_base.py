"""The functions that objectives are made of: log-probabilities by token, sums by segment, scalar heads."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models as tiny

from jaxlm import config, models
from jaxlm.config import config_files
from jaxlm.devices import sharding
from jaxlm.step.objectives import base

CONFIG = tiny.model_config(n_layers=1)
MODEL = models.build(CONFIG, "xla")
VARIABLES = {"params": tiny.random_params(MODEL)}
BATCH = tiny.packed_batch(CONFIG, batch=8)


def logp_by_hand(variables):
    logits = tiny.logits(MODEL, variables["params"], BATCH["tokens"], BATCH["positions"], BATCH["segment_ids"])
    return jnp.take_along_axis(jax.nn.log_softmax(logits), BATCH["targets"][..., None], -1)[..., 0]


@pytest.mark.parametrize(("tile", "mesh"), [(0, (1, 1, 1, 1)), (7, (2, 2, 1, 2))])
def test_token_logp_and_its_gradient_are_those_of_all_logits_at_once(tile, mesh):
    slope = jnp.asarray(np.random.default_rng(0).normal(size=BATCH["tokens"].shape), jnp.float32)

    def of(logp):
        def loss(v):
            by_token = logp(v)
            return jnp.sum(by_token * slope), by_token

        return jax.jit(jax.value_and_grad(loss, has_aux=True))

    (want, by_token), d_want = of(logp_by_hand)(VARIABLES)
    on = sharding.make_mesh(config.MeshConfig(*mesh), jax.devices()[: int(np.prod(mesh))])
    with jax.set_mesh(on):
        (got, found), d_got = of(lambda v: base.token_logp(MODEL, v, BATCH, tile))(VARIABLES)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    np.testing.assert_allclose(found, by_token, rtol=1e-4)
    assert tiny.difference(d_got, d_want) < 1e-4


def test_full_logits_never_exist_in_either_pass_of_token_logp():
    def count(tile):
        fn = jax.grad(lambda v: jnp.sum(base.token_logp(MODEL, v, BATCH, tile)))
        rows = BATCH["tokens"].size
        return jax.jit(fn).lower(VARIABLES).as_text().count(f"tensor<{rows}x{CONFIG.padded_vocab_size}xf32>")

    assert count(16) == 0
    assert count(0) > 0


def test_sums_by_segment():
    x = jnp.asarray([[1.0, 2.0, 4.0, 8.0], [1.0, 1.0, 1.0, 1.0]])
    ids = jnp.asarray([[1, 1, 2, 3], [1, 2, 2, 2]])
    np.testing.assert_array_equal(base.by_segment(x, ids, 3), [[3, 4, 8], [1, 3, 0]])
    np.testing.assert_array_equal(base.by_segment(x, ids, 2), [[3, 4], [1, 3]])  # further segments are left out


def test_a_scalar_head_begins_undecided_and_is_linear():
    head = {"value": base.init_head("value", 4)}
    hidden = jnp.arange(24.0).reshape(2, 3, 4)
    np.testing.assert_array_equal(base.scalar(head, "value", hidden), np.zeros((2, 3)))
    head["value"]["value_head"]["kernel"] = jnp.asarray([1.0, 0.0, 0.0, 2.0])
    np.testing.assert_array_equal(base.scalar(head, "value", hidden), hidden[..., 0] + 2 * hidden[..., 3])


def test_a_batch_of_tokens_is_what_the_loader_gives():
    keys = ["data.path=x", "train.batch_size=8", "train.seq_len=16"]
    c = config.resolve(config_files.load("base", keys))
    mesh = sharding.make_mesh(config.MeshConfig(4, 1, 1, 2))
    shapes = base.token_shapes(c, mesh)
    assert {name: (x.shape, x.dtype.name) for name, x in shapes.items()} == {
        **{name: ((8, 16), "int32") for name in ("tokens", "targets", "segment_ids", "positions")},
        "weights": ((8, 16), "float32"),
    }
    assert {x.sharding for x in shapes.values()} == {sharding.batch_sharding(mesh)}
