"""Schedules and AdamW."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny_models as tiny

from jaxlm import config
from jaxlm.config import ConfigError, config_files
from jaxlm.devices import tree
from jaxlm.step import optim


def optim_config(**changes):
    c = config.resolve(config_files.load("base", ["data.path=x", "train.steps=1000"])).optim
    return dataclasses.replace(c, lr=1.0, warmup_steps=100, **changes)


@pytest.mark.parametrize(
    ("schedule", "at"),
    [
        ("cosine", {50: 0.5, 100: 1.0, 550: 0.55, 1000: 0.1}),
        ("linear", {50: 0.5, 100: 1.0, 550: 0.55, 1000: 0.1}),
        ("wsd", {50: 0.5, 100: 1.0, 800: 1.0, 900: 0.55, 1000: 0.1}),
        ("constant", {50: 0.5, 100: 1.0, 1000: 1.0}),
    ],
)
def test_schedule_values(schedule, at):
    lr = optim.rates(optim_config(schedule=schedule), 1000)
    for step, value in at.items():
        np.testing.assert_allclose(lr(step), value, rtol=1e-5)
    at_once = dataclasses.replace(optim_config(schedule=schedule), warmup_steps=0)
    assert float(optim.rates(at_once, 1000)(0)) == 1.0


@pytest.mark.parametrize("schedule", ["linear", "wsd"])
def test_a_rate_that_ends_at_zero_is_never_below_it(schedule):
    for steps in (385, 425, 460, 1000):
        c = dataclasses.replace(optim_config(schedule=schedule, final_lr_ratio=0.0), lr=1e-2, warmup_steps=40)
        rate = jax.jit(optim.rates(c, steps))
        assert 0 <= rate(steps) < 1e-9
        assert rate(steps - 1) > 1e-8


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "constant"])
def test_a_run_none_of_whose_steps_has_a_rate_above_zero_is_refused(schedule):
    for keys in (
        {"steps": 1},
        {"steps": 2},
        {"steps": 1, "final_lr_ratio": 0.1},
        {"steps": 1, "lr": 1e-50},
        {"steps": 9, "schedule_steps": 1},
        {"steps": 9, "schedule_steps": 2},
        {"steps": 9, "schedule_steps": 1, "decay_at_step": 5},
        {"steps": 9, "warmup_steps": 8},
        {"steps": 9, "warmup_steps": 8, "schedule_steps": 40, "decay_at_step": 2},
        {"steps": 9, "first": 9},  # a branch
        {"steps": 9, "first": 9, "schedule_steps": 8, "decay_at_step": 8},
        {"steps": 9, "first": 9, "schedule_steps": 10, "decay_at_step": 8},
        {"steps": 9, "first": 4, "schedule_steps": 3},
    ):
        steps, first = keys.pop("steps"), keys.pop("first", 1)
        c = dataclasses.replace(optim_config(schedule=schedule), **{"warmup_steps": 0, "final_lr_ratio": 0.0} | keys)
        rates = [float(optim.rates(c, steps)(step)) for step in range(first, steps + 1)]
        if max(rates) > 1e-7 * c.lr:
            optim.check_learns(c, steps, first)
        else:
            with pytest.raises(
                ConfigError, match=rf"no step from {first} to train\.steps={steps} has a learning rate above 0"
            ):
                optim.check_learns(c, steps, first)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "constant"])
def test_a_schedule_made_for_other_steps(schedule):
    whole = optim.rates(optim_config(schedule=schedule), 1000)
    part = optim.rates(optim_config(schedule=schedule, schedule_steps=1000), 600)
    assert [float(part(step)) for step in range(1, 601, 37)] == [float(whole(step)) for step in range(1, 601, 37)]


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "constant"])
def test_a_decay_leaves_the_schedule_and_falls_linearly_towards_zero(schedule):
    whole = optim.rates(optim_config(schedule=schedule), 1000)
    branch = optim.rates(optim_config(schedule=schedule, schedule_steps=1000, decay_at_step=500), 599)
    before, after = range(1, 501, 31), np.arange(500, 600)
    assert [float(branch(step)) for step in before] == [float(whole(step)) for step in before]
    falling = [float(jax.jit(branch)(step)) for step in after]
    np.testing.assert_allclose(falling, float(whole(500)) * np.linspace(1, 0.01, 100), rtol=1e-5)


MATRICES = {
    "embed": {"embedding": jnp.ones((64, 32))},
    "final_norm": {"scale": jnp.ones(32)},
    "layers_0": {
        "attn": {"q": {"kernel": jnp.ones((32, 4, 40))}, "o": {"kernel": jnp.ones((4, 40, 32))}},
        "mlp": {"up": {"kernel": jnp.ones((32, 48))}},
    },
}


def random_like(params, seed):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), jnp.float32), params)


def compare(ours, theirs, params, only=("embed", "final_norm", "layers_0")):
    """Both see the same gradients and parameters; ours are without the rate, which is 1, and the sign."""
    state, expected_state = ours.init(params), theirs.init(params)
    # As users' programs are compiled: Muon's iteration makes a last bit, in which compilers differ, a thousandth.
    update, expected_update = (jax.jit(tx.update, compiler_options=tiny.AS_USERS) for tx in (ours, theirs))
    for seed in range(3):
        grads, now = random_like(params, seed), random_like(params, seed + 100)
        updates, state = update(grads, state, now, ok=jnp.bool_(True))
        expected, expected_state = expected_update(grads, expected_state, now)
        for part in only:
            jax.tree.map(
                lambda u, e: np.testing.assert_allclose(-u, e, rtol=1e-4, atol=1e-6), updates[part], expected[part]
            )
    bad = jax.tree.map(lambda g: g * jnp.nan, grads)
    jax.tree.map(np.testing.assert_array_equal, update(bad, state, now, ok=jnp.bool_(False))[1], state)


def test_adafactor_is_that_of_optax_also_for_attention_kernels():
    mask = {"embed": False, "final_norm": False, "layers_0": True}
    theirs = optax.adafactor(
        1.0,
        min_dim_size_to_factor=32,
        multiply_by_parameter_scale=False,
        weight_decay_rate=0.1,
        weight_decay_mask=mask,
    )
    ours = optim.make(optim_config(name="adafactor"), MATRICES)
    compare(ours, theirs, MATRICES)
    floats = sum(x.size for x in jax.tree.leaves(jax.eval_shape(ours.init, MATRICES)))
    assert floats < 0.1 * sum(p.size for p in jax.tree.leaves(MATRICES))


def polar_error(update, shape, inputs):
    """How far from 1 the singular values of a kernel's update are, without its scale."""
    matrix = np.asarray(update, np.float64).reshape(np.prod(shape[:inputs]), -1)
    return np.abs(np.linalg.svd(matrix / (0.2 * max(matrix.shape) ** 0.5), compute_uv=False) - 1)


def test_muon_is_that_of_optax_for_layers_but_nearer_to_orthogonal_and_adamw_for_the_rest():
    c, axes = optim_config(name="muon", weight_decay=0.0), optax.contrib.MuonDimensionNumbers
    inputs = {"attn": {"q": {"kernel": 1}, "o": {"kernel": 2}}, "mlp": {"up": {"kernel": 1}}}
    dims = {
        "attn": {"q": {"kernel": axes(0, (1, 2))}, "o": {"kernel": axes((0, 1), 2)}},
        "mlp": {"up": {"kernel": axes(0, 1)}},
    }
    ours = optim.make(c, MATRICES)
    theirs = optax.contrib.muon(1.0, muon_weight_dimension_numbers=dims, consistent_rms=0.2)
    compare(ours, optax.adamw(1.0, c.b1, c.b2, c.eps, weight_decay=0.0), MATRICES, only=("embed", "final_norm"))
    state, expected_state, layer = ours.init(MATRICES), theirs.init(MATRICES["layers_0"]), MATRICES["layers_0"]
    for seed in range(3):
        grads = random_like(MATRICES, seed)
        updates, state = jax.jit(ours.update)(grads, state, MATRICES, ok=True)
        expected, expected_state = jax.jit(theirs.update)(grads["layers_0"], expected_state, layer)
        errors, others = (
            np.concatenate(
                jax.tree.leaves(jax.tree.map(lambda p, n, u: polar_error(u, p.shape, n), layer, inputs, found))
            )
            for found in (updates["layers_0"], expected)
        )
        assert errors.max() < 0.15 < others.max()
        assert errors.mean() < 0.7 * others.mean()
        # The same singular vectors: they differ as singular values between 0.68 and 1.2 may.
        cosines = jax.tree.map(
            lambda u, e: -np.sum(u * e) / np.linalg.norm(u) / np.linalg.norm(e), updates["layers_0"], expected
        )
        assert min(jax.tree.leaves(cosines)) > 0.97
    mine, theirs = (s.inner_states["muon"].inner_state[0] for s in (state[0], expected_state))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), mine.mu["layers_0"], theirs.mu)
    assert (int(mine.count), mine._fields) == (int(theirs.count), theirs._fields)
    half = optim.make(optim_config(name="muon", mu_dtype="bfloat16"), MATRICES).init(MATRICES)
    assert sum(x.size for x in jax.tree.leaves(half) if x.dtype == jnp.bfloat16) == sum(
        p.size for p in jax.tree.leaves(MATRICES)
    )


def test_muon_orthogonalises_in_the_compute_type():
    """Seen in the products of the program; what it returns is float32 all the same. So is optim.ns_steps."""

    def dots(dtype, **keys):
        tx = optim.make(optim_config(name="muon", **keys), MATRICES, dtype=dtype)
        args = (MATRICES, tx.init(MATRICES), MATRICES)
        text = jax.jit(lambda g, s, p: tx.update(g, s, p, ok=True)).lower(*args).as_text()
        assert {
            u.dtype for u in jax.tree.leaves(jax.eval_shape(lambda g, s, p: tx.update(g, s, p, ok=True)[0], *args))
        } == {jnp.dtype("float32")}
        return [line for line in text.splitlines() if "dot_general" in line]

    def kinds(lines):
        return {kind for kind in ("f32", "bf16") for line in lines if f"x{kind}>" in line}

    five = dots("float32")
    assert kinds(five) == {"f32"}
    assert kinds(dots("bfloat16")) == {"bf16"}
    assert len(dots("float32", ns_steps=3)) < 0.7 * len(five)


def test_muon_moves_parameters_as_far_as_adamw():
    def rms(name):
        tx = optim.make(optim_config(name=name, weight_decay=0.0), MATRICES)
        state, update = tx.init(MATRICES), jax.jit(tx.update)
        for seed in range(30):
            updates, state = update(random_like(MATRICES, seed), state, MATRICES, ok=True)
        return {jax.tree_util.keystr(k): float(jnp.sqrt(jnp.mean(u**2))) for k, u in jax.tree.leaves_with_path(updates)}

    muon, adamw = rms("muon"), rms("adamw")
    assert all(0.5 < muon[name] / adamw[name] < 2 for name in adamw)


PARAMS = {"embed": {"embedding": jnp.ones((4, 3))}, "layers_0": {"attn": {"q": {"kernel": jnp.full((3, 3), 2.0)}}}}


def test_adamw_is_optax_adamw_with_decay_on_kernels_only():
    c = optim_config()
    tx = optim.make(c, PARAMS)
    reference = optax.adamw(
        1.0, c.b1, c.b2, c.eps, weight_decay=c.weight_decay, mask=lambda p: {"embed": False, "layers_0": True}
    )
    state, expected_state = tx.init(PARAMS), reference.init(PARAMS)
    update, expected_update = jax.jit(tx.update), jax.jit(reference.update)
    for seed in range(3):
        grads = random_like(PARAMS, seed)
        updates, state = update(grads, state, PARAMS, ok=True)
        expected, expected_state = expected_update(grads, expected_state, PARAMS)
        jax.tree.map(lambda u, e: np.testing.assert_allclose(-u, e, rtol=1e-6), updates, expected)


@pytest.mark.parametrize("name", ["adamw", "adamw8bit", "adafactor", "muon"])
def test_no_optimizer_has_a_number_that_is_not_finite_by_design(name):
    """A checkpoint is refused if any array of the state has one."""
    tx = optim.make(optim_config(name=name), MATRICES)
    state, update = tx.init(MATRICES), jax.jit(lambda g, s: tx.update(g, s, MATRICES, ok=jnp.bool_(True))[1])
    for size in (0.0, 1e-30, 1e10):
        state = update(jax.tree.map(lambda p, s=size: p * s, MATRICES), state)
        assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in jax.tree.leaves(state))
    assert jax.tree.leaves(state)


def test_matrices_have_a_rate_of_their_own():
    """A tree like the parameters; with a ratio of 1, or of parameters that nobody named, one rate as ever."""
    c = optim_config(schedule="linear", rates=("layers_.*/kernel 4",), decay_at_step=800)
    one, each = optim.rates(c, 1000), optim.rates(c, 1000, MATRICES)
    for step in (1, 50, 500, 900):
        rates = each(step)
        assert jax.tree.structure(rates) == jax.tree.structure(MATRICES)
        assert {float(x) for x in jax.tree.leaves(rates["layers_0"])} == {float(one(step) * 4.0)}
        assert {float(x) for x in jax.tree.leaves((rates["embed"], rates["final_norm"]))} == {float(one(step))}
    plain = optim.rates(optim_config(schedule="linear"), 1000, MATRICES)
    assert jax.tree.structure(plain(50)) == jax.tree.structure(0)


def test_a_pattern_that_gives_no_parameter_its_rate_is_refused():
    factors = {"layers_0": {"attn": {"q": {"lora_a": jnp.ones((4, 2)), "lora_b": jnp.ones((2, 4))}}}}
    for what in (lambda c: optim.make(c, factors), lambda c: optim.rates(c, 1000, factors)):
        with pytest.raises(ConfigError, match=r"kernel is the first match of no trained parameter .*lora_a, "):
            what(optim_config(rates=("layers_.*/kernel 4",)))


@pytest.mark.parametrize("ratio", [1.0, 4.0])
def test_decay_that_follows_the_rate_falls_as_its_square(ratio):
    """Against a loop in numpy, of AdamW by the paper; and without the key the decay falls as the rate alone."""

    def trained(follows: bool) -> dict:
        c = optim_config(
            schedule="linear", decay_follows_rate=follows, rates=(f"layers_.*/kernel {ratio}",), final_lr_ratio=0.0
        )
        c = dataclasses.replace(c, lr=0.1, warmup_steps=4)
        tx, rates, params = optim.make(c, PARAMS), optim.rates(c, 12, PARAMS), PARAMS
        state, update = tx.init(params), jax.jit(tx.update)
        for step in range(1, 13):
            lr = rates(step)
            updates, state = update(random_like(params, step), state, params, ok=True, rate=max(jax.tree.leaves(lr)))
            moved = jax.tree.map(lambda rate, part: jax.tree.map(lambda u, rate=rate: rate * u, part), lr, updates)
            params = jax.tree.map(jnp.subtract, params, moved)
        return params

    def of(params, matrix: bool) -> np.ndarray:
        found = params["layers_0"]["attn"]["q"]["kernel"] if matrix else params["embed"]["embedding"]
        return np.asarray(found, np.float64)

    def by_hand(matrix: bool, follows: bool) -> np.ndarray:
        p, peak, m, v = of(PARAMS, matrix), 0.1, 0.0, 0.0
        for step in range(1, 13):
            g = of(random_like(PARAMS, step), matrix)
            share = step / 4 if step <= 4 else (12 - step) / 8
            m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
            direction = (m / (1 - 0.9**step)) / (np.sqrt(v / (1 - 0.95**step)) + 1e-8)
            decay = 0.1 * (share if follows else 1.0) if matrix else 0.0
            p = p - peak * share * (ratio if matrix else 1.0) * (direction + decay * p)
        return p

    for follows in (True, False):
        found = trained(follows)
        for matrix in (True, False):
            np.testing.assert_allclose(of(found, matrix), by_hand(matrix, follows), rtol=1e-4, atol=1e-6)
        with pytest.raises(AssertionError):
            np.testing.assert_allclose(of(found, True), by_hand(True, not follows), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_a_rate_left_to_the_rule_moves_nothing_where_a_step_is_only_timed(ratio):
    c = dataclasses.replace(optim_config(decay_follows_rate=True, rates=(f"layers_.*/kernel {ratio}",)), lr=0.0)
    tx = optim.make(c, PARAMS)
    updates, _ = tx.update(PARAMS, tx.init(PARAMS), PARAMS, ok=True, rate=jnp.zeros(()))
    assert all(bool(jnp.isfinite(update).all()) for update in jax.tree.leaves(updates))


def test_the_state_has_the_same_form_with_and_without_the_new_keys():
    """So that a run goes on when they are changed."""
    new = {"decay_follows_rate": True, "rates": ("layers_.*/kernel 4",)}
    for name in ("adamw", "muon"):
        forms = {
            jax.tree.structure(optim.make(optim_config(name=name, **changes), MATRICES).init(MATRICES))
            for changes in ({}, new)
        }
        assert len(forms) == 1
    mask = {"embed": False, "final_norm": False, "layers_0": True}
    older = optax.chain(optax.identity(), optax.add_decayed_weights(0.1, mask=mask)).init(MATRICES)
    assert jax.tree.structure(optim.make(optim_config(), MATRICES).init(MATRICES)[1]) == jax.tree.structure(older[1])


def test_some_rows_learn_at_another_rate():
    """All else is updated as without; a run that sets the ratio back to 1 has a state of the same form."""
    params = {"embed": {"embedding": jnp.ones((8, 4))}, "head": {"kernel": jnp.ones((4, 8))}}
    grads = jax.tree.map(lambda p: jnp.arange(1.0, 1 + p.size).reshape(p.shape), params)
    found, states = [], []
    for rows, ratio in (((), 10.0), ((5, 7), 10.0), ((5, 7), 1.0)):
        tx = optim.make(optim_config(rates=(f"rows {ratio}",)), params, rows)
        updates, state = tx.update(grads, tx.init(params), params, ok=jnp.bool_(True))
        found.append(updates)
        states.append(jax.tree.structure(state))
    plain, faster, once = found
    ratios = np.ones(8, np.float32)
    ratios[[5, 7]] = 10
    np.testing.assert_array_equal(faster["embed"]["embedding"], plain["embed"]["embedding"] * ratios[:, None])
    np.testing.assert_array_equal(faster["head"]["kernel"], plain["head"]["kernel"] * ratios)
    jax.tree.map(np.testing.assert_array_equal, once, plain)
    assert states[1] == states[2]


PATHS = {
    "embed": {"embedding": jnp.ones((8, 4))},
    **{f"layers_{i}": {"mlp": {"up": {"kernel": jnp.ones((4, 6)), "bias": jnp.ones(6)}}} for i in range(3)},
}


def test_rates_by_part():
    """The first pattern that matches counts; "0.5^" halves from layer to layer; what none matches has the rate itself."""
    c = optim_config(schedule="constant", rates=("layers_1/.*/kernel 3", "layers_.* 0.5^"))
    rates = optim.rates(c, 1000, PATHS)(500)
    times = {name: float(rate) for name, rate in tree.named_leaves(rates)}
    assert times == {
        "embed/embedding": 1.0,
        "layers_0/mlp/up/kernel": 0.25,
        "layers_0/mlp/up/bias": 0.25,
        "layers_1/mlp/up/kernel": 3.0,
        "layers_1/mlp/up/bias": 0.5,
        "layers_2/mlp/up/kernel": 1.0,
        "layers_2/mlp/up/bias": 1.0,
    }
    assert optim.table(dataclasses.replace(c, lr=0.01), {"params": PATHS}) == [
        ["RATES", "parameters", "peak"],
        ["  layers_1/.*/kernel", "24", "0.03"],
        ["  layers_.*", str(30 + 6 + 30), "0.0025 to 0.01"],
        ["  all others", "32", "0.01"],
    ]
    assert optim.table(optim_config(), {"params": PATHS}) == []
    with pytest.raises(ConfigError, match=r"layers_1/mlp/.* is the first match of no trained parameter"):
        optim.make(optim_config(rates=("layers_.* 2", "layers_1/mlp/.* 3")), PATHS)


def test_rows_have_their_rate_also_in_a_table_of_another():
    params = {"embed": {"embedding": jnp.ones((8, 4))}}
    tx = optim.make(optim_config(rates=("embed/.* 0.5", "rows 10")), params, (5,))
    updates, _ = tx.update(params, tx.init(params), params, ok=jnp.bool_(True))
    updates = updates["embed"]["embedding"]
    np.testing.assert_allclose(updates[5] / updates[4], 20.0)  # the step multiplies both by half of the rate
