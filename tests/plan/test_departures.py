"""Where a config departs from the published rules, and what that costs."""

import dataclasses
import math
import re

import pytest

from jaxlm import config
from jaxlm.config import config_files
from jaxlm.plan import rules


def found(name: str, *overrides: str) -> dict[str, dict]:
    c = config.resolve(config_files.load(name, ["workdir=w", *overrides]))
    return {d["key"]: d for d in rules.compare(rules.by_rule(c, lambda line: None))["departures"]}


LINEAR = ("optim.schedule=linear", "optim.final_lr_ratio=0")


def test_the_first_story_departs_in_three():
    there = found("gpuburnout_1b")
    assert set(there) == {"optim.lr", "optim.b2", "optim.final_lr_ratio"}
    rate = there["optim.lr"]
    assert rate["why"].startswith("1.8 times too low for adamw")
    assert (rate["value"], rate["rule"]["value"]) == (3e-4, pytest.approx(5.47e-4, rel=0.002))
    assert rate["nats"] == pytest.approx(0.0077, abs=2e-4)
    assert rate["tokens"][0] == pytest.approx(0.05, abs=0.01)
    assert "a half-life of 1.77M tokens in place of 36M" in there["optim.b2"]["why"]
    assert "8% to 15% of the tokens" in there["optim.b2"]["cost"]


def test_a_rate_three_times_too_low_costs_what_the_sweep_says():
    rule = rules.rate("adamw", rules.of(config.resolve(config_files.load("gpuburnout_1b", ["workdir=w"])))).value
    low, high = (found("gpuburnout_1b", f"optim.lr={rule * f}")["optim.lr"] for f in (1 / 3, 3))
    assert low["nats"] == high["nats"] == pytest.approx(0.026)
    assert low["tokens"][0] == pytest.approx(0.15, abs=0.01)
    assert "diverge" in high["cost"]
    assert "diverge" not in low["cost"]


@pytest.mark.parametrize(("factor", "departs"), [(1 / 1.6, True), (1 / 1.4, False), (1.4, False), (1.6, True)])
def test_half_as_much_again_is_where_it_begins(factor, departs):
    rule = rules.rate("adamw", rules.of(config.resolve(config_files.load("gpuburnout_1b", ["workdir=w"])))).value
    assert ("optim.lr" in found("gpuburnout_1b", f"optim.lr={rule * factor}")) == departs


def test_by_rule_nothing_departs():
    assert not found("gpuburnout_1b", "optim.lr=0", "optim.b2=0", *LINEAR)
    assert not found("quickstart", "optim.name=muon", "optim.lr=0", "optim.b2=0", *LINEAR)


def test_of_two_rates_each_has_its_rule():
    by_rule = ("optim.name=muon", "optim.b2=0", *LINEAR)
    run = rules.of(config.resolve(config_files.load("gpuburnout_1b", ["workdir=w"])))
    lr, ratio = rules.adamw_rate(run).value, rules.muon_rate(run).value / rules.adamw_rate(run).value
    assert not found("gpuburnout_1b", *by_rule, f"optim.lr={lr}", f"optim.matrix_lr_ratio={ratio}")
    there = found("gpuburnout_1b", *by_rule, f"optim.lr={lr}", f"optim.matrix_lr_ratio={2 * ratio}")
    assert set(there) == {"optim.matrix_lr_ratio"}
    one = there["optim.matrix_lr_ratio"]
    assert (one["value"], one["rule"]["value"]) == (pytest.approx(2 * ratio), pytest.approx(ratio))
    assert re.match(r"the matrices' rate, [0-9.e-]+, is 2 times too high for muon by ", one["why"])
    assert one["nats"] == pytest.approx(0.026 * (math.log(2) / math.log(3)) ** 2)
    there = found("gpuburnout_1b", *by_rule, f"optim.lr={2 * lr}", f"optim.matrix_lr_ratio={ratio}")
    assert set(there) == {"optim.lr"}  # mending that mends the matrices too
    assert (there["optim.lr"]["value"], there["optim.lr"]["rule"]["value"]) == (
        pytest.approx(2 * lr),
        pytest.approx(lr),
    )
    assert "is 2 times too high for muon" in there["optim.lr"]["why"]  # most parameters are matrices
    assert there["optim.lr"]["nats"] == pytest.approx(one["nats"])
    # A ratio by rule puts the matrices where they belong, whatever lr is.
    there = found("gpuburnout_1b", *by_rule, f"optim.lr={lr / 3}", "optim.matrix_lr_ratio=0")
    assert set(there) == {"optim.lr"}
    assert there["optim.lr"]["why"].startswith("3 times too low for embeddings, head and norms")
    assert (there["optim.lr"]["nats"], there["optim.lr"]["high"]) == (None, False)
    # And so does an lr by rule, whatever the ratio is.
    there = found("gpuburnout_1b", *by_rule, "optim.lr=0", f"optim.matrix_lr_ratio={ratio / 3}")
    assert (set(there), there["optim.lr"]["high"]) == ({"optim.lr"}, False)
    # AdamW may have two rates too.
    (one,) = found("gpuburnout_1b", "optim.lr=0", "optim.b2=0", "optim.matrix_lr_ratio=10", *LINEAR).values()
    assert (one["key"], one["high"]) == ("optim.matrix_lr_ratio", True)
    assert "10 times too high for adamw by Step Law" in one["why"]
    assert one["rule"]["value"] == pytest.approx(1)


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        (["train.batch_size=4096"], "train.batch_size", "8.39M tokens a step, 2.4 times the largest"),
        (["optim.warmup_steps=10"], "optim.warmup_steps", "shorter than 1%"),
        (["optim.warmup_steps=20000"], "optim.warmup_steps", "longer than 10%"),
        (["optim.schedule=constant"], "optim.schedule", "ends at 1 of the peak"),
        (["optim.schedule=wsd"], "optim.decay_fraction", "the last 20% of the steps"),
    ],
)
def test_other_keys(overrides, key, words):
    there = found("gpuburnout_1b", *LINEAR, *overrides)
    assert words in there[key]["why"]


def test_wsd_with_a_long_decay_to_0_is_a_rule_too():
    keys = ["optim.schedule=wsd", "optim.final_lr_ratio=0", "optim.decay_fraction=.5"]
    assert set(found("gpuburnout_1b", *keys)) == {"optim.lr", "optim.b2"}


def test_the_rules_are_for_new_weights_and_whole_schedules():
    c = config.resolve(config_files.load("gpuburnout_1b", ["workdir=w"]))
    assert rules.compare(dataclasses.replace(c, origin="runs/other")) is None
    assert rules.compare(dataclasses.replace(c, program="sft")) is None
    branch = dataclasses.replace(c, optim=dataclasses.replace(c.optim, decay_at_step=80_000))
    assert rules.compare(branch) is None


def test_a_rate_far_above_its_rule_is_told_where_training_begins():
    def lines(*overrides: str) -> list[str]:
        c = config.resolve(config_files.load("quickstart", ["workdir=w", *overrides]))
        return rules.too_high(rules.by_rule(c, lambda line: None))

    assert not lines()
    (line,) = lines("optim.name=adamw")
    assert line.startswith("optim.lr=0.01: 2.9 times too high for adamw by Step Law")
    assert not lines("optim.name=adamw", "optim.lr=1e-4")  # low is slow, and plan says so
    assert not lines("optim.lr=0", "optim.matrix_lr_ratio=.25")  # the matrices' rate is the rule's
    assert not lines("optim.name=adamw", "program=sft")
