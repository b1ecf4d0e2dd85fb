"""What is said of a policy that learns from rewards."""

import numpy as np
import pytest

from jaxlm import config
from jaxlm.config import config_files
from jaxlm.train import watches

FINE = {"reward": 0.5, "reward_std": 0.4, "flat_groups": 0.2, "top_word": 0.05, "answer_tokens": 20.0, "entropy": 1.0}
FINE |= {"unique": 0.9, "kl": 0.01, "sampler_gap": 1e-5, "truncated": 0.0}


def make(program="grpo", **keys):
    keys = {"reward.function": "a:b", "train.batch_size": 64, "data.path": "x"} | keys
    overrides = [f"program={program}", *(f"{name}={value}" for name, value in keys.items())]
    return config.resolve(config_files.load("base", overrides))


def said(records, program="grpo", **keys):
    """(step, line) of what is said about records, given as what differs from FINE."""
    lines, step = [], 0
    watching = watches.of_policy(make(program, **keys), lambda: "very", lambda line: lines.append((step, line)))
    for step, record in enumerate(records, 1):
        for watch in watching:
            assert watch(step, FINE | record) is None
    return lines


def test_a_run_in_which_all_is_well_is_told_nothing():
    rng = np.random.default_rng(0)
    noisy = [{name: value * rng.uniform(0.9, 1.1) for name, value in FINE.items()} for _ in range(200)]
    assert said(noisy) == []


def test_a_reward_that_is_always_the_same_is_told_within_three_steps():
    ((step, line),) = said([{"reward_std": 0.0, "flat_groups": 1.0, "reward": 1.0}] * 4)
    assert step == 3
    assert "all answers of 3 steps earned the same, 1: no gradient" in line


def test_groups_without_differences():
    ((step, line),) = said([{"flat_groups": 1.0}] * 4)
    assert step == 3
    assert "no two answers to one prompt" in line
    assert said([{"flat_groups": 1.0}, {"flat_groups": 1.0}, {"flat_groups": 0.9}] * 3) == []
    assert said([{"flat_groups": 1.0}] * 4, "ppo") == []  # it compares nothing within groups


@pytest.mark.parametrize(("rewards", "told"), [(np.linspace(0, 10, 50), True), (np.linspace(10, 0, 50), False)])
def test_a_word_that_fills_the_answers(rewards, told):
    shares = np.linspace(0.02, 0.9, 50)
    lines = said([{"reward": r, "top_word": s} for r, s in zip(rewards, shares, strict=True)])
    assert bool(lines) == told
    if told:
        assert 'one word, "very", went from 6% to ' in lines[0][1]
        assert lines[0][0] < 50


def test_a_reward_that_follows_length():
    lengths = np.linspace(20, 60, 40)
    ((_, line),) = said([{"answer_tokens": n, "reward": n / 10} for n in lengths])
    assert "the reward follows the answers' length (correlation 1.00), which went from 22 to " in line
    rng = np.random.default_rng(0)
    assert said([{"answer_tokens": n, "reward": 0.3 + rng.uniform()} for n in lengths]) == []


def test_entropy_that_collapses():
    ((_, line),) = said([{"entropy": x, "unique": 0.1} for x in np.linspace(1, 0.01, 40)])
    assert "the entropy fell from 0.949 to " in line
    assert "10% of the answers are different" in line


def test_a_policy_that_runs_away():
    ((_, line),) = said([{"kl": x} for x in np.linspace(0, 2, 40)])
    assert "nats a token from where it began (KL)" in line
    assert said([{"kl": 2.0}] * 20, **{"policy.reference": False}) == []


def test_a_sampler_that_differs_is_told_at_once():
    ((step, line),) = said([{}, {"sampler_gap": 0.06}, {}])
    assert step == 2
    assert "sampler and trainer differ by 0.06 nats a token" in line
    assert said([{"sampler_gap": 0.049}] * 5) == []


def test_answers_that_do_not_end():
    ((_, line),) = said([{"truncated": 0.8}] * 10)
    assert "80% of the answers do not end within rollout.max_new_tokens=256" in line


def test_first_lines():
    lines = watches.first_lines(make(**{"policy.epochs": 2, "policy.minibatches": 4}))
    assert "8 prompts x 8 answers of at most 256 tokens, then 8 updates" in lines[0]
    assert "a loss of about 0.0 is normal here" in lines[1]
    assert len(watches.first_lines(make("ppo"))) == 1
