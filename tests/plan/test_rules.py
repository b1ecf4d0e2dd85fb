"""The published rules and laws with their published constants; where a config departs from them, and what that costs."""

import dataclasses
import math
import re

import pytest

from jaxlm import config
from jaxlm.config import ConfigError, config_files
from jaxlm.plan import rules
from jaxlm.plan.rules import Run

STORY = Run(params=973_146_112, width=2048, tokens=11.8e9, batch=131_072)  # gpuburnout_1b without its embedding
QUICKSTART = Run(params=2.21e6, width=256, tokens=532_480, batch=1024)


def resolve(name: str, *overrides: str) -> config.Config:
    return config.resolve(config_files.load(name, ["workdir=w", *overrides]))


def test_what_the_rules_read_of_a_config():
    run = rules.of(resolve("gpuburnout_1b"))
    assert (run.width, run.batch, run.tokens) == (2048, 131_072, 90_000 * 131_072)
    assert run.params == STORY.params
    assert rules.of(resolve("gpuburnout_1b", "optim.schedule_steps=1200")).tokens == 1200 * 131_072
    untied = rules.of(resolve("gpuburnout_1b", "model.tie_embeddings=False", "model.vocab_size=64000"))
    assert untied.params == STORY.params


@pytest.mark.parametrize(("batch", "low", "high"), [(131_072, 4.0e-4, 7.1e-4), (262_144, 5.6e-4, 1.0e-3)])
def test_four_rules_for_adamw_at_one_billion(batch, low, high):
    run = dataclasses.replace(STORY, batch=batch)
    rates = rules.adamw_rates(run)
    assert len(rates) == 4
    assert (min(rates.values()), max(rates.values())) == (pytest.approx(low, rel=0.02), pytest.approx(high, rel=0.02))
    rule = rules.adamw_rate(run)
    assert rule.value == pytest.approx(5.47e-4 * (batch / 131_072) ** 0.5, rel=0.002)
    assert (rule.low, rule.high) == (min(rates.values()), max(rates.values()))


def test_the_laws_at_their_own_batch():
    """Step Law's page gives 8.6e-4 at 327k tokens for .97B on 11.8B; DeepSeek's 7B took 4.2e-4 at 2,304 rows of 4,096."""
    names = list(rules.ADAMW_LAWS)
    batches = [batch for _, batch in rules.ADAMW_LAWS.values()]
    at = dataclasses.replace(STORY, batch=batches[0](STORY))
    assert rules.adamw_rates(at)[names[0]] == pytest.approx(1.79 * STORY.params**-0.713 * STORY.tokens**0.307)
    assert at.batch == pytest.approx(327e3, rel=0.01)
    seven = Run(params=6.5e9, width=4096, tokens=2e12, batch=2304 * 4096)
    assert rules.adamw_rates(seven)[names[1]] == pytest.approx(4.2e-4, rel=0.05)
    assert batches[1](seven) == pytest.approx(2304 * 4096, rel=0.15)


def test_a_tuned_point_says_nothing_of_other_sizes():
    assert rules.MARIN not in rules.adamw_rates(QUICKSTART)
    assert rules.adamw_rates(dataclasses.replace(STORY, params=1.2e9, batch=2**20))[rules.MARIN] == 2e-3


def test_muons_rule():
    assert rules.muon_rate(QUICKSTART).value == pytest.approx(8e-3, rel=0.02)
    reference = Run(params=1e9, width=2048, tokens=6.5e9, batch=2**18)
    assert rules.muon_rate(reference).value == pytest.approx(6e-4)
    marin = rules.muon_rate(Run(params=1.2e9, width=1536, tokens=48e9, batch=2**20))
    assert marin.low == pytest.approx(4e-3 / (0.2 * 1536**0.5), rel=0.02)
    nanochat = rules.muon_rate(Run(params=4.35e8, width=1280, tokens=11.2e9, batch=2**19))
    assert nanochat.high == pytest.approx(0.02 / (0.2 * 1280**0.5), rel=0.02)


@pytest.mark.parametrize(
    ("run", "value"),
    [
        (STORY, 0.5 ** (131_072 / 36e6)),
        (QUICKSTART, 0.5 ** (1024 / 133_120)),  # a quarter of its tokens
        (Run(params=23.6e6, width=512, tokens=655e6, batch=8192), 0.5 ** (8192 / 10e6)),  # a small model
        (dataclasses.replace(STORY, batch=2**22), 0.95),
        (dataclasses.replace(STORY, batch=2048), 0.9995),
    ],
)
def test_b2_by_tokens(run, value):
    rule = rules.b2(run)
    assert rule.value == pytest.approx(value, abs=1e-9)
    assert rule.low <= rule.value <= rule.high


def test_the_half_life_of_the_first_story():
    assert rules.half_life(STORY, 0.95) == pytest.approx(1.77e6, rel=0.01)
    assert rules.half_life(STORY, rules.b2(STORY).value) == pytest.approx(36e6)
    assert rules.half_life(STORY, 0.0) == 0


def test_warmup_and_batch():
    assert rules.batch(STORY).value == rules.batch(STORY).low == pytest.approx(327e3, rel=0.01)
    assert rules.warmup(STORY).value == pytest.approx(STORY.params / 131_072)
    assert rules.warmup(QUICKSTART).value == 52  # a tenth
    assert rules.warmup(dataclasses.replace(STORY, tokens=1e12)).value == pytest.approx(0.01 * 1e12 / 131_072)


def test_zero_means_by_rule_and_what_it_comes_to_is_said():
    said = []
    c = rules.by_rule(resolve("quickstart", "optim.name=muon", "optim.lr=0", "optim.b2=0"), said.append)
    assert (c.optim.lr, c.optim.b2) == (0.00843, 0.99399)
    assert said[0].startswith("by rule: optim.lr 0.00843 (Moonlight")
    assert "published: 0.00548 to 0.0211" in said[0]
    assert said[1] == "by rule: optim.b2 0.99399 (marin issue 4567, arXiv:2507.07101)"
    assert said[2] == (
        "by rule: rates were fitted from about 50M parameters on, and this model has 1.77M without embeddings: "
        "try half and a quarter too (docs/recipe.md)"
    )
    said.clear()
    assert rules.by_rule(c, said.append) is c
    assert not said


def test_only_rates_of_small_models_are_doubted():
    said = []
    rules.by_rule(resolve("quickstart", "optim.b2=0"), said.append)
    rules.by_rule(resolve("gpuburnout_134m", "optim.lr=0"), said.append)
    rules.by_rule(resolve("quickstart", "optim.name=adamw", "optim.rates=('layers_.*/kernel 0',)"), said.append)
    assert len(said) == 3
    assert not any("were fitted from" in line for line in said)


def test_one_of_them_by_rule():
    c = rules.by_rule(resolve("gpuburnout_1b", "optim.b2=0"), lambda line: None)
    assert (c.optim.lr, c.optim.b2) == (3e-4, 0.99748)


def test_a_run_that_goes_on_keeps_its_values():
    said = []
    asked = resolve("quickstart", "optim.lr=0", "train.steps=5000")
    c = rules.by_rule(asked, said.append, {"lr": 0.001, "b2": 0.5})
    assert (c.optim.lr, c.optim.b2) == (0.001, asked.optim.b2)
    assert said == ["by rule, as this run began: optim.lr 0.001"]


def test_there_is_no_rule_for_weights_of_others():
    asked = dataclasses.replace(resolve("quickstart", "optim.lr=0"), origin="runs/other")
    with pytest.raises(ConfigError, match=r"begins with those of runs/other: give config\.optim\.lr"):
        rules.by_rule(asked, print)
    assert rules.by_rule(asked, print, {"lr": 0.002, "b2": 0.9}).optim.lr == 0.002  # a branch
    asked = dataclasses.replace(resolve("quickstart", "optim.rates=('layers_.*/kernel 0',)"), origin="runs/other")
    with pytest.raises(ConfigError, match=r"optim\.rates=0 is .*: give config\.optim\.rates"):
        rules.by_rule(asked, print)


@pytest.mark.parametrize("key", ["lr", "b2"])
def test_post_training_has_rates_of_its_own(key):
    with pytest.raises(ConfigError, match=rf"optim\.{key}=0 is by the rule for pretraining, and there is none for dpo"):
        resolve("dpo", f"optim.{key}=0")


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
    rule = rules.rate("adamw", rules.of(resolve("gpuburnout_1b"))).value
    assert ("optim.lr" in found("gpuburnout_1b", f"optim.lr={rule * factor}")) == departs


def test_by_rule_nothing_departs():
    assert not found("gpuburnout_1b", "optim.lr=0", "optim.b2=0", *LINEAR)
    assert not found("quickstart", "optim.name=muon", "optim.lr=0", "optim.b2=0", *LINEAR)


def test_of_two_rates_each_has_its_rule():
    by_rule = ("optim.name=muon", "optim.b2=0", *LINEAR)
    run = rules.of(config.resolve(config_files.load("gpuburnout_1b", ["workdir=w"])))
    lr, ratio = rules.adamw_rate(run).value, rules.muon_rate(run).value / rules.adamw_rate(run).value
    assert not found("gpuburnout_1b", *by_rule, f"optim.lr={lr}", f"optim.rates=('layers_.*/kernel {ratio}',)")
    there = found("gpuburnout_1b", *by_rule, f"optim.lr={lr}", f"optim.rates=('layers_.*/kernel {2 * ratio}',)")
    assert set(there) == {"optim.rates"}
    one = there["optim.rates"]
    assert (one["value"], one["rule"]["value"]) == (pytest.approx(2 * ratio), pytest.approx(ratio))
    assert re.match(r"the matrices' rate, [0-9.e-]+, is 2 times too high for muon by ", one["why"])
    assert one["nats"] == pytest.approx(0.026 * (math.log(2) / math.log(3)) ** 2)
    there = found("gpuburnout_1b", *by_rule, f"optim.lr={2 * lr}", f"optim.rates=('layers_.*/kernel {ratio}',)")
    assert set(there) == {"optim.lr"}  # mending that mends the matrices too
    assert there["optim.lr"]["value"] == pytest.approx(2 * lr)
    assert there["optim.lr"]["rule"]["value"] == pytest.approx(lr)
    assert "is 2 times too high for muon" in there["optim.lr"]["why"]  # most parameters are matrices
    assert there["optim.lr"]["nats"] == pytest.approx(one["nats"])
    # A ratio by rule puts the matrices where they belong, whatever lr is.
    there = found("gpuburnout_1b", *by_rule, f"optim.lr={lr / 3}", "optim.rates=('layers_.*/kernel 0',)")
    assert set(there) == {"optim.lr"}
    assert there["optim.lr"]["why"].startswith("3 times too low for embeddings, head and norms")
    assert (there["optim.lr"]["nats"], there["optim.lr"]["high"]) == (None, False)
    # And so does an lr by rule, whatever the ratio is.
    there = found("gpuburnout_1b", *by_rule, "optim.lr=0", f"optim.rates=('layers_.*/kernel {ratio / 3}',)")
    assert (set(there), there["optim.lr"]["high"]) == ({"optim.lr"}, False)
    # AdamW may have two rates too.
    (one,) = found(
        "gpuburnout_1b", "optim.lr=0", "optim.b2=0", "optim.rates=('layers_.*/kernel 10',)", *LINEAR
    ).values()
    assert (one["key"], one["high"]) == ("optim.rates", True)
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
    assert not lines("optim.lr=0", "optim.rates=('layers_.*/kernel .25',)")  # the matrices' rate is the rule's
    assert not lines("optim.name=adamw", "program=sft")
