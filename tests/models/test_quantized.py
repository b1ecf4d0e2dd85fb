"""Frozen parameters: what is kept of each, where a mesh puts it, read one at a time; decoded, they are a model's again."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models as tiny
from tiny_steps import make_mesh

from jaxlm import models
from jaxlm.devices import sharding, tree
from jaxlm.models import quantized
from jaxlm.train import announcement

KINDS = ("nf4", "int8")


def build(**keys):
    """A tiny model and random parameters of its shapes."""
    config = tiny.model_config(**({"n_layers": 1} | keys))
    model = models.build(config, "xla")
    return model, tiny.random_params(model)


def test_every_kernel_of_a_layer_is_quantised_and_nothing_else():
    _, params = build(tie_embeddings=False)
    frozen = quantized.freeze(params, "nf4", "bfloat16")
    coded = {name.rsplit("/", 1)[0] for name, _ in tree.named_leaves(frozen["quantized"])}
    whole = {name for name, _ in tree.named_leaves(frozen["params"])}
    projections = {"attn/q", "attn/k", "attn/v", "attn/o", "mlp/gate", "mlp/up", "mlp/down"}
    assert coded == {f"layers_0/{name}" for name in projections}
    norms = {"final_norm/scale", "layers_0/attn_norm/scale", "layers_0/mlp_norm/scale"}
    assert whole == {"embed/embedding", "head/kernel"} | norms
    kept = dict(tree.named_leaves(frozen["params"]))
    assert (kept["head/kernel"].dtype, kept["final_norm/scale"].dtype) == (jnp.bfloat16, jnp.float32)


def test_none_keeps_all_parameters_in_the_compute_dtype():
    _, params = build()
    frozen = quantized.freeze(params, "none", "float32")
    assert set(frozen) == {"params"}
    jax.tree.map(np.testing.assert_array_equal, frozen["params"], params)


@pytest.mark.parametrize("kind", KINDS)
def test_kernels_that_no_block_fits_are_kept_and_the_others_quantised(kind):
    """d_model 33 is no multiple of 32 to 64; the 64 inputs of mlp/down and the 32 of attn/o are."""
    model, params = build(d_model=33, n_heads=2, head_dim=16, d_ff=64)
    frozen = quantized.freeze(params, kind, "bfloat16")
    whole = {f"layers_0/{name}/kernel" for name in ("attn/q", "attn/k", "attn/v", "mlp/gate", "mlp/up")}
    assert set(quantized.whole_kernels(frozen)) == whole
    assert set(frozen["quantized"]["layers_0"]) == {"attn", "mlp"}
    assert set(frozen["quantized"]["layers_0"]["mlp"]) == {"down"}
    axes = quantized.frozen_axes(model, kind)
    jax.tree.map(lambda leaf, names: len(names) == leaf.ndim or pytest.fail(str(names)), frozen, axes)
    thawed = tiny.thaw(frozen, model)
    for name, leaf in tree.named_leaves(thawed):
        same = np.asarray(dict(tree.named_leaves(params))[name])
        want = np.asarray(same, jnp.bfloat16) if name in whole or name == "embed/embedding" else same
        np.testing.assert_array_equal(leaf, np.asarray(quantized.rounded(name, want, kind), np.float32))
    (line,) = announcement.of_whole_kernels(frozen, kind)
    assert line == (
        f"adapter.quantize={kind} leaves 5 kernels (attn/k, attn/q, attn/v, mlp/gate, mlp/up) as they are: no block of 32 "
        "to 64 divides their inputs"
    )
    assert announcement.of_whole_kernels(quantized.freeze(build()[1], kind, "float32"), kind) == []


def test_a_model_in_which_some_kernels_are_quantised_is_the_one_that_rounding_gives():
    """Its logits are those of the model with the rounded parameters."""
    model, params = build(d_model=33, n_heads=2, head_dim=16, d_ff=64)
    tokens = np.arange(12)[None] % model.config.vocab_size
    rounded = {"params": tree.map_named(lambda name, leaf: quantized.rounded(name, leaf, "nf4"), params)}
    frozen = quantized.freeze(params, "nf4", "float32")
    apply = tiny.jit(model.apply)
    np.testing.assert_allclose(apply(frozen, tokens), apply(rounded, tokens), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("keys", [{}, {"family": "gpt2"}])
def test_thawed_it_is_the_model_that_rounding_gives(keys):
    model, params = build(**keys)
    thawed = tiny.thaw(quantized.freeze(params, "nf4", "float32"), model)

    def check(name, leaf, was):
        np.testing.assert_array_equal(leaf, quantized.rounded(name, was, "nf4"))
        assert np.array_equal(leaf, was) != (name.startswith("layers_") and name.endswith("kernel")), name

    tree.map_named(check, thawed, params)


@pytest.mark.parametrize(("kind", "mesh"), [("nf4", {"fsdp": 2, "tensor": 2, "context": 2}), ("int8", {"fsdp": 8})])
def test_loaded_on_a_mesh_it_has_the_values_of_one_device(kind, mesh):
    model, params = build(n_heads=4, n_kv_heads=2, d_model=128, d_ff=256)
    want, mesh = quantized.freeze(params, kind, "float32"), make_mesh(**mesh)
    abstract = models.abstract_params(model)
    on_mesh = sharding.tree_shardings(abstract, models.logical_axes(model), mesh)
    axes = quantized.frozen_axes(model, kind)
    shardings = sharding.tree_shardings(want, axes, mesh)
    read = dict(tree.named_leaves(params)).__getitem__
    got = quantized.load(quantized.placed(read, abstract, on_mesh), kind, "float32", shardings)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    jax.tree.map(lambda leaf, placed: leaf.sharding == placed or pytest.fail(str(placed)), got, shardings)
    codes = got["quantized"]["layers_0"]["mlp"]["down"]["codes"]
    assert codes.addressable_shards[0].data.size == codes.size // (mesh.shape["fsdp"] * mesh.shape["tensor"])


def test_each_parameter_is_read_when_the_one_before_is_in_codes():
    """What a whole model takes in float32 is never in memory: here it is 8 times what loading may hold beside the codes."""
    model, _ = build(n_layers=8, d_model=128, d_ff=512, vocab_size=128)
    abstract, mesh = models.abstract_params(model), make_mesh()
    whole = 4 * tree.count(abstract)
    shapes = dict(tree.named_leaves(abstract))
    on_mesh = sharding.tree_shardings(abstract, models.logical_axes(model), mesh)
    frozen = jax.eval_shape(lambda p: quantized.freeze(p, "nf4", "float32"), abstract)
    shardings = sharding.tree_shardings(frozen, quantized.frozen_axes(model, "nf4"), mesh)
    alive = []

    def read(name):
        alive.append(sum(array.nbytes for array in jax.live_arrays()))
        return np.full(shapes[name].shape, 0.5, np.float32)

    load = functools.partial(quantized.load, kind="nf4", dtype="float32", shardings=shardings)
    before = sum(array.nbytes for array in jax.live_arrays())
    kept = load(quantized.placed(read, abstract, on_mesh))
    codes = sum(leaf.nbytes for leaf in jax.tree.leaves(kept))
    assert max(alive) - before < codes + whole / 8
    load(list(quantized.placed(read, abstract, on_mesh)))  # all are read first
    assert max(alive) - before > whole
