"""The interface and the equivalences that hold for both families, each with a change that breaks it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models as tiny

from jaxlm import config, config_files, models, sharding, tree
from jaxlm.models import layers

FAMILIES = pytest.mark.parametrize("family", ["llama", "gpt2"])


def variants(family: str, backend: str = "xla", **overrides):
    """A plain model (unrolled, no remat, unfused), its parameters, and a builder of variants of it."""
    overrides = {"remat": "none", "scan_layers": False, "fuse_projections": False} | overrides
    cfg = tiny.model_config(family=family, **overrides)
    plain = models.build(cfg, backend)
    return plain, tiny.random_params(plain), lambda **kw: models.build(dataclasses.replace(cfg, **kw), backend)


@FAMILIES
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_scan_is_unrolled(family, dropout):
    plain, params, variant = variants(family, dropout=dropout, n_layers=3)
    key = jax.random.key(7) if dropout else None
    batch = tiny.packed_batch(plain.config)
    expected = tiny.value_and_grads(plain, params, batch, key)
    for remat in ("none", "full"):
        got = tiny.value_and_grads(variant(scan_layers=True, remat=remat), params, batch, key)
        assert tiny.difference(got, expected) < 1e-5
    swapped = params | {"layers_0": params["layers_1"], "layers_1": params["layers_0"]}
    wrong = tiny.value_and_grads(variant(scan_layers=True), swapped, batch, key)
    assert tiny.difference(wrong[0], expected[0]) > 1e-4
    if dropout:
        other = tiny.value_and_grads(variant(scan_layers=True), params, batch, jax.random.key(8))
        assert tiny.difference(other[0], expected[0]) > 1e-4


@FAMILIES
@pytest.mark.parametrize("remat", ["full", "dots", "names"])
def test_remat_is_plain(family, remat):
    plain, params, variant = variants(family, dropout=0.2)
    batch, key = tiny.packed_batch(plain.config), jax.random.key(3)
    expected = tiny.value_and_grads(plain, params, batch, key)
    assert tiny.difference(tiny.value_and_grads(variant(remat=remat), params, batch, key), expected) < 1e-5
    wrong = tiny.value_and_grads(variant(remat=remat, dropout=0.0), params, batch, key)
    assert tiny.difference(wrong, expected) > 1e-3


def test_remat_policies_save_less_and_less():
    """Residuals kept for the backward pass shrink in the order in which the config lists the policies."""
    plain, params, variant = variants("llama", n_layers=4)
    batch = tiny.packed_batch(plain.config)

    def residuals(model) -> int:
        _, pullback = jax.eval_shape(lambda p: jax.vjp(lambda q: tiny.loss(model, q, batch), p), params)
        return tree.count(pullback)

    sizes = [residuals(variant(remat=remat)) for remat in ("none", "names", "dots", "full")]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == 4


@FAMILIES
@pytest.mark.parametrize("bias", [False, True])
def test_fused_is_unfused(family, bias):
    plain, params, variant = variants(family, bias=bias)
    batch = tiny.packed_batch(plain.config)
    expected = tiny.value_and_grads(plain, params, batch)
    fused = variant(fuse_projections=True)
    assert tiny.difference(tiny.value_and_grads(fused, params, batch), expected) < 1e-5

    def beforehand(params, order):
        mixed = params | {"layers_1": params["layers_1"] | {"attn": order(params["layers_1"]["attn"])}}
        variables = {"params": params, "fused": layers.fuse_params(mixed, fused.config)}
        return fused.apply(variables, batch["tokens"], batch["positions"], batch["segment_ids"])

    hidden = plain.apply({"params": params}, batch["tokens"], batch["positions"], batch["segment_ids"])
    assert tiny.difference(jax.jit(lambda p: beforehand(p, dict))(params), hidden) < 1e-5
    wrong = jax.jit(lambda p: beforehand(p, lambda attn: attn | {"k": attn["v"]}))(params)
    assert tiny.difference(wrong, hidden) > 1e-3


@FAMILIES
@pytest.mark.parametrize("backend", ["xla", "blocked"])
def test_packed_is_unpacked(family, backend):
    plain, params, _ = variants(family, backend)
    batch = tiny.packed_batch(plain.config, batch=1)
    apply = jax.jit(lambda b: plain.apply({"params": params}, b["tokens"], b["positions"], b["segment_ids"]))
    packed = np.asarray(apply(batch))[0]
    leaky = np.asarray(apply(batch | {"segment_ids": jnp.ones_like(batch["segment_ids"])}))[0]
    segments = np.asarray(batch["segment_ids"])[0]
    for number in (1, 2, 3):
        where = segments == number
        alone = np.asarray(plain.apply({"params": params}, batch["tokens"][:, where]))[0]
        assert tiny.difference(packed[where], alone) < 1e-5
        if number > 1:
            assert tiny.difference(leaky[where], alone) > 1e-3


@FAMILIES
@pytest.mark.parametrize("scan_layers", [False, True])
def test_sharded_is_one_device(family, scan_layers):
    plain, params, variant = variants(family, vocab_size=250, fuse_projections=True)
    batch = tiny.packed_batch(plain.config, batch=8)
    expected = tiny.value_and_grads(plain, params, batch)
    model = variant(scan_layers=scan_layers)
    mesh = sharding.make_mesh(config.MeshConfig(data=2, fsdp=2, tensor=2))
    where = sharding.tree_shardings(models.abstract_params(model), models.logical_axes(model), mesh)
    with jax.set_mesh(mesh):
        split = jax.device_put(params, where)
        rows = jax.device_put(batch, sharding.batch_sharding(mesh))
        step = jax.jit(jax.value_and_grad(lambda p, b: tiny.loss(model, p, b)), out_shardings=(None, where))
        got = step(split, rows)
        wrong = step(split, rows | {"targets": jnp.roll(rows["targets"], 1, 0)})
    q = got[1]["layers_0"]["attn"]["q"]["kernel"]
    assert q.addressable_shards[0].data.size == q.size // 4
    assert tiny.difference(got, expected) < 1e-5
    assert tiny.difference(wrong, expected) > 1e-3


@FAMILIES
def test_every_large_parameter_is_split_by_fsdp(family):
    cfg = tiny.model_config(family=family, d_model=64, tie_embeddings=False, bias=True)
    model = models.build(cfg, "xla")
    mesh = sharding.make_mesh(config.MeshConfig(data=1, fsdp=8, tensor=1))
    shapes = models.abstract_params(model)
    for (name, leaf), (_, where) in zip(
        tree.named_leaves(shapes),
        tree.named_leaves(sharding.tree_shardings(shapes, models.logical_axes(model), mesh)),
        strict=True,
    ):
        if name.endswith(("kernel", "embedding")):
            assert np.prod(where.shard_shape(leaf.shape)) * 8 == np.prod(leaf.shape), name


@FAMILIES
@pytest.mark.parametrize("tied", [False, True])
def test_padded_vocabulary_is_dead(family, tied):
    plain, params, _ = variants(family, tie_embeddings=tied)
    cfg = plain.config
    assert (cfg.vocab_size, cfg.padded_vocab_size) == (101, 128)
    batch = tiny.packed_batch(cfg)
    value, grads = tiny.value_and_grads(plain, params, batch)
    table = grads["embed"]["embedding"] if tied else grads["head"]["kernel"].T
    assert np.abs(table[:101]).max() > 0
    assert np.abs(table[101:]).max() == 0
    assert np.abs(grads["embed"]["embedding"][101:]).max() == 0
    logits = models.logits(plain, params, batch["tokens"])
    assert logits.shape == (4, 24, 101)
    assert logits.dtype == jnp.float32
    # What padding holds does not matter; what is inside the vocabulary does.
    part, name = ("embed", "embedding") if tied else ("head", "kernel")

    def filled(start: int, end: int):
        rows = jnp.arange(128)[:, None] if tied else jnp.arange(128)
        return params | {part: {name: jnp.where((rows >= start) & (rows < end), 1e3, params[part][name])}}

    assert tiny.value_and_grads(plain, filled(101, 128), batch)[0] == value
    assert tiny.value_and_grads(plain, filled(100, 128), batch)[0] != value


@FAMILIES
def test_parameters_are_per_layer_float32_and_named(family):
    overrides = {"family": family, "tie_embeddings": False, "dtype": "bfloat16", "qk_norm": family == "llama"}
    plain = models.build(tiny.model_config(**overrides), "xla")
    scanned = models.build(tiny.model_config(scan_layers=True, **overrides), "xla")
    shapes = models.abstract_params(plain)
    assert shapes == models.abstract_params(scanned)
    params = models.init_params(plain, jax.random.key(0))
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    names = {name: leaf.shape for name, leaf in tree.named_leaves(params)}
    kv = 2 if family == "llama" else 4
    assert names["layers_1/attn/q/kernel"] == (32, 4, 8)
    assert names["layers_1/attn/v/kernel"] == (32, kv, 8)
    assert names["layers_1/attn/o/kernel"] == (4, 8, 32)
    assert names["layers_0/mlp/down/kernel"] == (48, 32)
    assert names["embed/embedding"] == (128, 32)
    assert names["head/kernel"] == (32, 128)
    assert ("layers_0/attn/q_norm/scale" in names) == (family == "llama")
    assert ("layers_0/attn/o/bias" in names) == (family == "gpt2")
    defaults = config_files.load("base").optim
    decayed = tree.regex_mask(params, defaults.decay, defaults.no_decay)
    assert {n for n, yes in tree.named_leaves(decayed) if yes} == {n for n in names if n.endswith("/kernel")}
    down, up = (float(jnp.std(params["layers_0"]["mlp"][n]["kernel"])) for n in ("down", "up"))
    assert up == pytest.approx(0.02, rel=0.1)
    assert down == pytest.approx(0.02 / 4**0.5, rel=0.1)
    axes = models.logical_axes(plain)
    assert axes["layers_0"]["attn"]["o"]["kernel"] == ("heads", "head_dim", "embed")
    assert jax.tree.structure(axes, is_leaf=lambda x: isinstance(x, tuple)) == jax.tree.structure(params)


@FAMILIES
def test_bfloat16_stays_near_float32(family):
    plain, params, variant = variants(family)
    batch = tiny.packed_batch(plain.config)
    exact = models.logits(plain, params, batch["tokens"])
    rough = models.logits(variant(dtype="bfloat16"), params, batch["tokens"])
    assert rough.dtype == jnp.float32
    assert 1e-4 < tiny.difference(rough, exact) < 0.05


def test_dropout_is_off_unless_training():
    plain, params, _ = variants("gpt2", dropout=0.5)
    tokens = tiny.packed_batch(plain.config)["tokens"]
    key = {"dropout": jax.random.key(0)}
    off = plain.apply({"params": params}, tokens, train=False, rngs=key)
    again = plain.apply({"params": params}, tokens)
    on = plain.apply({"params": params}, tokens, train=True, rngs=key)
    assert (off == again).all()
    assert tiny.difference(on, off) > 1e-2


def test_other_collections_reach_their_layer():
    plain, params, variant = variants("llama", n_layers=2)
    tokens = tiny.packed_batch(plain.config)["tokens"]
    extra = {f"layers_{i}": {"attn": {"a": jnp.full((3,), i)}} for i in range(2)}
    for model in (plain, variant(scan_layers=True)):
        with_extra = model.apply({"params": params, "lora": extra}, tokens)
        assert tiny.difference(with_extra, plain.apply({"params": params}, tokens)) < 1e-5
    assert model.bind({"params": params, "lora": extra}).layer_variables(1)["lora"]["attn"]["a"][0] == 1


def test_unknown_family_is_refused():
    with pytest.raises(config.ConfigError, match="family"):
        models.build(dataclasses.replace(tiny.model_config(), family="rnn"), "xla")
