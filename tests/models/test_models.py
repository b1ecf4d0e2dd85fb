"""The interface and the equivalences that hold for both families, each with a change that breaks it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models as tiny

from jaxlm import config, models
from jaxlm.config import config_files
from jaxlm.devices import sharding, tree
from jaxlm.models import params as params_module

FAMILIES = pytest.mark.parametrize("family", ["llama", "gpt2"])


def variants(family: str, backend: str = "xla", **overrides):
    """A plain model (unrolled, no remat, unfused), its parameters, and a builder of variants of it."""
    overrides = {"remat": "none", "scan_layers": False, "fuse_projections": False} | overrides
    cfg = tiny.model_config(family=family, **overrides)
    plain = models.build(cfg, backend)
    return plain, tiny.random_params(plain), lambda **kw: models.build(dataclasses.replace(cfg, **kw), backend)


@pytest.mark.parametrize(("family", "dropout", "remat"), [("llama", 0.3, "full"), ("gpt2", 0.0, "none")])
def test_scan_is_unrolled(family, dropout, remat):
    plain, params, variant = variants(family, dropout=dropout)
    key = jax.random.key(7) if dropout else None
    batch = tiny.packed_batch(plain.config)
    expected = tiny.value_and_grads(plain, params, batch, key)
    scanned = variant(scan_layers=True, remat=remat)
    assert tiny.difference(tiny.value_and_grads(scanned, params, batch, key), expected) < 1e-5
    swapped = params | {"layers_0": params["layers_1"], "layers_1": params["layers_0"]}
    assert tiny.difference(tiny.value(scanned, swapped, batch, key), expected[0]) > 1e-4
    if dropout:
        assert tiny.difference(tiny.value(scanned, params, batch, jax.random.key(8)), expected[0]) > 1e-4


@pytest.mark.parametrize(("family", "policies"), [("llama", ("dots", "names")), ("gpt2", ("names",))])
def test_remat_is_plain(family, policies):
    plain, params, variant = variants(family, dropout=0.2, n_layers=1)
    batch, key = tiny.packed_batch(plain.config), jax.random.key(3)
    expected = tiny.value_and_grads(plain, params, batch, key)
    for remat in policies:
        assert tiny.difference(tiny.value_and_grads(variant(remat=remat), params, batch, key), expected) < 1e-5
    wrong = tiny.value(variant(remat=remat, dropout=0.0), params, batch, key)
    assert tiny.difference(wrong, expected[0]) > 1e-3


def test_remat_policies_save_less_and_less():
    """Residuals kept for the backward pass shrink in the order in which the config lists the policies."""
    plain, params, variant = variants("llama")
    batch = tiny.packed_batch(plain.config)

    def residuals(model) -> int:
        _, pullback = jax.eval_shape(lambda p: jax.vjp(lambda q: tiny.loss(model, q, batch), p), params)
        return tree.count(pullback)

    sizes = [residuals(variant(remat=remat)) for remat in ("none", "names", "dots", "full")]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == 4


@pytest.mark.parametrize(("family", "bias"), [("llama", "qkv_bias"), ("gpt2", "bias")])
def test_fused_and_packed_are_unfused(family, bias):
    plain, params, variant = variants(family, n_layers=1, **{bias: True})
    batch = tiny.packed_batch(plain.config)
    expected = tiny.value_and_grads(plain, params, batch)
    fused = variant(fuse_projections=True)
    assert tiny.difference(tiny.value_and_grads(fused, params, batch), expected) < 1e-5

    hidden = tiny.hidden(plain, {"params": params}, batch)
    inputs = (batch["tokens"], batch["positions"], batch["segment_ids"])
    apply = tiny.jit(lambda variables: fused.apply(variables, *inputs))
    for order, low, high in (("qkv", 0, 1e-5), ("qvk", 1e-3, np.inf)):
        attn = params["layers_0"]["attn"]
        attn = attn | {name: attn[order["qkv".index(name)]] for name in "qkv"}
        mixed = params | {"layers_0": params["layers_0"] | {"attn": attn}}
        for every_product in (False, True):
            rest, packed = params_module.pack_params(mixed, fused.config, every_product)
            assert ("kernel" in rest["layers_0"]["mlp"]["down"]) is not every_product
            assert low <= tiny.difference(apply({"params": rest, "packed": packed}), hidden) < high


@pytest.mark.parametrize(("family", "backend"), [("llama", "xla"), ("gpt2", "blocked")])
def test_packed_is_unpacked(family, backend):
    plain, params, _ = variants(family, backend, n_layers=1)
    batch = tiny.packed_batch(plain.config, batch=1)
    apply = tiny.jit(lambda b: plain.apply({"params": params}, b["tokens"], b["positions"], b["segment_ids"])[0])
    packed = np.asarray(apply(batch))
    leaky = np.asarray(apply(batch | {"segment_ids": jnp.ones_like(batch["segment_ids"])}))
    unpacked = tiny.jit(lambda tokens: plain.apply({"params": params}, tokens)[0])
    segments = np.asarray(batch["segment_ids"])[0]
    for number in (1, 2, 3):
        inside = segments == number
        # The document alone, padded on the right, where causality keeps the padding out.
        tokens = jnp.zeros_like(batch["tokens"]).at[0, : inside.sum()].set(batch["tokens"][0, inside])
        alone = np.asarray(unpacked(tokens))[: inside.sum()]
        assert tiny.difference(packed[inside], alone) < 1e-5
        if number > 1:
            assert tiny.difference(leaky[inside], alone) > 1e-3


@pytest.mark.parametrize(("family", "scan_layers"), [("llama", True), ("gpt2", False)])
def test_sharded_is_one_device(family, scan_layers):
    plain, params, variant = variants(family, vocab_size=250, fuse_projections=True)
    batch = tiny.packed_batch(plain.config, batch=8)
    expected = tiny.value_and_grads(plain, params, batch)
    model = variant(scan_layers=scan_layers)
    mesh = sharding.make_mesh(config.MeshConfig(data=2, fsdp=2, tensor=2, context=1))
    shardings = sharding.tree_shardings(models.abstract_params(model), models.logical_axes(model), mesh)
    with jax.set_mesh(mesh):
        split = jax.device_put(params, shardings)
        rows = jax.device_put(batch, sharding.batch_sharding(mesh))
        step = jax.jit(
            jax.value_and_grad(lambda p, b: tiny.loss(model, p, b)),
            out_shardings=(None, shardings),
            compiler_options=tiny.FAST_COMPILE,
        )
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
    mesh = sharding.make_mesh(config.MeshConfig(data=1, fsdp=8, tensor=1, context=1))
    shapes = models.abstract_params(model)
    for (name, leaf), (_, split) in zip(
        tree.named_leaves(shapes),
        tree.named_leaves(sharding.tree_shardings(shapes, models.logical_axes(model), mesh)),
        strict=True,
    ):
        if name.endswith(("kernel", "embedding")):
            assert np.prod(split.shard_shape(leaf.shape)) * 8 == np.prod(leaf.shape), name


@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("gpt2", False)])
def test_padded_vocabulary_is_dead(family, tied):
    plain, params, _ = variants(family, tie_embeddings=tied, n_layers=1)
    cfg = plain.config
    assert (cfg.vocab_size, cfg.padded_vocab_size) == (101, 128)
    batch = tiny.packed_batch(cfg)
    value, grads = tiny.value_and_grads(plain, params, batch)
    table = grads["embed"]["embedding"] if tied else grads["head"]["kernel"].T
    assert np.abs(table[:101]).max() > 0
    assert np.abs(table[101:]).max() == 0
    assert np.abs(grads["embed"]["embedding"][101:]).max() == 0
    logits = tiny.jit(lambda p, tokens: tiny.logits(plain, p, tokens))(params, batch["tokens"])
    assert logits.shape == (4, 24, 101)
    assert logits.dtype == jnp.float32
    # What padding holds does not matter; what is inside the vocabulary does.
    part, name = ("embed", "embedding") if tied else ("head", "kernel")

    def filled(start: int, end: int):
        rows = jnp.arange(128)[:, None] if tied else jnp.arange(128)
        return params | {part: {name: jnp.where((rows >= start) & (rows < end), 1e3, params[part][name])}}

    loss = tiny.jit(lambda p: tiny.loss(plain, p, batch))
    assert tiny.difference(loss(filled(101, 128)), value) < 1e-6
    assert tiny.difference(loss(filled(100, 128)), value) > 1e-3


@FAMILIES
def test_parameters_are_per_layer_float32_and_named(family):
    overrides = {"family": family, "tie_embeddings": False, "dtype": "bfloat16", "qk_norm": family == "llama"}
    plain = models.build(tiny.model_config(**overrides), "xla")
    scanned = models.build(tiny.model_config(scan_layers=True, **overrides), "xla")
    shapes = models.abstract_params(plain)
    assert shapes == models.abstract_params(scanned)
    params = tiny.jit(lambda key: models.init_params(plain, key))(jax.random.key(0))
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
    exact = tiny.hidden(plain, {"params": params}, batch)
    rough = tiny.hidden(variant(dtype="bfloat16"), {"params": params}, batch)
    assert rough.dtype == jnp.bfloat16
    assert 1e-4 < tiny.difference(rough, exact) < 0.05


def test_dropout_is_off_unless_training():
    plain, params, _ = variants("gpt2", dropout=0.5, n_layers=1)
    batch = tiny.packed_batch(plain.config)
    off, on = (tiny.value(plain, params, batch, key) for key in (None, jax.random.key(0)))
    assert off != on
    with_key = tiny.hidden(plain, {"params": params}, batch, train=False, rngs={"dropout": jax.random.key(0)})
    assert (with_key == tiny.hidden(plain, {"params": params}, batch)).all()


@pytest.mark.parametrize("scan_layers", [False, True])
def test_a_collection_of_no_layer_does_no_harm(scan_layers):
    plain, params, variant = variants("llama")
    model, batch = variant(scan_layers=scan_layers), tiny.packed_batch(plain.config)
    value_head = {"kernel": jnp.full((plain.config.d_model, 1), jnp.nan), "bias": jnp.zeros(1)}
    with_head = tiny.hidden(model, {"params": params, "value": value_head}, batch)
    np.testing.assert_array_equal(with_head, tiny.hidden(model, {"params": params}, batch))
    assert "value" not in model.bind({"params": params, "value": value_head}).layer_variables(0)
