"""A grown model computes the function of the smaller one; what is new has its own rate, moves, and no part of it is a copy."""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm import config, models
from jaxlm.config import GROWS, ConfigError, config_files
from jaxlm.devices import tree
from jaxlm.models import growth
from jaxlm.models import params as params_lib
from jaxlm.models.transformer import Transformer, head_kernel
from jaxlm.step import optim

SMALL = {"n_layers": 2, "d_model": 16, "n_heads": 2, "n_kv_heads": 1, "head_dim": 8, "d_ff": 24, "vocab_size": 40}
LARGE = SMALL | {"n_layers": 5, "d_model": 18, "n_heads": 4, "n_kv_heads": 2, "d_ff": 40}
SIZES = tuple(SMALL[key] for key in GROWS)


def model_of(sizes: dict, **keys) -> Transformer:
    c = config.resolve(config_files.load("base", ["data.path=x", "train.seq_len=16"])).model
    keys = {"dtype": "float32", "attention": "xla", "max_seq_len": 16} | keys
    return models.build(dataclasses.replace(c, **sizes, **keys), "xla")


def logits(model: Transformer, params: dict, tokens: jax.Array) -> jax.Array:
    return (model.apply({"params": params}, tokens) @ head_kernel(params, model.config))[..., :40]


@functools.partial(jax.jit, static_argnums=0)
@functools.partial(jax.grad, argnums=1)
def gradient(model: Transformer, params: dict, tokens: jax.Array) -> jax.Array:
    chosen = jax.nn.log_softmax(logits(model, params, tokens[:, :-1]))
    return -jnp.take_along_axis(chosen, tokens[:, 1:, None], -1).mean()


def both(small: Transformer, large: Transformer) -> tuple[np.ndarray, np.ndarray]:
    params, tokens = random_params(small), jax.random.randint(jax.random.key(2), (3, 16), 0, 40)
    run = jax.jit(logits, static_argnums=0)
    return run(large, grow(params, large), tokens), run(small, params, tokens)


def random_params(model: Transformer, seed: int = 0) -> dict:
    """Every parameter random, norms and biases too, as after training."""
    draw = np.random.default_rng(seed)

    def made(name: str, p: jax.ShapeDtypeStruct) -> np.ndarray:
        return (0.3 * draw.standard_normal(p.shape) + name.endswith("norm/scale")).astype(np.float32)

    return tree.map_named(made, params_lib.abstract_params(model))


def grow(params: dict, large: Transformer, drawn: dict | None = None) -> dict:
    old, made = dict(tree.named_leaves(params)), []
    for name, new in tree.named_leaves(drawn or random_params(large, seed=1)):
        below, copied = growth.source(name, sum("/attn/o/kernel" in name for name in old), large.config.n_layers)
        made.append((name, growth.grown(name, np.asarray(old[below]), np.asarray(new), copied)))
    return tree.nested(made)


@pytest.mark.parametrize("changes", [{}, {"tie_embeddings": False, "qk_norm": True, "bias": True}])
def test_a_grown_model_computes_the_same_function(changes):
    small, large = model_of(SMALL, **changes), model_of(LARGE, norm_eps=1e-5 * 16 / 18, **changes)
    found, wanted = both(small, large)
    np.testing.assert_allclose(found, wanted, atol=1e-5 * np.abs(wanted).max(), rtol=0)


@pytest.mark.recipe
@pytest.mark.parametrize("qk_norm", [False, True])
def test_35m_parameters_grown_to_12_layers_of_576(qk_norm):
    """The sizes of configs/local_35m.py, without most of its ids, on rows of text: as created, and after 5 steps."""
    old = {"n_layers": 8, "d_model": 512, "n_heads": 8, "n_kv_heads": 4, "head_dim": 64, "d_ff": 1408, "vocab_size": 40}
    new = old | {"n_layers": 12, "d_model": 576, "n_heads": 10, "n_kv_heads": 5, "d_ff": 1584}
    small, large = (model_of(sizes, qk_norm=qk_norm, norm_eps=1e-5 * 512 / sizes["d_model"]) for sizes in (old, new))
    text = np.frombuffer((pathlib.Path(__file__).parents[2] / "README.md").read_bytes()[:32], np.uint8)
    tokens = jnp.asarray(text.reshape(2, 16) % 40, jnp.int32)
    params, drawn = (params_lib.init_params(model, jax.random.key(seed)) for seed, model in enumerate((small, large)))
    run = jax.jit(logits, static_argnums=0)
    for _ in range(2):
        found, wanted = run(large, grow(params, large, drawn), tokens), run(small, params, tokens)
        np.testing.assert_allclose(found, wanted, atol=1e-5 * np.abs(wanted).max(), rtol=0)
        for _ in range(5):  # by a share of each tensor's size, as Muon does
            params = jax.tree.map(
                lambda p, g: p - 0.05 * g * jnp.linalg.norm(p) / (jnp.linalg.norm(g) + 1e-12),
                params,
                gradient(small, params, tokens),
            )


def test_gpt2_grows_in_depth_heads_and_feed_forward():
    sizes = SMALL | {"n_kv_heads": 2}
    small, large = (
        model_of(s, family="gpt2") for s in (sizes, sizes | {"n_layers": 3, "n_heads": 3, "n_kv_heads": 3, "d_ff": 40})
    )
    found, wanted = both(small, large)
    np.testing.assert_allclose(found, wanted, atol=1e-5 * np.abs(wanted).max(), rtol=0)


def test_gradients_reach_every_new_part_and_none_is_a_copy():
    """After a few steps of gradient descent every new row, column and layer has moved, each in a direction of its own."""
    large = model_of(LARGE)
    params, tokens = grow(random_params(model_of(SMALL)), large), jax.random.randint(jax.random.key(2), (3, 16), 0, 40)

    begun = params
    for _ in range(4):
        params = jax.tree.map(
            lambda p, g: p - 0.1 * g / (np.abs(g).max() + 1e-12), params, gradient(large, params, tokens)
        )
    old = growth.old_parts(begun, SIZES)
    moved = jax.tree.map(lambda a, b: np.abs(np.asarray(a - b)), params, begun)
    for name, leaf in tree.named_leaves(moved):
        if old[name] == leaf.shape:
            continue
        for axis, size in enumerate(old[name] or (0,) * leaf.ndim):
            rest = tuple(i for i in range(leaf.ndim) if i != axis)
            moves = leaf.max(rest)[size:]
            assert (name == "embed/embedding" and not axis) or (moves > 0).all(), (name, axis)  # padding is no id
            if name.endswith("kernel"):
                assert len(np.unique(moves)) == len(moves), (name, axis)


def test_moments_of_the_old_part_are_those_that_its_gradients_have_in_the_larger_model():
    """The gradients of the old part are the small model's, times what a norm's gain was divided by."""
    changes = {"tie_embeddings": False, "qk_norm": True, "bias": True}
    small, large = model_of(SMALL, **changes), model_of(LARGE, norm_eps=1e-5 * 16 / 18, **changes)
    params, tokens = random_params(small), jax.random.randint(jax.random.key(2), (3, 16), 0, 40)
    of_small = dict(tree.named_leaves(gradient(small, params, tokens)))
    of_large = gradient(large, grow(params, large), tokens)
    for (name, wanted), old in zip(
        tree.named_leaves(of_large), growth.old_parts(of_large, SIZES).values(), strict=True
    ):
        below, copied = growth.source(name, SMALL["n_layers"], LARGE["n_layers"])
        first, second = (
            growth.moment(name, np.asarray(g), wanted.shape, copied, second=g is not of_small[below])
            for g in (of_small[below], of_small[below] ** 2)
        )
        inside = tuple(slice(size) for size in old or (0,))
        size = float(np.abs(wanted).max())
        np.testing.assert_allclose(first[inside], wanted[inside], atol=2e-5 * size, rtol=0, err_msg=name)
        np.testing.assert_allclose(second[inside], wanted[inside] ** 2, atol=4e-5 * size**2, rtol=0, err_msg=name)
        first[inside], second[inside] = 0, 0
        assert not first.any(), name
        assert not second.any(), name


def test_layers_stand_on_the_layer_that_they_copy():
    of = [growth.source(f"layers_{i}/attn/o/kernel", 8, 12) for i in range(12)]
    assert [int(name.split("/")[0].removeprefix("layers_")) for name, _ in of] == [0, 0, 1, 2, 2, 3, 4, 4, 5, 6, 6, 7]
    assert [i for i, (_, copied) in enumerate(of) if copied] == [1, 4, 7, 10]
    assert growth.source("final_norm/scale", 8, 12) == ("final_norm/scale", False)


def test_old_and_new_parts_learn_at_rates_of_their_own():
    """The same table: `new/.*` is what growth added, be it a layer or some columns of a tensor; the rest is the old model."""
    params = params_lib.abstract_params(model_of(LARGE))
    c = config.resolve(config_files.load("base", ["data.path=x", "train.steps=1000"])).optim
    c = dataclasses.replace(
        c, lr=1.0, weight_decay=0.0, grown_from=SIZES, rates=("embed/.* 0.5", "new/.* 4", ".* 0.25")
    )
    tx = optim.make(c, params)
    ones = jax.tree.map(lambda p: jnp.ones(p.shape), params)

    @jax.jit
    def step(ones: dict) -> dict:
        updates, _ = tx.update(ones, tx.init(ones), ones, ok=jnp.bool_(True), rate=jnp.float32(1.0))
        return jax.tree.map(lambda rate, u: rate * u, optim.rates(c, 1000, params)(500), updates)

    moves = step(ones)
    one = float(optim.rates(dataclasses.replace(c, rates=()), 1000)(500))
    up = np.asarray(moves["layers_0"]["mlp"]["up"]["kernel"]) / one
    np.testing.assert_allclose(up[:16, :24], 0.25, rtol=1e-5)
    np.testing.assert_allclose(up[16:], 4.0, rtol=1e-5)
    np.testing.assert_allclose(up[:, 24:], 4.0, rtol=1e-5)
    np.testing.assert_allclose(moves["layers_1"]["attn"]["k"]["kernel"] / one, 4.0, rtol=1e-5)  # a copy of layer 0
    np.testing.assert_allclose(moves["embed"]["embedding"] / one, 0.5, rtol=1e-5)  # old and new columns
    rows = {pattern.strip(): numbers for pattern, numbers, _ in optim.table(c, {"params": params})[1:]}
    counted = {pattern: int(numbers.replace(",", "")) for pattern, numbers in rows.items()}
    small = tree.count(params_lib.abstract_params(model_of(SMALL)))
    assert counted == {"embed/.*": 128 * 18, ".*": small - 128 * 16, "new/.*": tree.count(params) - small - 128 * 2}
    with pytest.raises(ConfigError, match=r"new/head/.* is the first match of no trained parameter"):
        optim.make(dataclasses.replace(c, rates=("new/head/.* 2",)), params)


def test_decay_that_follows_the_rate_is_whole_at_the_peak_also_where_no_tensor_is_new():
    """The step's `rate` is the highest of the old parts then, and so is the peak by which it is divided."""
    params = {"head": {"kernel": jnp.ones((4, 6))}}
    c = config.resolve(config_files.load("base", ["data.path=x", "train.steps=1000"])).optim
    c = dataclasses.replace(c, lr=1.0, weight_decay=0.5, decay_follows_rate=True, schedule="constant", warmup_steps=0)
    c = dataclasses.replace(c, grown_from=(1, 3, 1, 1, 1, 6), rates=("new/.* 1", ".* 0.1"))
    tx = optim.make(c, params)
    highest = max(float(rate) for rate in jax.tree.leaves(optim.rates(c, 1000, params)(500)))
    still = jax.tree.map(jnp.zeros_like, params)
    updates, _ = tx.update(still, tx.init(params), params, ok=jnp.bool_(True), rate=jnp.float32(highest))
    np.testing.assert_allclose(updates["head"]["kernel"][:3], 0.5, rtol=1e-6)
    np.testing.assert_allclose(updates["head"]["kernel"][3:], 5.0, rtol=1e-6)
