"""Each watch speaks where something is wrong, and stays silent where nothing is."""

import dataclasses
import math

import numpy as np
import pytest

from jaxlm import config
from jaxlm.config import config_files
from jaxlm.train import hooks, watches
from jaxlm.train.loop import REFUSED

CONFIG = config.resolve(config_files.load("base", ["data.path=x", "train.steps=400", "model.dtype=float32"]))
LN2 = math.log(2)
STEPS = 300
FIRST = {"loss": LN2, "margin": 0.0, "chosen_reward": 0.0, "rejected_reward": 0.0}
FIRST |= {"chosen_logp": -300.0, "rejected_logp": -280.0, "nll": 1.5}


def of(**keys):
    return dataclasses.replace(CONFIG.dpo, **keys)


def said(row, **series) -> list[str]:
    """The lines of a watch that sees `STEPS` steps: metrics by name, a value or a function of the step."""
    lines: list[str] = []
    watch = watches.SaysOnce(row, lines.append)
    for step in range(1, STEPS + 1):
        assert watch(step, {name: x(step) if callable(x) else x for name, x in series.items()}) is None
    return lines


def noise(seed: int, size: float):
    values = np.random.default_rng(seed).normal(0, size, STEPS + 1)
    return lambda step: float(values[step])


@pytest.mark.parametrize(
    ("keys", "own"),
    [
        ({"loss": "sigmoid"}, LN2),
        ({"loss": "sigmoid", "label_smoothing": 0.1}, LN2),
        ({"loss": "robust", "label_smoothing": 0.1}, LN2),
        ({"loss": "ipo", "beta": 0.2}, 1 / (4 * 0.2**2)),
        ({"loss": "sigmoid", "nll_weight": 0.5}, LN2 + 0.5 * 1.5),
    ],
)
def test_a_run_ends_whose_reference_is_not_its_policy(keys, own):
    watch = watches.FirstStep(of(**keys), 1e-4)
    good = FIRST | {"loss": own}
    assert watch(1, good) is None
    for wrong in ({"margin": 0.5}, {"chosen_reward": 2.0, "rejected_reward": 2.0}, {"loss": own + 0.1}):
        ending = watch(1, good | wrong)
        assert (ending.code, ending.keep) == (REFUSED, False)
        assert "the reference is not the policy" in ending.why
        assert watch(2, good | wrong) is None  # then they part, as they should


def test_rounding_is_no_difference():
    assert watches.FirstStep(of(), 5e-3)(1, FIRST | {"margin": 0.01, "loss": LN2 - 0.005}) is None
    assert watches.FirstStep(of(), 1e-4)(1, FIRST | {"margin": 0.01, "loss": LN2 - 0.005}).code == REFUSED


def test_losses_without_a_reference_have_no_first_value():
    reads = lambda loss: [  # noqa: E731
        w.reads for w in watches.of_dpo(dataclasses.replace(CONFIG, dpo=of(loss=loss)), print)
    ]
    without = [row.reads for row in (watches.falling(of()), watches.ONLY_LENGTH, watches.SWAPPED)]
    assert reads("sigmoid") == [(), PINNED.reads, *without]
    assert reads("orpo") == reads("simpo") == without


PINNED = watches.pinned(LN2, ("chosen_reward", "rejected_reward"), 400)


MOVED = {"loss": LN2, "lr": 1e-6, "update_norm": 1e-4, "chosen_reward": 0.2, "rejected_reward": 0.2}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "it can't tell chosen from rejected answers; look at the data"),
        ({"update_norm": 0.0, "chosen_reward": 0.0, "rejected_reward": 0.0}, "no update has changed anything"),
        ({"chosen_reward": 1e-5, "rejected_reward": 1e-5}, "hardly moved; raise optim.lr, which is 1e-06"),
    ],
)
def test_a_loss_that_stays_where_it_began(changes, words):
    (line,) = said(PINNED, **MOVED | changes)
    assert line.startswith("step 100: the loss stays at 0.6931, where it began")
    assert words in line


def test_a_loss_that_falls_is_not_pinned():
    assert said(PINNED, **MOVED | {"loss": lambda step: LN2 - 0.002 * step}) == []


def test_the_cross_entropy_beside_the_loss_does_not_hide_that_it_is_pinned():
    row = watches.pinned(LN2, ("chosen_reward",), 400, nll_weight=0.5)
    nll = lambda step: 2 - 0.003 * step  # noqa: E731
    given = MOVED | {"nll": nll}
    assert len(said(row, **given | {"loss": lambda step: LN2 + 0.5 * nll(step)})) == 1
    assert said(row, **given | {"loss": lambda step: LN2 / 2 + 0.5 * nll(step)}) == []


def test_chosen_answers_that_become_less_likely():
    falls = {"chosen_logp": -300.0, "nll": 1.5}
    (line,) = said(watches.falling(of()), **falls, chosen_reward=lambda step: -0.05 * step)
    assert "the chosen answers become less likely too: their log-probability fell by" in line
    rises = {"chosen_reward": lambda step: 0.05 * step}
    assert said(watches.falling(of()), **falls, **rises) == []
    assert said(watches.falling(of()), **falls, chosen_reward=-0.5) == []  # 5 nats of 300


def test_without_a_reference_they_are_compared_with_the_first_steps():
    simpo = of(loss="simpo", beta=2.0)
    given = {"chosen_logp": -300.0, "nll": 1.5}
    assert said(watches.falling(simpo), **given, chosen_reward=-3.0) == []
    falls = {"chosen_reward": lambda step: -3.0 - 0.01 * step}
    assert len(said(watches.falling(simpo), **given, **falls)) == 1


def test_a_margin_that_is_only_length():
    length, other = noise(0, 20), noise(1, 0.3)
    follows = {"length_margin": length, "margin": lambda step: 0.01 * step + 0.05 * length(step) + 0.1 * other(step)}
    (line,) = said(watches.ONLY_LENGTH, **follows)
    assert "little but length (correlation 1.00)" in line
    assert "prefer the longer answer" in line
    shorter = follows | {"margin": lambda step: -follows["margin"](step)}
    assert "prefer the shorter answer" in said(watches.ONLY_LENGTH, **shorter)[0]
    mixed = follows | {"margin": lambda step: 0.01 * length(step) + 5 * other(step)}
    assert said(watches.ONLY_LENGTH, **mixed) == []
    tiny = follows | {"margin": lambda step: 1e-4 * length(step)}  # nothing is learnt yet
    assert said(watches.ONLY_LENGTH, **tiny) == []
    assert said(watches.ONLY_LENGTH, length_margin=0.0, margin=noise(2, 1)) == []  # all pairs of one length


def test_pairs_that_are_ranked_the_wrong_way():
    around = noise(3, 0.1)
    (line,) = said(watches.SWAPPED, accuracy=lambda step: 0.4 + around(step))
    assert "fewer than half: are chosen and rejected swapped?" in line
    assert said(watches.SWAPPED, accuracy=lambda step: 0.5 + around(step)) == []
    assert said(watches.SWAPPED, accuracy=0.5) == []


def test_held_out_pairs_that_are_ranked_the_wrong_way():
    base = {"val/base/bits_per_byte": 1.0}
    remarks = hooks.Remarks(1.0, 0.0, pairs=100)
    more, lines = remarks(50, base | {"val/accuracy": 0.3})
    assert more == {"val/base/change": 0.0}
    assert lines[0].startswith("the base's own text: 1.0000 bits per byte")
    assert "30% of the held-out pairs are ranked as labelled, fewer than half" in lines[1]
    assert len(remarks(50, base | {"val/accuracy": 0.45})[1]) == 1  # of 100 pairs that is chance
    assert remarks(0, {"val/accuracy": 0.3})[1] == []
    assert remarks(50, {})[1] == []


def test_the_reward_models_watches():
    lines: list[str] = []
    watching = watches.of_reward(CONFIG, lines.append)
    record = {"loss": LN2, "lr": 1e-5, "update_norm": 0.1, "score": 0.3, "margin": 0.0, "length_margin": 1.0}
    for step in range(1, STEPS + 1):
        for watch in watching:
            watch(step, record | {"accuracy": 0.5})
    assert len(lines) == 1
    assert "it can't tell chosen from rejected" in lines[0]
