"""Preference pairs: packed = pair by pair, microbatched = full, sharded = one device; formulas; the reference."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models as tiny
import tiny_pairs
from tiny_steps import make_mesh

from jaxlm import config, config_files, models, sharding
from jaxlm.objectives import dpo
from jaxlm.step import parts

MODEL = dataclasses.replace(tiny.model_config(), attention="xla")
OURS = models.build(MODEL, "xla")
T, ROWS = 64, 8
LOSSES = ("sigmoid", "ipo", "hinge", "robust", "sigmoid_norm", "apo_zero", "orpo", "simpo")
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


def sums(objective, variables=VARIABLES, given=None):
    return tiny.jit(lambda v, b: objective.sums(v, objective.prepare(b), None))(variables, given or batch())


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
        "hinge": max(0.0, 1 - margin),
        "ipo": (by_token - 1 / (2 * c.beta)) ** 2,
        "sigmoid_norm": -log_sigmoid(c.beta * by_token),
        "apo_zero": 1 / (1 + math.exp(c.beta * (pc - rc))) + 1 / (1 + math.exp(-c.beta * (pr - rr))),
    }[name]


@pytest.mark.parametrize("name", LOSSES)
def test_packed_is_pair_by_pair_and_the_formula(name):
    keys = [f"dpo.loss={name}", "dpo.beta=0.3", "dpo.nll_weight=0.5"]
    keys += ["dpo.label_smoothing=0.2"] if name in ("sigmoid", "robust") else []
    keys += ["dpo.margin=0.4"] if name == "simpo" else []
    c = settings(*keys)
    found = sums(dpo.make(OURS, c))
    assert float(found.weight) == len(PAIRS)
    losses, nll, tokens = [], 0.0, 0
    for pair in PAIRS:
        alone = tiny_pairs.batch([pair], T, 1)
        (policy,), (reference,) = (np.asarray(LOGP(v, alone), np.float64) for v in (VARIABLES, OTHER))
        sides = [(policy[side], reference[side]) for side in (0, 1)]
        losses.append(by_hand(name, c.dpo, *sides, [len(answer) for answer in pair[1:]]))
        nll, tokens = nll - policy[0], tokens + len(pair[1])
    weight = 0.5 + (name == "orpo")
    want = np.mean(losses) + weight * nll / tokens
    np.testing.assert_allclose(float(found.loss) / len(PAIRS), want, rtol=1e-4)
    np.testing.assert_allclose(float(found.metrics["nll"]) / len(PAIRS), nll / tokens, rtol=1e-4)


def test_metrics_are_means_over_pairs():
    found = sums(dpo.make(OURS, settings("dpo.beta=0.3")))
    means = {name: float(x) / len(PAIRS) for name, x in found.metrics.items()}
    alone = [tiny_pairs.batch([pair], T, 1) for pair in PAIRS]
    policy, reference = (np.stack([np.asarray(LOGP(v, b))[0] for b in alone]) for v in (VARIABLES, OTHER))
    rewards = 0.3 * (policy - reference)
    margins = rewards[:, 0] - rewards[:, 1]
    assert means == {
        "margin": pytest.approx(margins.mean(), rel=1e-4),
        "accuracy": pytest.approx((margins > 0).mean()),
        "chosen_reward": pytest.approx(rewards[:, 0].mean(), rel=1e-4),
        "rejected_reward": pytest.approx(rewards[:, 1].mean(), rel=1e-4),
        "chosen_logp": pytest.approx(policy[:, 0].mean(), rel=1e-4),
        "rejected_logp": pytest.approx(policy[:, 1].mean(), rel=1e-4),
        "length_margin": pytest.approx(np.mean([len(c) - len(r) for _, c, r in PAIRS])),
        "nll": pytest.approx(means["nll"]),
    }


@pytest.mark.parametrize("name", [name for name in LOSSES if name not in ("orpo", "simpo")])
def test_a_policy_that_is_its_reference_has_margins_0_and_the_loss_of_its_own(name):
    c = settings(f"dpo.loss={name}", "dpo.beta=0.2")
    given = batch()
    found = sums(dpo.make(OURS, c), OTHER, given)
    assert float(found.metrics["margin"]) == pytest.approx(0, abs=1e-4)
    assert float(found.loss / found.weight) == pytest.approx(dpo.at_start(c.dpo), rel=1e-5)
    own = {"ipo": 1 / (4 * 0.2**2), "hinge": 1, "apo_zero": 1}.get(name, math.log(2))
    assert dpo.at_start(c.dpo) == pytest.approx(own)
    assert float(sums(dpo.make(OURS, c), VARIABLES, given).loss / found.weight) != pytest.approx(own, rel=1e-4)


def stepped(rows: int, mesh=None, **changes) -> tuple:
    """The metrics of one step, and the parameters after it."""
    c = settings("dpo.nll_weight=0.5", batch_size=ROWS, microbatch_size=rows)
    mesh = mesh or make_mesh()
    made = parts.make(c, mesh, dpo.make)
    given = {name: np.asarray(x) for name, x in (batch() | changes).items()}
    with jax.set_mesh(mesh):
        state, frozen = made.create()
        placed = sharding.to_global(given, mesh, ROWS, {name: x.sharding for name, x in made.batch().items()})
        state, metrics = made.jit()(frozen, state, placed)
    return {name: float(x) for name, x in metrics.items()}, jax.device_get(state.params)


@pytest.fixture(scope="module")
def whole():
    return stepped(ROWS)


def close(got: tuple, want: tuple) -> bool:
    same = all(got[0][name] == pytest.approx(value, rel=2e-4, abs=1e-5) for name, value in want[0].items())
    return same and tiny.difference(got[1], want[1]) < 1e-3


def test_microbatched_is_full(whole):
    assert close(stepped(2), whole)


@pytest.mark.parametrize("sizes", [{"data": 2, "fsdp": 2, "tensor": 2}, {"data": 4, "context": 2}])
def test_sharded_is_one_device(whole, sizes):
    assert close(stepped(ROWS, make_mesh(**sizes)), whole)


def test_other_pairs_or_another_reference_are_another_step(whole):
    given = batch()
    assert not close(stepped(ROWS, pair=given["pair"].at[0, 0].set(0)), whole)
    assert not close(stepped(ROWS, reference=given["reference"] + jnp.arange(8)), whole)


def test_the_cross_entropy_is_a_mean_over_the_tokens_of_all_microbatches():
    given, objective = batch(), dpo.make(OURS, settings("dpo.nll_weight=100.0"))
    halves = [{name: x[half] for name, x in given.items()} for half in (slice(0, 1), slice(1, ROWS))]
    apart = [sums(objective, given=half) for half in halves]  # each with a mean of its own
    assert float(apart[0].loss + apart[1].loss) != pytest.approx(float(sums(objective, given=given).loss), rel=1e-5)


def test_which_losses_need_judged_references():
    assert dpo.judged(settings())
    assert dpo.judged(settings("adapter.kind=prompt"))
    assert dpo.judged(settings("adapter.kind=lora", "origin_merge=False"))
    assert not dpo.judged(settings("adapter.kind=lora"))
    assert not dpo.judged(settings("dpo.loss=orpo"))
    mesh = make_mesh()
    assert dpo.shapes(settings(), mesh)["reference"].shape == (ROWS, 2)
    assert "reference" not in dpo.shapes(settings("dpo.loss=simpo"), mesh)
