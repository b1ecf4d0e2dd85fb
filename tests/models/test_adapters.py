"""Adapters change a model as the merged parameters do, however its layers run, and begin as the model alone."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models as tiny
from tiny_steps import changed, make_batch, make_config

from jaxlm import models
from jaxlm.config import ConfigError
from jaxlm.devices import tree
from jaxlm.models import adapters
from jaxlm.models.layers import Cache
from jaxlm.models.transformer import empty_cache
from jaxlm.step.objectives import lm

ROWS = (3, 99, 7)
SETTINGS = make_config().adapter


def adapter(**changes) -> adapters.Adapter:
    settings = dataclasses.replace(SETTINGS, kind="lora", rank=2, alpha=6.0)
    return adapters.of(dataclasses.replace(settings, **changes), ROWS)


def random_variables(of: adapters.Adapter, model, seed: int = 5) -> dict:
    """The adapter's variables, as large as the kernels of `tiny.random_params`."""
    shapes = of.init(model, jax.random.key(0))
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(0, 0.1, x.shape), jnp.float32), shapes)


def built(family: str = "llama", **changes):
    """(model without adapter, its parameters, a packed batch)."""
    model = models.build(tiny.model_config(family=family, **changes), "xla")
    return model, tiny.random_params(model), tiny.packed_batch(model.config)


def logits(model, variables, batch):
    """All logits, with the adapter's rows in the head."""
    hidden_BxTxD = tiny.hidden(model, variables, batch)
    rows = models.head_rows(model, variables)
    head_DxV = models.head_kernel(variables["params"], model.config)
    if rows:
        head_DxV = head_DxV.at[:, np.asarray(rows["row_ids"])].add(rows["rows_NxD"].T)
    return hidden_BxTxD @ head_DxV


@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("gpt2", False)])
def test_new_adapters_change_nothing_and_adapted_is_merged(family, tied):
    model, params, batch = built(family, tie_embeddings=tied, n_layers=1)
    of = adapter()
    with_adapter, plain = of.attach(model), {"params": params}
    np.testing.assert_array_equal(
        logits(with_adapter, plain | of.init(model, jax.random.key(1)), batch), logits(model, plain, batch)
    )
    variables = random_variables(of, model)
    assert ("head" in variables["rows"]) is not tied
    merged = adapters.merge(params, variables, of)
    want = logits(model, {"params": merged}, batch)
    assert tiny.difference(logits(with_adapter, plain | variables, batch), want) < 1e-5
    assert tiny.difference(logits(model, plain, batch), want) > 1e-2
    wrong = dataclasses.replace(of, row_ids=(3, 98, 7))
    assert tiny.difference(logits(wrong.attach(model), plain | variables, batch), want) > 1e-3


def test_a_part_of_the_parameters_is_merged_as_the_whole_is():
    model, params, _ = built()
    of = adapter()
    variables = random_variables(of, model)
    whole = adapters.merge(params, variables, of)
    one_by_one = {name: adapters.merge({name: part}, variables, of)[name] for name, part in params.items()}
    jax.tree.map(np.testing.assert_array_equal, one_by_one, whole)


def test_values_and_gradients_are_the_same_however_the_layers_run():
    model, params, batch = built(dropout=0.0, remat="none", scan_layers=False, fuse_projections=True)
    of, key = adapter(dropout=0.3), jax.random.key(3)
    variables = {"params": params} | random_variables(of, model)

    def value_and_grads(model):
        def value(v):
            inputs = (batch["tokens"], batch["positions"], batch["segment_ids"])
            return jnp.mean(jnp.square(jnp.sin(of.attach(model).apply(v, *inputs, train=True, rngs={"dropout": key}))))

        return tiny.jit(jax.value_and_grad(value))(variables)

    want = value_and_grads(model)
    for changes in ({"remat": "full", "fuse_projections": False}, {"scan_layers": True}):
        other = models.build(dataclasses.replace(model.config, **changes), model.backend)
        assert tiny.difference(value_and_grads(other), want) < 1e-5
    assert min(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(want[1]["lora"])) > 0


def test_dropout_is_of_what_a_reads_and_off_without_a_key():
    model, params, batch = built(dropout=0.0, n_layers=1)
    of = adapter(dropout=0.5)
    variables = {"params": params} | random_variables(of, model)
    inputs = (batch["tokens"], batch["positions"], batch["segment_ids"])
    trained = tiny.jit(lambda key: of.attach(model).apply(variables, *inputs, train=True, rngs={"dropout": key}))
    dropped = [trained(jax.random.key(seed)) for seed in (1, 1, 2)]
    np.testing.assert_array_equal(dropped[0], dropped[1])
    assert tiny.difference(dropped[0], dropped[2]) > 1e-3
    sure = tiny.hidden(adapter().attach(model), variables, batch)
    np.testing.assert_array_equal(tiny.hidden(of.attach(model), variables, batch), sure)
    assert tiny.difference(dropped[0], sure) > 1e-3


def test_the_scale_is_alpha_over_rank_or_its_root():
    assert adapter().settings.scale == 3.0
    np.testing.assert_allclose(adapter(rslora=True).settings.scale, 6 / 2**0.5)


def test_targets_choose_kernels_and_must_match_one():
    model, _, _ = built()
    names = {
        name for name, _ in tree.named_leaves(adapter(targets=("attn/[qv]",)).init(model, jax.random.key(0))["lora"])
    }
    assert names == {f"layers_{i}/attn/{x}/lora_{ab}" for i in range(2) for x in "qv" for ab in "ab"}
    with pytest.raises(ConfigError, match="match no kernel of a layer"):
        adapter(targets=("attn/w",)).init(model, jax.random.key(0))


def test_adapters_reach_their_layers_where_a_cache_is_read():
    model, params, batch = built(n_layers=1)
    of = adapter()
    variables = random_variables(of, model)

    def read(model, variables):
        rows, length = batch["tokens"].shape
        positions_BxS = jnp.broadcast_to(jnp.arange(length), (rows, length))
        cache = Cache(empty_cache(model.config, rows, length), jnp.int32(0), positions_BxS)
        return tiny.jit(lambda v: model.apply(v, batch["tokens"], cache=cache)[0])(variables)

    want = read(model, {"params": adapters.merge(params, variables, of)})
    assert tiny.difference(read(of.attach(model), {"params": params} | variables), want) < 1e-5


def test_a_prompt_is_vectors_in_front_of_a_text():
    model, params, _ = built(n_layers=1)
    V, P = model.config.vocab_size, 3
    of = adapters.Adapter(dataclasses.replace(SETTINGS, kind="prompt", prompt_tokens=P))
    variables = {"params": params} | random_variables(of, model)
    text = jnp.asarray([[1, 5, 9, 2]])
    ids = jnp.concatenate([V + jnp.arange(P)[None], text], axis=1)
    apply = tiny.jit(lambda ids: of.attach(model).apply(variables, ids))
    got = apply(ids)
    table = params["embed"]["embedding"]
    longer = table.at[V : V + P].set(variables["prompt"]["embed"]["prompt"])  # the vectors as rows of their own
    want = tiny.hidden(model, {"params": params | {"embed": {"embedding": longer}}}, {"tokens": ids})
    assert tiny.difference(got, want) < 1e-6
    assert tiny.difference(apply(ids.at[0, 0].set(V + 1)), want) > 1e-3


@pytest.mark.parametrize("tile", [0, 16])
def test_no_gradient_of_a_frozen_kernel_table_or_head_is_computed(tile):
    keys = {"n_layers": 1, "tie_embeddings": False, "fuse_projections": False, "vocab_size": 300}
    c = changed(dataclasses.replace(make_config(), model=tiny.model_config(**keys)), loss__tile_tokens=tile)
    model, of = models.build(c.model, "xla"), adapter()
    frozen, batch = {"params": tiny.random_params(model)}, make_batch()
    variables, sums = random_variables(of, model), lm.make(of.attach(model), c).sums

    def made(argnums: tuple[int, ...]) -> list[str]:
        """The lines of the program that make an array of a kernel's, the table's or the head's shape."""
        grad = jax.grad(lambda trained, frozen: sums(frozen | trained, batch, None).loss, argnums)
        text = jax.jit(grad).lower(variables, frozen).compile().as_text()
        D, F, V = c.model.d_model, c.model.d_ff, c.model.padded_vocab_size
        shapes = [f"= f32[{a},{b}]" for a, b in ((D, F), (F, D), (D, V), (V, D))]
        words = (" dot(", " scatter(", " custom-call(", " fusion(")
        return [line for line in text.splitlines() if any(s in line for s in shapes) and any(w in line for w in words)]

    assert not made((0,))
    assert len(made((0, 1))) >= 5  # three kernels, table and head: the test can fail
