"""PPO and GRPO: packed = one answer a row = the papers' formulas; microbatched and sharded = full on one device; clipping."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_answers
import tiny_models as tiny
from tiny_steps import make_mesh

from jaxlm import config, models
from jaxlm.config import config_files
from jaxlm.devices import sharding
from jaxlm.step import parts
from jaxlm.step.objectives import base, policy

MODEL = dataclasses.replace(tiny.model_config(n_layers=1), attention="xla")
OURS = models.build(MODEL, "xla")
PROMPTS, ANSWERS, ROWS, T, LONGEST, MASKED = 6, 4, 8, 64, 9, 5
TEXTS = tiny_answers.random_texts(PROMPTS, ANSWERS, MODEL.vocab_size, LONGEST)
VARIABLES = {
    "params": tiny.random_params(OURS),
    "value": {"value_head": {"kernel": jnp.asarray(np.random.default_rng(5).normal(size=MODEL.d_model), jnp.float32)}},
}
REFERENCE = {"params": tiny.random_params(OURS, seed=1)}
LOW, HIGH, BETA, CAP, VALUE_CLIP, VALUE_WEIGHT = 0.1, 0.15, 0.3, 1.05, 0.2, 0.4


def settings(program: str = "grpo", *keys: str, rows: int = ROWS, **train) -> config.Config:
    sizes = {"train.batch_size": rows, "train.seq_len": T, "rollout.prompts": PROMPTS, "rollout.answers": ANSWERS}
    clips = {"policy.clip_low": LOW, "policy.clip_high": HIGH, "policy.beta": BETA, "policy.value_clip": VALUE_CLIP}
    more = {"policy.value_weight": VALUE_WEIGHT, "rollout.max_new_tokens": LONGEST, "reward.function": "a:b"}
    given = {"data.path": "x", "program": program} | sizes | clips | more
    made = config.resolve(config_files.load("base", [*(f"{key}={value}" for key, value in given.items()), *keys]))
    return dataclasses.replace(made, model=MODEL, train=dataclasses.replace(made.train, **train))


def answers_of(now: list[np.ndarray], values: list[np.ndarray]) -> dict[str, list[np.ndarray]]:
    """What rollouts hold of each answer's tokens if the policy has moved on to `now` since; one answer does not count."""
    rng = np.random.default_rng(0)
    old = [x + 0.2 * rng.normal() + 0.15 * rng.normal(size=x.shape) for x in now]
    return {
        "old": old,
        "sampler": [x + 0.1 * rng.normal(size=x.shape) for x in old],
        "reference": [x + 0.4 * rng.normal(size=x.shape) for x in old],
        "values": [x + 0.2 * rng.normal(size=x.shape) for x in values],
        "returns": [rng.normal(size=x.shape) for x in old],
        "advantages": [np.full(x.shape, rng.normal()) for x in old],
        "weights": [np.full(x.shape, float(i != MASKED)) for i, x in enumerate(old)],
    }


def batch_of(found: dict, rows: int = ROWS, elsewhere: float = np.nan) -> dict:
    """A batch of `policy.shapes`, with junk outside the answers."""
    given = tiny_answers.batch(TEXTS, T, rows)
    arrays = {
        name: tiny_answers.by_token(given, x, 0.0 if name == "weights" else elsewhere) for name, x in found.items()
    }
    names = len(policy.FIGURES) + 2  # those of PPO too
    told = jnp.broadcast_to(jnp.arange(1.0, names + 1), (rows, names))
    return given | arrays | {"figures": told}


JUDGE = {rows: tiny.jit(policy.judge(OURS, settings("ppo", rows=rows))) for rows in (ROWS, len(TEXTS))}


@pytest.fixture(scope="module")
def rollouts() -> dict:
    """What is held of each answer, [tokens]; and "now" and "new_values", of the policy as it is, one answer a row."""
    given = tiny_answers.batch(TEXTS, T, len(TEXTS))
    found = JUDGE[len(TEXTS)](VARIABLES, None, given)
    now, values = (tiny_answers.by_answer(given, found[name]) for name in ("old", "values"))
    return answers_of(now, values) | {"now": now, "new_values": values}


@pytest.fixture(scope="module")
def packed(rollouts) -> dict:
    return batch_of({name: x for name, x in rollouts.items() if name not in ("now", "new_values")})


def k3(a, b):
    return np.exp(a - b) - (a - b) - 1


def by_hand(c: config.Config, found: dict) -> tuple[float, dict[str, float]]:
    """(loss, metrics) in NumPy, an answer at a time."""
    p, losses, told, kept = c.policy, [], {}, [x.any() for x in found["weights"]]
    for i in range(len(TEXTS)):
        now, old, sampler, reference, a = (found[n][i] for n in ("now", "old", "sampler", "reference", "advantages"))
        moved = now - old
        ratio = np.exp(moved if p.ratio == "token" else np.full(moved.shape, moved.mean()))
        limited = np.clip(ratio, 1 - LOW, 1 + HIGH)
        loss = -np.minimum(ratio * a, limited * a)
        if c.rollout.importance_cap:
            loss = loss * np.minimum(np.exp(old - sampler), CAP)
        if c.program == "grpo":
            loss = loss + BETA * k3(reference, now)
        new, was, wanted = (found[name][i] for name in ("new_values", "values", "returns"))
        value = 0.5 * np.maximum((new - wanted) ** 2, (np.clip(new, was - VALUE_CLIP, was + VALUE_CLIP) - wanted) ** 2)
        of = {
            "entropy": -old,
            "kl": k3(reference, old),
            "ratio_kl": k3(now, old),
            "sampler_gap": np.abs(sampler - old),
            "clip_share": ((ratio > 1 + HIGH) & (a > 0)) | ((ratio < 1 - LOW) & (a < 0)),
        }
        if c.program == "ppo":
            loss, of["value_loss"] = loss + VALUE_WEIGHT * value, value
        losses.append(loss)
        for name, x in of.items():
            told.setdefault(name, []).append(x)
    of_kept = [x for x, keep in zip(losses, kept, strict=True) if keep]
    mean = {
        "token": np.concatenate(of_kept).mean(),
        "answer": sum(x.mean() for x in of_kept) / len(TEXTS),
        "length": np.concatenate(of_kept).sum() / (len(TEXTS) * LONGEST),
    }[p.average]
    return mean, {
        n: np.concatenate([x for x, keep in zip(v, kept, strict=True) if keep]).mean() for n, v in told.items()
    }


CASES = {
    f"{average}/{ratio}": settings("grpo", f"policy.average={average}", f"policy.ratio={ratio}")
    for average, ratio in itertools.product(("token", "answer", "length"), ("token", "answer"))
}
CASES["capped"] = settings("grpo", f"rollout.importance_cap={CAP}")
CASES["ppo"] = settings("ppo", "policy.average=token")


@pytest.fixture(scope="module")
def of_all():
    """(variables, batch) -> the sums of every case, compiled once."""
    objectives = {name: policy.make(OURS, c) for name, c in CASES.items()}
    return tiny.jit(lambda v, b: {name: o.sums(v, o.prepare(b), None) for name, o in objectives.items()})


def test_packed_is_answer_by_answer_and_the_formulas(of_all, rollouts, packed):
    seen = set()
    for name, found in of_all(VARIABLES, packed).items():
        assert float(found.weight) == ROWS
        loss, metrics = by_hand(CASES[name], rollouts)
        np.testing.assert_allclose(float(found.loss) / ROWS, loss, rtol=2e-4, err_msg=name)
        got = {n: float(x) / ROWS for n, x in found.metrics.items()}
        told = policy.figures(CASES[name])
        assert [got.pop(n) for n in told] == [pytest.approx(i + 1) for i in range(len(told))]
        assert got == {n: pytest.approx(x, rel=2e-3, abs=1e-6) for n, x in metrics.items()}, name
        assert 0.02 < metrics["clip_share"] < 0.9
        seen.add(round(loss, 5))
    assert len(seen) == len(CASES)  # all of them differ


def test_what_a_masked_answer_holds_changes_nothing(of_all, packed):
    every = tiny_answers.batch(TEXTS, T, ROWS)
    masked = tiny_answers.by_token(every, [np.full(len(answer), i == MASKED) for i, (_, answer) in enumerate(TEXTS)])
    other = packed | {name: jnp.where(masked > 0, -70.0, packed[name]) for name in ("old", "advantages", "returns")}
    got, want = of_all(VARIABLES, other), of_all(VARIABLES, packed)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    counted = of_all(VARIABLES, packed | {"weights": every["weights"]})  # the mutation
    assert abs(float(counted["answer/token"].loss / want["answer/token"].loss) - 1) > 1e-3


def row(**arrays) -> dict:
    """A batch of one row and one answer, all of whose tokens count."""
    made = {name: jnp.asarray([x], jnp.float32) for name, x in arrays.items()}
    size = next(iter(made.values())).shape
    zero = {name: jnp.zeros(size) for name in ("old", "sampler", "reference", "advantages", "values", "returns")}
    return zero | {"weights": jnp.ones(size), "segment_ids": jnp.ones(size, jnp.int32)} | made


def gradients(c: config.Config, batch: dict, logp, values=None):
    """(the loss of each token, the slope of their sum by log p and values)."""

    def of(batch, *given):
        loss, back = jax.vjp(lambda *x: policy.token_loss(c, batch, *x)[0], *given)
        return loss, *back(jnp.ones_like(loss))

    return tiny.jit(of)(batch, logp, values)


def test_clipping():
    c = settings("grpo", "policy.clip_low=0.2", "policy.clip_high=0.3", "policy.beta=0")
    ratio = jnp.asarray([[0.5, 0.9, 1.2, 1.5] * 2])
    batch = row(advantages=[2.0] * 4 + [-1.0] * 4)
    loss, slope, _ = gradients(c, batch, jnp.log(ratio))
    np.testing.assert_allclose(loss, [[-1, -1.8, -2.4, -2.6, 0.8, 0.9, 1.2, 1.5]], rtol=1e-6)
    np.testing.assert_allclose(slope, [[-1, -1.8, -2.4, 0, 0, 0.9, 1.2, 1.5]], rtol=1e-6)
    _, told = policy.token_loss(c, batch, jnp.log(ratio))
    np.testing.assert_array_equal(told["clip_share"], [[0, 0, 0, 1, 1, 0, 0, 0]])


def test_one_ratio_for_an_answer():
    c = settings("grpo", "policy.ratio=answer", "policy.beta=0", "policy.clip_high=9")
    batch = row(advantages=[1.0] * 4) | {"segment_ids": jnp.asarray([[1, 1, 2, 2]])}
    loss, slope, _ = gradients(c, batch, jnp.log(jnp.asarray([[4.0, 1.0, 1.0, 0.25]])))
    np.testing.assert_allclose(loss, [[-2, -2, -0.5, -0.5]], rtol=1e-6)
    np.testing.assert_allclose(slope, [[-2, -2, -0.5, -0.5]], rtol=1e-6)


def test_the_value_is_clipped_to_the_old_one():
    c = settings("ppo", "policy.value_clip=0.5", "policy.value_weight=0.1", "policy.beta=0")
    batch = row(values=[0.0] * 4, returns=[1.0, 1.0, -1.0, 0.25])
    # Farther from the old value and nearer to the return than its limit, 0.5: held back. Else its own error counts.
    values = jnp.asarray([[0.25, 0.8, 0.8, 0.75]])
    loss, _, slope = gradients(c, batch, jnp.zeros((1, 4)), values)
    np.testing.assert_allclose(loss, 0.05 * np.asarray([[0.75**2, 0.5**2, 1.8**2, 0.5**2]]), rtol=1e-5)
    np.testing.assert_allclose(slope, 0.1 * np.asarray([[-0.75, 0, 1.8, 0.5]]), rtol=1e-5)


@pytest.mark.parametrize("program", ["ppo", "grpo"])
def test_where_the_weight_is_0_nothing_is_read_and_nothing_learnt(program):
    c = settings(program, "policy.ratio=answer", f"rollout.importance_cap={CAP}")
    names = ("old", "sampler", "reference", "advantages", "values", "returns")
    clean, junk = (row(weights=[1.0, 0.0], **{name: [0.1, x] for name in names}) for x in (0.0, np.nan))
    logp = jnp.asarray([[-1.0, -2.0]])
    values = logp if program == "ppo" else None

    @tiny.jit
    def scaled(batch, *given):
        loss, told = policy.token_loss(c, batch, *given)
        return loss * policy.prepare(c, batch)["loss_scale"], told

    for batch in (clean, junk, clean | {"weights": jnp.zeros((1, 2))}):
        slopes = [x for x in gradients(c, batch, logp, values)[1:] if x is not None]
        loss, told = scaled(batch, logp, values)
        for x in (loss, *told.values(), *slopes):
            assert np.isfinite(x).all()
            assert x[0, 1] == 0
        assert bool(slopes[0][0, 0]) == bool(loss.any()) == bool(batch["weights"].any())


def test_beta_goes_up_above_the_target_and_down_below():
    c = settings("ppo", "policy.kl_target=0.1", "policy.kl_horizon=120")  # 24 answers a step
    for kl, factor in ((0.1, 1), (0.11, 1 + 0.1 / 5), (0.9, 1 + 0.2 / 5), (0.095, 1 - 0.05 / 5), (0.0, 1 - 0.2 / 5)):
        after = policy.adapted(c, {"beta": jnp.float32(0.3)}, {"kl": jnp.float32(kl)})
        assert float(after["beta"]) == pytest.approx(0.3 * factor, rel=1e-5)
    assert policy.make(OURS, c).running == {"beta": BETA}
    fixed = policy.make(OURS, settings("ppo"))
    assert fixed.adapt({"beta": 0.3}, {"kl": 9.0}) == {"beta": 0.3}
    assert policy.make(OURS, settings("grpo")).running == {}


def test_what_is_judged(rollouts):
    given, head = tiny_answers.batch(TEXTS, T, ROWS), {"value": VARIABLES["value"]}
    found = JUDGE[ROWS](VARIABLES, REFERENCE, given)
    turned = JUDGE[ROWS](REFERENCE | head, {"params": VARIABLES["params"]}, given)
    for x, name in ((found["old"], "now"), (turned["reference"], "now"), (found["values"], "new_values")):
        for got, want in zip(tiny_answers.by_answer(given, x), rollouts[name], strict=True):
            np.testing.assert_allclose(got, want, atol=2e-4, err_msg=name)
    np.testing.assert_allclose(turned["old"], found["reference"], atol=2e-4)
    assert np.abs(found["old"] - found["reference"]).max() > 0.1
    by_parts, mesh = settings("ppo", "loss.tile_tokens=32", microbatch_size=2), make_mesh(data=2, context=2)
    with jax.set_mesh(mesh):
        placed = sharding.to_global({n: np.asarray(x) for n, x in given.items()}, mesh, ROWS)
        parted = tiny.jit(policy.judge(OURS, by_parts))(VARIABLES, REFERENCE, placed)
    assert parted.keys() == {"old", "values", "reference"}
    for name, x in parted.items():
        np.testing.assert_allclose(x, found[name], atol=2e-4, err_msg=name)
    plain = jax.eval_shape(policy.judge(OURS, settings("grpo")), VARIABLES, None, given)
    assert {name: x.shape for name, x in plain.items()} == {"old": (ROWS, T)}


def test_shapes():
    mesh = make_mesh(data=2)
    tokens = set(base.token_shapes(settings(), mesh))
    found = policy.shapes(settings("ppo"), mesh)
    assert set(found) - tokens == {"advantages", "old", "sampler", "reference", "values", "returns", "figures"}
    assert found["figures"].shape == (ROWS, len(policy.FIGURES) + 2)
    assert {(x.shape, x.dtype.name, x.sharding) for n, x in found.items() if n not in tokens | {"figures"}} == {
        ((ROWS, T), "float32", sharding.batch_sharding(mesh))
    }
    plain = policy.shapes(settings("grpo", "policy.reference=False", "policy.beta=0"), mesh)
    assert set(plain) - tokens == {"advantages", "old", "sampler", "figures"}
    assert plain["figures"].shape == (ROWS, len(policy.FIGURES))
    assert policy.in_row(settings()) == PROMPTS * ANSWERS // ROWS


def test_updates_are_epochs_of_minibatches():
    made = policy.make(OURS, settings("ppo", "policy.epochs=3", "policy.minibatches=2"))
    assert (made.updates, made.passes, made.minibatches, made.heads) == (6, 3, 2, ("value",))
    made = policy.make(OURS, settings("grpo"))
    assert (made.updates, made.passes, made.heads) == (1, 1, ())


def stepped(given: dict, microbatch: int, mesh=None, **changes) -> tuple:
    """The metrics of one step of PPO, two epochs of two minibatches; the parameters and beta after it."""
    keys = ("policy.epochs=2", "policy.minibatches=2", "policy.kl_target=0.001", "loss.tile_tokens=32")
    c, mesh = settings("ppo", *keys, microbatch_size=microbatch), mesh or make_mesh()
    made = parts.make(c, mesh, policy.make)
    given = {name: np.asarray(x) for name, x in (given | changes).items()}
    with jax.set_mesh(mesh):
        state, frozen = made.create()
        placed = sharding.to_global(given, mesh, ROWS, {name: x.sharding for name, x in made.batch().items()})
        state, metrics = made.jit()(frozen, state, placed)
    return {name: float(x) for name, x in metrics.items()}, jax.device_get((state.params, state.running))


@pytest.fixture(scope="module")
def given(packed) -> dict:
    """A batch for a new model, whose log-probabilities are all alike."""
    spread = packed["old"] - jnp.mean(packed["old"], where=packed["weights"] > 0)
    old = -np.log(MODEL.vocab_size) + 0.1 * spread
    return packed | {"old": old, "sampler": old + 0.05, "reference": old + 0.3 * (packed["reference"] - packed["old"])}


@pytest.fixture(scope="module")
def whole(given):
    return stepped(given, ROWS)


def close(got: tuple, want: tuple) -> bool:
    same = all(got[0][name] == pytest.approx(value, rel=2e-4, abs=1e-5) for name, value in want[0].items())
    return same and tiny.difference(got[1], want[1]) < 1e-3


def test_microbatched_and_sharded_is_full_on_one_device(given, whole):
    assert close(stepped(given, 2, make_mesh(data=2, context=2)), whole)
    metrics, (params, running) = whole
    assert {"reward", "beta", "kl", "value_loss", "grad_norm/value_head"} <= metrics.keys()
    assert running["beta"] == pytest.approx(BETA * (1 + 0.2 * 24 / 10_000), rel=1e-5)
    assert np.abs(params["value"]["value_head"]["kernel"]).max() > 0
