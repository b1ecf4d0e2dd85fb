"""Adam in float32 and in eight bits: the same as optax, or near it; the same on any mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxlm.ops import quantize
from jaxlm.step.optim import scale_by_adam

SHAPES = {"layers_0": {"up": {"kernel": (32, 128)}, "q": {"kernel": (16, 2, 64)}}, "norm": {"scale": (64,)}}
PARAMS = jax.tree.map(jnp.ones, SHAPES, is_leaf=lambda x: isinstance(x, tuple))
B1, B2, EPS = 0.9, 0.95, 1e-8


def eight_bits(b2=B2):
    return scale_by_adam(B1, b2, EPS, full_precision=(r".*norm.*",))


def gradients(step: int):
    """Gradients whose size differs a thousandfold from element to element, also within a block."""
    rng, sizes = np.random.default_rng(step), np.random.default_rng(99)
    return jax.tree.map(
        lambda p: jnp.asarray(rng.normal(0.3, 1, p.shape) * np.exp2(sizes.uniform(-10, 0, p.shape)), jnp.float32),
        PARAMS,
    )


def run(tx, steps, grads=gradients):
    state, update = tx.init(PARAMS), jax.jit(tx.update)
    for step in range(steps):
        updates, state = update(grads(step), state, PARAMS)
    return updates, state


def test_a_first_moment_in_bfloat16_is_no_worse_than_that_of_optax():
    exact, _ = run(optax.scale_by_adam(B1, B2, EPS), 5)
    (ours, state), (theirs, _) = (
        run(tx(B1, B2, EPS, mu_dtype="bfloat16"), 5) for tx in (scale_by_adam, optax.scale_by_adam)
    )
    assert {x.dtype for x in jax.tree.leaves(state.mu)} == {jnp.dtype(jnp.bfloat16)}
    assert {x.dtype for x in jax.tree.leaves(state.nu)} == {jnp.dtype(jnp.float32)}
    assert 0 < off(ours, exact) <= off(theirs, exact)


def off(a, b) -> float:
    """How far two trees of updates are apart, relative to the second."""
    a, b = (np.concatenate([np.ravel(x) for x in jax.tree.leaves(t["layers_0"])]) for t in (a, b))
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def linear(monkeypatch):
    """The mutation: a second moment in 255 equal steps up to its block's maximum."""
    encode, decode = quantize.encode, quantize.decode

    def encode_linear(x, noise, dtype):
        if dtype == jnp.int8:
            return encode(x, noise, dtype)
        top = quantize.blocks(x).max(-1)
        return quantize.Blocked(jnp.round(quantize.blocks(x) / top[..., None] * 255).reshape(x.shape), top)

    def decode_linear(b):
        if b.codes.dtype == jnp.int8:
            return decode(b)
        return (quantize.blocks(b.codes) * b.exponents[..., None] / 255).reshape(b.codes.shape)

    monkeypatch.setattr(quantize, "encode", encode_linear)
    monkeypatch.setattr(quantize, "decode", decode_linear)


def test_in_eight_bits_the_updates_stay_near(monkeypatch):
    expected, _ = run(optax.scale_by_adam(B1, B2, EPS), 60)
    got, state = run(eight_bits(), 60)
    assert off(got, expected) < 0.12
    np.testing.assert_allclose(got["norm"]["scale"], expected["norm"]["scale"], rtol=1e-5)
    assert state.nu["norm"]["scale"].dtype == jnp.float32
    kernels = jax.tree.leaves((state.mu["layers_0"], state.nu["layers_0"]))
    assert sum(x.nbytes for x in kernels) <= 2.04 * sum(x.size for x in jax.tree.leaves(PARAMS["layers_0"]))
    linear(monkeypatch)
    broken, _ = run(eight_bits(), 60)
    assert off(broken, expected) > 1


def test_a_second_moment_fades_when_gradients_stop(monkeypatch):
    zero, b2, steps = jax.tree.map(jnp.zeros_like, PARAMS), 0.999, 1000

    def fade():
        tx = eight_bits(b2)
        _, state = run(tx, 1)
        before = quantize.decode(state.nu["layers_0"]["up"]["kernel"])
        state = jax.jit(lambda s: jax.lax.fori_loop(0, steps, lambda _, s: tx.update(zero, s)[1], s))(state)
        return float(quantize.decode(state.nu["layers_0"]["up"]["kernel"]).sum() / before.sum())

    assert fade() == pytest.approx(b2**steps, rel=0.1)
    monkeypatch.setattr(quantize, "noise", lambda shape, seed: jnp.full(shape, 0x80008000, jnp.uint32))
    assert fade() == 1.0  # rounded to the nearest, it never moves


def test_an_element_whose_second_moment_is_out_of_range_does_not_explode():
    """Elements a million times smaller than their block's largest, then as large as it, then small again."""
    small = jax.tree.map(lambda p: jnp.full(p.shape, 1e-9).at[..., 0].set(1.0), PARAMS)
    tx = eight_bits()
    state, update = tx.init(PARAMS), jax.jit(tx.update)
    for step in range(40):
        grads = jax.tree.map(jnp.ones_like, PARAMS) if step == 20 else small
        updates, state = update(grads, state)
        assert max(float(jnp.abs(u).max()) for u in jax.tree.leaves(updates)) < 3.0


def test_a_step_that_is_not_ok_leaves_the_state_bit_for_bit():
    for tx in (eight_bits(), scale_by_adam(B1, B2, EPS)):
        _, state = run(tx, 3)
        bad = jax.tree.map(lambda p: jnp.full(p.shape, jnp.nan), PARAMS)
        _, kept = jax.jit(tx.update)(bad, state, ok=jnp.bool_(False))
        jax.tree.map(np.testing.assert_array_equal, kept, state)
        _, moved = jax.jit(tx.update)(gradients(9), state, ok=jnp.bool_(True))
        assert not np.array_equal(jax.tree.leaves(moved.nu)[0], jax.tree.leaves(state.nu)[0])


def test_sharded_is_one_device_exactly_and_moves_no_codes():
    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
    tx, shapes = eight_bits(), (32, 128)
    state = tx.init(PARAMS)
    where, placed = (
        jax.tree.map(lambda x: NamedSharding(mesh, PartitionSpec(*("fsdp", "tensor") if x.ndim > 1 else ())), given)
        for given in (PARAMS, state)
    )
    update = jax.jit(tx.update, in_shardings=(where, placed), out_shardings=(where, placed), donate_argnums=1)
    sharded = jax.device_put(jax.tree.map(jnp.copy, state), placed)
    text = update.lower(PARAMS, sharded).compile().as_text()
    assert f"s8[{shapes[0] // 4},{shapes[1] // 2}]" in text  # the codes, split
    assert not [line for line in text.splitlines() if "all-gather" in line or "all-to-all" in line]
    plain = jax.jit(tx.update)
    for step in range(3):
        a, sharded = update(jax.device_put(gradients(step), where), sharded)
        b, state = plain(gradients(step), state)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), a, b)
    jax.tree.map(np.testing.assert_array_equal, sharded, state)


def test_a_regression_ends_near_float32_and_not_with_a_linear_second_moment(monkeypatch):
    """Inputs of very different sizes, so that gradients are: Adam's second moment is what makes them equal."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(256, 32)), jnp.float32)
    outputs = jnp.exp2(jnp.linspace(-8, 0, 128))
    target = (x @ jnp.asarray(rng.normal(size=(32, 128)), jnp.float32)) * outputs

    def final(tx):
        def loss(p):
            return jnp.mean(((x @ p["layers_0"]["kernel"]) * outputs - target) ** 2)

        def step(i, carry):
            p, state = carry
            updates, state = tx.update(jax.grad(loss)(p), state)
            rate = 0.05 * (1 - i / 300)
            return jax.tree.map(lambda p, u: p - rate * u, p, updates), state

        params = {"layers_0": {"kernel": jnp.zeros((32, 128))}}
        return float(loss(jax.jit(lambda c: jax.lax.fori_loop(0, 300, step, c))((params, tx.init(params)))[0]))

    exact = final(scale_by_adam(B1, B2, EPS))
    assert final(eight_bits()) < 1.05 * exact + 1e-4
    linear(monkeypatch)
    monkeypatch.setattr(
        quantize, "zeros", lambda s, t: _zeros(s, t) if t == jnp.int8 else quantize.encode(jnp.zeros(s), None, t)
    )
    assert not final(eight_bits()) < 1.05 * exact + 1e-4


_zeros = quantize.zeros
