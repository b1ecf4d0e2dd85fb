"""The published rules with their published constants, and what they make of a config."""

import dataclasses

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
    rules.by_rule(resolve("quickstart", "optim.name=adamw", "optim.matrix_lr_ratio=0"), said.append)
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
    asked = dataclasses.replace(resolve("quickstart", "optim.matrix_lr_ratio=0"), origin="runs/other")
    with pytest.raises(ConfigError, match=r"optim\.matrix_lr_ratio=0 is .*: give config\.optim\.matrix_lr_ratio"):
        rules.by_rule(asked, print)


@pytest.mark.parametrize("key", ["lr", "b2"])
def test_post_training_has_rates_of_its_own(key):
    with pytest.raises(ConfigError, match=rf"optim\.{key}=0 is by the rule for pretraining, and there is none for dpo"):
        resolve("dpo", f"optim.{key}=0")
