"""The published laws with their published constants."""

import math

import pytest

from jaxlm.plan import rules

HOFFMANN, REFIT = rules.LAWS


def test_chinchilla_itself():
    """70B parameters on 1.4T tokens: the loss that the paper's fit gives, the tokens that the re-fit agrees with."""
    assert HOFFMANN.loss(70e9, 1.4e12) == pytest.approx(1.937, abs=0.002)
    assert REFIT.loss(70e9, 1.4e12) == pytest.approx(1.973, abs=0.002)
    assert REFIT.optimal_tokens(70e9) == pytest.approx(20 * 70e9, rel=0.25)
    assert HOFFMANN.optimal_tokens(70e9) > 2 * REFIT.optimal_tokens(70e9)  # the paper's third approach wants more data


@pytest.mark.parametrize("law", rules.LAWS)
def test_the_optimum_is_one(law):
    """At the same 6ND no split of the budget gives less loss."""
    n = 1e9
    d = law.optimal_tokens(n)
    best = law.loss(n, d)
    for factor in (0.8, 0.95, 1.05, 1.25):
        assert law.loss(n * factor, d / factor) > best
    # Away from the optimum the same test fails, as it must.
    assert min(law.loss(n * f, 2 * d / f) for f in (0.8, 1.25)) < law.loss(n, 2 * d)


def test_where_a_plan_stands():
    s = rules.stand(1e9, 20e9, 32_000)
    assert (s["tokens_per_param"], s["optimal_tokens"]) == (20, 20e9)
    assert s["low"] < min(s["loss_by_law"].values()) < s["loss"] < max(s["loss_by_law"].values()) < s["high"]
    assert rules.stand(1e9, 40e9, 32_000)["loss"] < s["loss"]


def test_no_loss_is_worse_than_guessing():
    far = rules.stand(3.3e6, 532e3, 4096)
    assert [far[key] for key in ("loss", "low", "high", "loss_by_law")] == [None, None, None, {}]
    near = rules.stand(34e6, 16e6, 4096)
    assert max(near["loss_by_law"].values()) < near["high"] == math.log(4096)
