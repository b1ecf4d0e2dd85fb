"""Preference pairs: packed = pair by pair, microbatched = full, sharded = one device; formulas; the reference."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models as tiny
import tiny_pairs
from tiny_steps import make_mesh

from jaxlm import config, models
from jaxlm.config import config_files
from jaxlm.devices import sharding
from jaxlm.models import adapters
from jaxlm.step import parts
from jaxlm.step.objectives import dpo

MODEL = tiny.model_config(n_layers=1, attention="xla")
OURS = models.build(MODEL, "xla")
T, ROWS = 64, 8
LOSSES = ("sigmoid", "ipo", "robust", "orpo", "simpo")
PAIRS = tiny_pairs.random_pairs(11, MODEL.vocab_size, 20)
VARIABLES = {"params": tiny.random_params(OURS)}
OTHER = {"params": tiny.random_params(OURS, seed=1)}
LOGP = tiny.jit(lambda v, b: dpo.answer_logp(OURS, v, b, 0))


def settings(*keys: str, **train) -> config.Config:
    made = config.resolve(config_files.load("base", ["data.path=x", f"train.seq_len={T}", *keys]))
    sizes = {"batch_size": ROWS, "microbatch_size": ROWS} | train
    return dataclasses.replace(made, program="dpo", model=MODEL, train=dataclasses.replace(made.train, **sizes))


def batch(pairs=PAIRS, rows: int = ROWS) -> dict:
    """Pairs in rows of which most hold several, with the log-probabilities of `OTHER`."""
    made = tiny_pairs.batch(pairs, T, rows, room=4)
    return made | {"reference": LOGP(OTHER, made)}


def by_hand(name: str, c, chosen, rejected, tokens) -> float:
    """The losses of the papers, in plain Python; (log p, reference's log p) of each side."""

    def log_sigmoid(x):
        return -math.log1p(math.exp(-x))

    (pc, rc), (pr, rr), (nc, nr) = chosen, rejected, tokens
    margin = c.beta * ((pc - rc) - (pr - rr))
    by_token = (pc - rc) / nc - (pr - rr) / nr
    flipped = c.label_smoothing
    both = (-(1 - flipped) * log_sigmoid(margin), -flipped * log_sigmoid(-margin))
    if name in ("orpo", "simpo"):
        odds = [math.exp(p / n) / (1 - math.exp(p / n)) for p, n in ((pc, nc), (pr, nr))]
        if name == "orpo":
            return -c.beta * log_sigmoid(math.log(odds[0] / odds[1]))
        return -log_sigmoid(c.beta * (pc / nc - pr / nr) - c.margin)
    return {
        "sigmoid": sum(both),
        "robust": (both[0] - both[1]) / (1 - 2 * flipped),
        "ipo": (by_token - 1 / (2 * c.beta)) ** 2,
    }[name]


def keys_of(name: str) -> list[str]:
    keys = [f"dpo.loss={name}", "dpo.beta=0.3", "dpo.nll_weight=0.5"]
    keys += ["dpo.label_smoothing=0.2"] if name in ("sigmoid", "robust") else []
    return keys + (["dpo.margin=0.4"] if name == "simpo" else [])


@pytest.fixture(scope="module")
def of_all():
    """(variables, batch) -> the sums of every loss, compiled once."""
    objectives = {name: dpo.make(OURS, settings(*keys_of(name))) for name in LOSSES}
    return tiny.jit(lambda v, b: {name: o.sums(v, o.prepare(b), None) for name, o in objectives.items()})


@pytest.fixture(scope="module")
def alone():
    """log p of both answers of each pair, which has a row of its own: the policy's and the reference's, [11, 2]."""
    rows = tiny_pairs.batch(PAIRS, T, len(PAIRS), room=1, apart=True)
    return tuple(np.asarray(LOGP(variables, rows), np.float64) for variables in (VARIABLES, OTHER))


def test_packed_is_pair_by_pair_and_the_formulas(of_all, alone):
    sums_of = of_all(VARIABLES, batch())
    policy, reference = alone
    tokens = np.asarray([[len(answer) for answer in pair[1:]] for pair in PAIRS])
    nll = -policy[:, 0].sum() / tokens[:, 0].sum()
    for name, found in sums_of.items():
        assert float(found.weight) == len(PAIRS)
        c = settings(*keys_of(name)).dpo
        losses = [
            by_hand(name, c, *zip(policy[pair], reference[pair], strict=True), tokens[pair])
            for pair in range(len(PAIRS))
        ]
        want = np.mean(losses) + (0.5 + (name == "orpo")) * nll
        np.testing.assert_allclose(float(found.loss) / len(PAIRS), want, rtol=1e-4, err_msg=name)
        np.testing.assert_allclose(float(found.metrics["nll"]) / len(PAIRS), nll, rtol=1e-4)


def test_metrics_are_means_over_pairs(of_all, alone):
    found = of_all(VARIABLES, batch())
    means = {name: float(x) / len(PAIRS) for name, x in found["sigmoid"].metrics.items()}
    policy, reference = alone
    rewards = 0.3 * (policy - reference)
    margins = rewards[:, 0] - rewards[:, 1]
    assert means == {
        "margin": pytest.approx(margins.mean(), rel=1e-3),
        "accuracy": pytest.approx((margins > 0).mean()),
        "predicted": pytest.approx((1 / (1 + np.exp(-margins))).mean(), rel=1e-3),
        "chosen_reward": pytest.approx(rewards[:, 0].mean(), rel=1e-3),
        "rejected_reward": pytest.approx(rewards[:, 1].mean(), rel=1e-3),
        "chosen_logp": pytest.approx(policy[:, 0].mean(), rel=1e-4),
        "rejected_logp": pytest.approx(policy[:, 1].mean(), rel=1e-4),
        "length_margin": pytest.approx(np.mean([len(c) - len(r) for _, c, r in PAIRS])),
        "nll": pytest.approx(means["nll"]),
    }
    tokens = np.asarray([[len(answer) for answer in pair[1:]] for pair in PAIRS])
    by_token = (rewards / tokens).mean(0)
    assert float(found["ipo"].metrics["chosen_reward"]) / len(PAIRS) == pytest.approx(by_token[0], rel=1e-3)


def test_a_policy_that_is_its_reference_has_margins_0_and_the_loss_of_its_own(of_all):
    own = {"ipo": 1 / (4 * 0.3**2)}
    given = batch()
    same, other = of_all(OTHER, given), of_all(VARIABLES, given)
    for name in (name for name in LOSSES if name not in ("orpo", "simpo")):
        begins = dpo.at_start(settings(*keys_of(name)).dpo)
        assert begins == pytest.approx(own.get(name, math.log(2)))
        assert float(same[name].metrics["margin"]) == pytest.approx(0, abs=1e-4)
        losses = [float(found[name].loss - 0.5 * found[name].metrics["nll"]) / len(PAIRS) for found in (same, other)]
        assert losses[0] == pytest.approx(begins, rel=1e-4)
        assert losses[1] != pytest.approx(begins, rel=1e-3)


@functools.cache
def step_of(rows: int, **mesh):
    made = parts.make(settings("dpo.nll_weight=0.5", microbatch_size=rows), make_mesh(**mesh), dpo.make)
    return made, made.jit()


def stepped(made: parts.Parts, program, **changes) -> tuple:
    """The metrics of one step, and the parameters after it."""
    given = {name: np.asarray(x) for name, x in (batch() | changes).items()}
    with jax.set_mesh(made.mesh):
        state, frozen = made.create()
        placed = sharding.to_global(given, made.mesh, ROWS, {name: x.sharding for name, x in made.batch().items()})
        state, metrics = program(frozen, state, placed)
    return {name: float(x) for name, x in metrics.items()}, jax.device_get(state.params)


@pytest.fixture(scope="module")
def whole():
    return stepped(*step_of(ROWS))


def close(got: tuple, want: tuple) -> bool:
    same = all(got[0][name] == pytest.approx(value, rel=2e-4, abs=1e-5) for name, value in want[0].items())
    return same and tiny.difference(got[1], want[1]) < 1e-3


def test_microbatched_and_sharded_is_full_on_one_device(whole):
    assert close(stepped(*step_of(4, data=2, fsdp=2, context=2)), whole)


def test_other_pairs_or_another_reference_are_another_step(whole):
    given = batch()
    assert not close(stepped(*step_of(ROWS), pair=given["pair"].at[0, 0].set(0)), whole)
    assert not close(stepped(*step_of(ROWS), reference=given["reference"] + jnp.arange(8)), whole)


def test_the_cross_entropy_is_a_mean_over_the_tokens_of_all_microbatches():
    given, objective = batch(), dpo.make(OURS, settings("dpo.nll_weight=100.0"))
    loss = tiny.jit(lambda b: objective.sums(VARIABLES, objective.prepare(b), None).loss)
    halves = [{name: x[half] for name, x in given.items()} for half in (slice(0, 4), slice(4, ROWS))]
    apart = sum(float(loss(half)) for half in halves)  # each with a mean of its own
    assert apart != pytest.approx(float(loss(given)), rel=1e-5)


def test_which_losses_need_judged_references():
    assert dpo.judged(settings())
    assert dpo.judged(settings("adapter.kind=prompt"))
    assert dpo.judged(settings("adapter.kind=lora", "origin_merge=False"))
    assert not dpo.judged(settings("adapter.kind=lora"))
    assert not dpo.judged(settings("dpo.loss=orpo"))
    mesh = make_mesh()
    assert dpo.shapes(settings(), mesh)["reference"].shape == (ROWS, 2)
    assert "reference" not in dpo.shapes(settings("dpo.loss=simpo"), mesh)


def test_the_frozen_part_is_the_reference_of_an_adapter():
    given, rng = batch(), np.random.default_rng(4)
    adapter = adapters.of(settings("adapter.kind=lora", "adapter.rank=2").adapter, (1, 7))
    model = adapter.attach(OURS)
    shapes = jax.eval_shape(lambda: adapter.init(model, jax.random.key(0)))
    trained = jax.tree.map(lambda x: jnp.asarray(0.2 * rng.normal(size=x.shape), jnp.float32), shapes)
    alone = dpo.make(model, settings("adapter.kind=lora", "dpo.nll_weight=0.5"))
    judged = dpo.make(model, settings("adapter.kind=lora", "dpo.nll_weight=0.5", "origin_merge=False"))
    reference = given | {"reference": LOGP(VARIABLES, given)}

    def loss(objective):
        def of(trained, given):
            return objective.sums({"params": VARIABLES["params"]} | trained, objective.prepare(given), None).loss

        return tiny.jit(jax.value_and_grad(of))

    got, want = loss(alone)(trained, given), loss(judged)(trained, reference)
    assert float(got[0]) == pytest.approx(float(want[0]), rel=1e-5)
    assert tiny.difference(got[1], want[1]) < 1e-4
    assert float(loss(judged)(trained, given)[0]) != pytest.approx(float(want[0]), rel=1e-3)  # another reference
