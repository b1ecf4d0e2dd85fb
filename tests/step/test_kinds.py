"""What other kinds of training stand on, on the real step: adapters beside frozen parameters, scalar heads."""

import dataclasses
import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models as tiny
from tiny_steps import BATCHES, T, assert_close, make_config, make_mesh, one_layer, run_steps

from jaxlm.config import ConfigError
from jaxlm.devices import tree
from jaxlm.models import adapters
from jaxlm.step import parts
from jaxlm.step.objectives import base, lm

NAMES = ("attn/q", "attn/o", "mlp/down")


def lora(**changes):
    """Adapters of rank 2 for some kernels, and two rows."""
    settings = dataclasses.replace(make_config().adapter, kind="lora", rank=2, alpha=2.0, targets=NAMES, **changes)
    return adapters.of(settings, (3, 7))


MADE = parts.make(one_layer(), make_mesh(), lm.make, lora())
PROGRAM = MADE.jit()


@functools.cache
def plain():
    """Two steps of adapters on one device: what all other ways must equal."""
    return run_steps(MADE, program=PROGRAM)


def test_adapters_begin_as_the_base_model_and_learn():
    _, (first, second), _ = plain()
    _, (metrics,), _ = run_steps(parts.make(one_layer(), make_mesh(), lm.make), BATCHES[:1])
    assert float(first["loss"]) == float(metrics["loss"])
    again = run_steps(MADE, [BATCHES[0]] * 8, program=PROGRAM)[1]
    assert float(again[-1]["loss"]) < float(again[0]["loss"])
    assert float(second["update_norm"]) > 0


def test_only_adapters_are_trained_and_have_an_optimizer_state():
    now, (metrics, _), frozen = plain()
    assert (set(now.params), set(frozen)) == ({"lora", "rows"}, {"params"})
    moments = [name for name, leaf in tree.named_leaves(now.opt_state) if leaf.ndim]
    assert len(moments) == 2 * 2 * len(NAMES) + 2  # two moments of A and B, and of the rows
    assert {name.rsplit("/", 1)[1] for name in moments} == {"lora_a", "lora_b", "rows"}
    jax.tree.map(np.testing.assert_array_equal, frozen, MADE.create()[1])  # and the base stays as it is
    groups = {name for name in metrics if name.startswith("grad_norm/")}
    assert groups == {"grad_norm/embed", "grad_norm/layers/attn", "grad_norm/layers/mlp"}


def test_merged_equals_adapted():
    now, _, frozen = plain()
    merged = {"params": adapters.merge(frozen["params"], now.params, lora())}
    adapted, plain_lm = (
        tiny.jit(lambda v, o=o: o.sums(v, BATCHES[0], None).loss)
        for o in (MADE.objective, lm.make(MADE.model, MADE.config))
    )
    want = adapted(frozen | now.params)
    np.testing.assert_allclose(plain_lm(merged), want, rtol=1e-5)
    assert abs(float(plain_lm(frozen)) / float(want) - 1) > 1e-5


def test_adapters_on_many_devices_tiled_and_accumulated_are_the_same():
    """Scanned and recomputed: see `models/test_adapters.py`."""
    want, want_metrics, _ = plain()
    c = one_layer(loss__tile_tokens=16, train__microbatch_size=2)
    got, got_metrics, _ = run_steps(parts.make(c, make_mesh(fsdp=2, tensor=2, context=2), lm.make, lora()))
    assert_close(got.params, want.params, rtol=1e-4)
    assert_close(got_metrics, want_metrics, rtol=1e-4)
    leaf = got.params["lora"]["layers_0"]["attn"]["q"]["lora_a"]
    assert leaf.addressable_shards[0].data.size == leaf.size // 2
    moment = got.opt_state[0].mu["layers_0"]["attn"]["q"]["lora_a"]
    assert moment.sharding.spec == leaf.sharding.spec


def test_names_that_no_list_knows_are_refused_by_name():
    with pytest.raises(ConfigError, match="parameter layers_0/attn/o/lora_a matches neither of"):
        parts.make(one_layer(optim__decay=(r".*/kernel",)), make_mesh(), lm.make, lora())
    with pytest.raises(ConfigError, match=r"optim\.name=muon needs layer kernels; only embed/rows, \.\.\. are trained"):
        parts.make(one_layer(optim__name="muon"), make_mesh(), lm.make, lora())


def test_two_collections_with_a_leaf_of_one_name_are_refused():
    twice = {"params": {"a": {"kernel": 1}}, "lora": {"a": {"kernel": 2}}}
    with pytest.raises(ValueError, match="two collections of variables have a leaf a/kernel"):
        tree.merge(twice)
    apart = {"params": {"a": {"kernel": 1}}, "lora": {"a": {"lora_a": 2}}}
    assert tree.split(tree.merge(apart), like=apart) == apart


def test_frozen_variables_are_kept_and_the_state_is_given_away():
    now, frozen = MADE.create()
    PROGRAM(frozen, now, BATCHES[0])
    assert all(x.is_deleted() for x in jax.tree.leaves(now.params))
    assert not any(x.is_deleted() for x in jax.tree.leaves(frozen))


def test_frozen_parameters_come_from_an_origin_and_adapters_are_new():
    made = parts.make(one_layer(), make_mesh(fsdp=8), lm.make, lora())
    given = tiny.random_params(made.model, seed=4)

    class Origin:
        def leaf(self, name):
            return np.asarray(functools.reduce(operator.getitem, name.split("/"), given))

        def trained(self):
            return beside

    beside = {}
    now, frozen = made.create(Origin())
    jax.tree.map(np.testing.assert_array_equal, frozen["params"], tiny.random_params(made.model, seed=4))
    jax.tree.map(np.testing.assert_array_equal, now.params, made.create()[0].params)
    assert jax.tree.map(lambda x: x.sharding, frozen) == made.frozen_shardings
    # An origin with adapters of its own: the same are trained on, others are refused.
    beside = {"lora": jax.tree.map(lambda x: np.ones(x.shape, x.dtype), now.params["lora"]), "score": {"x": np.ones(1)}}
    on, _ = made.create(Origin())
    jax.tree.map(np.testing.assert_array_equal, on.params, now.params | {"lora": beside["lora"]})
    assert jax.tree.map(lambda x: x.sharding, on.params) == made.shardings.params
    beside = {"lora": jax.tree.map(lambda x: np.ones((*x.shape, 2), x.dtype), now.params["lora"])}
    with pytest.raises(ConfigError, match="another shape here"):
        made.create(Origin())


def valued(model, c):
    """Next tokens, and a scalar head that learns the position within a document."""
    plain_lm = lm.make(model, c)

    def sums(variables, batch, key):
        found = plain_lm.sums(variables, batch, key)
        hidden_BxTxD = base.hidden(model, variables, batch, key)
        error_BxT = base.scalar(variables, "value", hidden_BxTxD) - batch["positions"] / T
        squared = jnp.sum(error_BxT**2 * batch["weights"])
        return base.Sums(found.loss + squared, found.weight, found.metrics | {"squared": squared})

    return dataclasses.replace(plain_lm, sums=sums, heads=("value",))


def test_a_scalar_head_is_trained_beside_the_model_the_same_on_any_mesh():
    made = parts.make(one_layer(), make_mesh(), valued)
    program = made.jit()
    one, metrics, _ = run_steps(made, program=program)
    many, _, _ = run_steps(parts.make(one_layer(), make_mesh(fsdp=4, tensor=2), valued))
    assert set(one.params) == {"params", "value"}
    assert_close(many.params, one.params, rtol=1e-4)
    assert float(metrics[0]["grad_norm/value_head"]) > 0
    _, later, _ = run_steps(made, [BATCHES[0]] * 8, program=program)
    assert float(later[-1]["squared"]) < float(later[0]["squared"])


def test_matrices_of_layers_move_at_the_rate_of_their_own():
    """By the config's key, in the first step: what an update moves is the rate times what the optimizer says."""
    moved, seen = [], []
    for ratio in (1.0, 4.0):
        made = parts.make(one_layer(optim__rates=(f"layers_.*/kernel {ratio}",)), make_mesh(), lm.make)
        now, _ = made.create()
        after, metrics = jax.jit(made.step())({}, now, BATCHES[0])
        moved.append(jax.tree.map(lambda a, b: np.asarray(b - a), now.params["params"], after.params["params"]))
        seen.append({name: float(value) for name, value in metrics.items() if name.startswith("lr")})
    once, faster = moved
    assert_close(faster["embed"], once["embed"])
    layer, other = once["layers_0"], faster["layers_0"]
    assert_close(other["attn"]["q"]["kernel"], 4 * layer["attn"]["q"]["kernel"])
    assert_close(other["attn_norm"], layer["attn_norm"])
    assert seen[0].keys() == {"lr"}
    assert seen[1]["lr"] == seen[1]["lr/layers/mlp"] == 4 * seen[0]["lr"]
    assert seen[1]["lr/embed"] == seen[1]["lr/layers/attn_norm"] == seen[0]["lr"]
