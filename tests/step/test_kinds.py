"""What other kinds of training stand on, on the real step: adapters beside frozen parameters, scalar heads, pairs."""

import dataclasses
import functools
import math
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models as tiny
from tiny_steps import BATCHES, B, T, assert_close, make_config, make_mesh

from jaxlm.config import ConfigError
from jaxlm.data.batches import rows
from jaxlm.devices import sharding, tree
from jaxlm.models import adapters
from jaxlm.step import parts, state, step
from jaxlm.step.objectives import base, lm

NAMES = ("attn/q", "attn/o", "mlp/down")


def lora(**changes):
    """Adapters of rank 2 for some kernels, and two rows."""
    settings = dataclasses.replace(make_config().adapter, kind="lora", rank=2, alpha=2.0, targets=NAMES, **changes)
    return adapters.of(settings, (3, 7))


def adapted(**changes):
    """A config with `changes` by section: model__scan_layers=True."""
    c = make_config()
    for name, value in changes.items():
        section, key = name.split("__")
        c = dataclasses.replace(c, **{section: dataclasses.replace(getattr(c, section), **{key: value})})
    return dataclasses.replace(c, model=dataclasses.replace(c.model, attention="xla"))


def run(made, batches=BATCHES):
    """(state, metrics of each step, frozen variables) after a step on each batch."""
    now, frozen = made.create()
    history = []
    with jax.set_mesh(made.mesh):
        fn = made.jit()
        for batch in batches:
            now, metrics = fn(frozen, now, sharding.to_global(jax.tree.map(np.asarray, batch), made.mesh, B))
            history.append(metrics)
    return now, history, frozen


@functools.cache
def plain():
    """Two steps of adapters on one device: what all other ways must equal."""
    return run(parts.make(adapted(), make_mesh(), lm.make, lora()))


def test_adapters_begin_as_the_base_model_and_learn():
    _, (first, second), _ = plain()
    base_model = run(parts.make(adapted(), make_mesh(), lm.make))
    assert float(first["loss"]) == float(base_model[1][0]["loss"])
    again = run(parts.make(adapted(), make_mesh(), lm.make, lora()), [BATCHES[0]] * 8)[1]
    assert float(again[-1]["loss"]) < float(again[0]["loss"])
    assert float(second["update_norm"]) > 0


def test_only_adapters_are_trained_and_have_an_optimizer_state():
    now, (metrics, _), frozen = plain()
    made = parts.make(adapted(), make_mesh(), lm.make, lora())
    assert (set(now.params), set(frozen)) == ({"lora", "rows"}, {"params"})
    moments = [name for name, leaf in tree.named_leaves(now.opt_state) if leaf.ndim]
    assert len(moments) == 2 * 2 * len(NAMES) * 2 + 2  # two moments of A and B in two layers, and of the rows
    assert {name.rsplit("/", 1)[1] for name in moments} == {"lora_a", "lora_b", "rows"}
    jax.tree.map(np.testing.assert_array_equal, frozen, made.create()[1])  # and the base stays as it is
    groups = {name for name in metrics if name.startswith("grad_norm/")}
    assert groups == {"grad_norm/embed", "grad_norm/layers/attn", "grad_norm/layers/mlp"}


def test_merged_equals_adapted():
    now, _, frozen = plain()
    made = parts.make(adapted(), make_mesh(), lm.make, lora())
    c, params = made.config, frozen["params"]
    merged = {"params": adapters.merge(params, now.params, lora())}
    want = made.objective.sums(frozen | now.params, BATCHES[0], None)
    got = lm.make(made.model, c).sums(merged, BATCHES[0], None)
    np.testing.assert_allclose(got.loss, want.loss, rtol=1e-5)
    unadapted = lm.make(made.model, c).sums(frozen, BATCHES[0], None)
    assert abs(float(unadapted.loss) / float(want.loss) - 1) > 1e-5


@pytest.mark.parametrize(
    ("mesh", "changes"),
    [
        ({"data": 2, "fsdp": 4}, {}),
        ({"fsdp": 2, "tensor": 2, "context": 2}, {"loss__tile_tokens": 16}),
        ({}, {"model__scan_layers": True, "model__remat": "full"}),
        ({}, {"train__microbatch_size": 2, "loss__tile_tokens": 8}),
    ],
)
def test_adapters_on_many_devices_scanned_tiled_and_accumulated_are_the_same(mesh, changes):
    want, want_metrics, _ = plain()
    got, got_metrics, _ = run(parts.make(adapted(**changes), make_mesh(**mesh), lm.make, lora()))
    assert_close(got.params, want.params, rtol=1e-4)
    assert_close(got_metrics, want_metrics, rtol=1e-4)
    if mesh.get("fsdp") == 4:
        leaf = got.params["lora"]["layers_0"]["attn"]["q"]["lora_a"]
        assert leaf.addressable_shards[0].data.size == leaf.size // 4
        moment = got.opt_state[0].mu["layers_0"]["attn"]["q"]["lora_a"]
        assert moment.sharding.spec == leaf.sharding.spec


def test_names_that_no_list_knows_are_refused_by_name():
    with pytest.raises(ConfigError, match="parameter layers_0/attn/o/lora_a matches neither of"):
        parts.make(adapted(optim__decay=(r".*/kernel",)), make_mesh(), lm.make, lora())
    with pytest.raises(ConfigError, match=r"optim\.name=muon needs layer kernels; only embed/rows, \.\.\. are trained"):
        parts.make(adapted(optim__name="muon"), make_mesh(), lm.make, lora())


def test_two_collections_with_a_leaf_of_one_name_are_refused():
    twice = {"params": {"a": {"kernel": 1}}, "lora": {"a": {"kernel": 2}}}
    with pytest.raises(ValueError, match="two collections of variables have a leaf a/kernel"):
        tree.merge(twice)
    apart = {"params": {"a": {"kernel": 1}}, "lora": {"a": {"lora_a": 2}}}
    assert tree.split(tree.merge(apart), like=apart) == apart


def test_frozen_variables_are_kept_and_the_state_is_given_away():
    made = parts.make(adapted(), make_mesh(fsdp=8), lm.make, lora())
    now, frozen = made.create()
    with jax.set_mesh(made.mesh):
        made.jit()(frozen, now, sharding.to_global(jax.tree.map(np.asarray, BATCHES[0]), made.mesh, B))
    assert all(x.is_deleted() for x in jax.tree.leaves(now.params))
    assert not any(x.is_deleted() for x in jax.tree.leaves(frozen))


def test_frozen_parameters_come_from_an_origin_and_adapters_are_new():
    made = parts.make(adapted(), make_mesh(fsdp=8), lm.make, lora())
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
    one, metrics, _ = run(parts.make(adapted(), make_mesh(), valued))
    many, _, _ = run(parts.make(adapted(), make_mesh(fsdp=4, tensor=2), valued))
    assert set(one.params) == {"params", "value"}
    assert_close(many.params, one.params, rtol=1e-4)
    assert float(metrics[0]["grad_norm/value_head"]) > 0
    _, later, _ = run(parts.make(adapted(), make_mesh(), valued), [BATCHES[0]] * 8)
    assert float(later[-1]["squared"]) < float(later[0]["squared"])


def test_rates_by_group_move_only_their_own():
    made = parts.make(adapted(), make_mesh(), lm.make)
    names = made.abstract.params["params"].keys()

    def rates(number):
        return {name: jnp.float32(0.0 if name == "embed" else 1e-3) + 0 * number for name in names}

    fn = jax.jit(step.make(made.config, made.objective, made.tx, rates))
    now, _ = made.create()
    after, metrics = fn({}, now, BATCHES[0])
    same = jax.tree.map(lambda a, b: bool((a == b).all()), now.params["params"], after.params["params"])
    assert all(jax.tree.leaves(same["embed"]))
    assert not any(jax.tree.leaves(same["layers_0"]["attn"]))
    assert (float(metrics["lr"]), float(metrics["lr/embed"])) == (pytest.approx(1e-3), 0.0)


def test_matrices_of_layers_move_at_the_rate_of_their_own():
    """By the config's key, in the first step: what an update moves is the rate times what the optimizer says."""
    moved, seen = [], []
    for ratio in (1.0, 4.0):
        made = parts.make(adapted(optim__matrix_lr_ratio=ratio), make_mesh(), lm.make)
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


def test_a_ratio_for_matrices_and_a_lora_alone_is_refused():
    with pytest.raises(ConfigError, match=r"optim\.matrix_lr_ratio=4 needs layer kernels; only .* are trained"):
        parts.make(adapted(optim__matrix_lr_ratio=4.0), make_mesh(), lm.make, lora())


# ---------------------------------------------------------------------------------------------------------------------
# Pairs: two texts each, packed, several pairs to a row

SEQ, PAIRS_A_ROW, BETA = 32, 4, 0.5


def dpo(model, c):
    """Direct preference optimisation (arXiv:2305.18290) against reference log-probabilities that come with the batch."""

    def sums(variables, batch, key):
        logp_BxT = base.token_logp(model, variables, batch, key, c.loss.tile_tokens) * batch["weights"]
        margin_BxS = base.by_segment(logp_BxT, batch["segment_ids"], 2 * PAIRS_A_ROW) - batch["reference"]
        gap_BxP = BETA * (margin_BxS[:, 0::2] - margin_BxS[:, 1::2])
        loss_BxP = -jax.nn.log_sigmoid(gap_BxP) * batch["pairs"]
        wins = jnp.sum((gap_BxP > 0) * batch["pairs"])
        return base.Sums(jnp.sum(loss_BxP), jnp.sum(batch["pairs"]), {"accuracy": wins})

    def shapes(c, mesh):
        by_row = sharding.NamedSharding(mesh, sharding.PartitionSpec(sharding.BATCH_AXES))
        wide = {"reference": 2 * PAIRS_A_ROW, "pairs": PAIRS_A_ROW}
        more = {
            name: jax.ShapeDtypeStruct((c.train.batch_size, n), jnp.float32, sharding=by_row)
            for name, n in wide.items()
        }
        return base.token_shapes(c, mesh) | more

    return base.Objective(sums, shapes)


def random_pairs(n):
    rng = np.random.default_rng(3)

    def text(prompt):
        ids = [1, *prompt, *rng.integers(2, 100, rng.integers(1, 4))]
        return rows.Segment(ids, [0.0] * len(prompt) + [1.0] * (len(ids) - 1 - len(prompt)))

    prompts = [rng.integers(2, 100, rng.integers(1, 4)).tolist() for _ in range(n)]
    return [(text(prompt), text(prompt)) for prompt in prompts]


def pair_batch(pairs, n_rows, reference):
    """Packed pairs with the reference's log-probabilities; `reference`: (chosen, rejected) of each pair."""
    batch, placed = rows.pack(pairs, SEQ, n_rows)
    assert len(placed) == len(pairs)
    batch |= {
        "reference": np.zeros((n_rows, 2 * PAIRS_A_ROW), np.float32),
        "pairs": np.zeros((n_rows, PAIRS_A_ROW), np.float32),
    }
    count = [0] * n_rows
    for row, values in zip(placed, reference, strict=True):
        batch["reference"][row, 2 * count[row] : 2 * count[row] + 2] = values
        batch["pairs"][row, count[row]] = 1
        count[row] += 1
    assert max(count) <= PAIRS_A_ROW
    assert max(count) > 1
    return jax.tree.map(jnp.asarray, batch)


def pair_config(**changes):
    return adapted(**{"train__seq_len": SEQ, **changes})


def logp_alone(model, variables, texts):
    """Summed log-probability of each text's weighted tokens, by a model that sees nothing else: a row for each."""
    length = max(len(text.ids) for text in texts)
    ids = np.zeros((len(texts), length), np.int32)
    weights = np.zeros((len(texts), length - 1), np.float32)
    for row, text in enumerate(texts):  # padding comes after the text, and what comes after is not seen
        ids[row, : len(text.ids)], weights[row, : len(text.weights)] = text.ids, text.weights
    logp = jax.nn.log_softmax(tiny.logits(model, variables["params"], jnp.asarray(ids[:, :-1])))
    return jnp.sum(jnp.take_along_axis(logp, jnp.asarray(ids[:, 1:, None]), -1)[..., 0] * weights, axis=1)


def test_packed_pairs_equal_pair_by_pair_and_begin_at_ln_2():
    made = parts.make(pair_config(), make_mesh(), dpo)
    pairs, variables = random_pairs(14), {"params": tiny.random_params(made.model)}
    other = {"params": tiny.random_params(made.model, seed=9)}
    texts = [text for pair in pairs for text in pair]
    reference = np.asarray(logp_alone(made.model, variables, texts)).reshape(-1, 2)
    batch = pair_batch(pairs, B, reference)
    packed = jax.jit(jax.value_and_grad(lambda v, batch: made.objective.sums(v, batch, None).loss))
    begun, _ = packed(variables, batch)
    assert float(begun) / len(pairs) == pytest.approx(math.log(2), rel=1e-5)

    def by_hand(variables):
        gap = BETA * (logp_alone(made.model, variables, texts).reshape(-1, 2) - reference)
        return -jnp.sum(jax.nn.log_sigmoid(gap[:, 0] - gap[:, 1]))

    want, d_want = jax.jit(jax.value_and_grad(by_hand))(other)
    got, d_got = packed(other, batch)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert tiny.difference(d_got, d_want) < 1e-3
    # Mutation: pairs that are one segment off.
    shifted = batch | {"segment_ids": batch["segment_ids"] + 1}
    assert abs(float(packed(other, shifted)[0]) / float(want) - 1) > 1e-3


@pytest.mark.parametrize(
    ("mesh", "changes"),
    [({}, {"train__microbatch_size": 2, "loss__tile_tokens": 16}), ({"data": 2, "fsdp": 2, "context": 2}, {})],
)
def test_pairs_by_microbatch_and_on_many_devices_are_the_same(mesh, changes):
    pairs = random_pairs(14)
    batch = pair_batch(pairs, B, np.random.default_rng(1).normal(-8, 1, (14, 2)))

    def after(config, mesh):
        made = parts.make(config, mesh, dpo)
        now = state.init({"params": tiny.random_params(made.model)}, made.tx)
        now = jax.device_put(now, made.shardings)
        placed = jax.device_put(batch, jax.tree.map(lambda x: x.sharding, made.batch()))
        with jax.set_mesh(mesh):
            return made.jit()({}, now, placed)

    want, want_metrics = after(pair_config(), make_mesh())
    got, got_metrics = after(pair_config(**changes), make_mesh(**mesh))
    # The gradients, as the first moment has them: Adam's first step makes a sign of each, however small it is.
    assert tiny.difference(got.opt_state[0].mu, want.opt_state[0].mu) < 1e-4
    assert_close(got_metrics, want_metrics, rtol=1e-4)
