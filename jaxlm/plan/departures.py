"""Says where a pretraining config departs from the published rules of `recipe`, and what published sweeps say that costs.

A rate, a half-life of b2, a batch or a warm-up departs if it is off by more than `FACTOR`. Costs are rough: sweeps of others,
on their models and data, read at our distance from the rule.
"""

import dataclasses
import math
import typing

from jaxlm.config import Config
from jaxlm.console import human
from jaxlm.plan import recipe, scaling
from jaxlm.plan.recipe import Rule, Run

FACTOR = 1.5
# A rate that is three times too low costs .026 nats at 1.2B (arXiv:2509.02046); log rates are taken to cost by their square.
RATE_NATS = 0.026 / math.log(3) ** 2
B2_TOKENS, B2_BATCH = (0.08, 0.15), 2**19  # of the tokens, with steps of up to so many tokens
FINAL_RATIO, FINAL_NATS, FINAL_TOKENS = 0.05, 0.02, (0.10, 0.15)  # a rate that ends at a tenth (arXiv:2502.15938)
DECAY, LEAST_DECAY = (0.5, 0.65), 0.33  # wsd: nanochat's shares of the steps, and what is well below them
_RATES = ("optim.lr", "optim.matrix_lr_ratio")
NOT_PRICED = "no published price"


@dataclasses.dataclass(frozen=True)
class Departure:
    """One key that is not as the rules have it.

    Attributes:
      key: the key, "optim.lr".
      value: its value.
      rule: what the rules say of it.
      why: how it differs, in words.
      cost: what that costs by published sweeps, in words.
      source: who says what it costs.
      nats: of the cost, the nats a token; None if nobody says.
      tokens: the share of the tokens that the rule would save, as (least, most); None if nobody says.
    """

    key: str
    value: float
    rule: Rule
    why: str
    cost: str
    source: str
    nats: float | None = None
    tokens: tuple[float, float] | None = None


def compare(config: Config) -> dict[str, typing.Any] | None:
    """Returns {"rules": name -> rule, "departures": [...]} as plain values; None where the rules do not hold.

    They hold for pretraining that begins with new weights, and for a whole schedule: not for a branch that decays.

    Args:
      config: a config whose rate and b2 are not left to the rule (`recipe.by_rule`).
    """
    if config.program != "pretrain" or config.origin or config.optim.decay_at_step:
        return None
    run = recipe.of(config)
    two = config.optim.name == "muon" and config.optim.matrix_lr_ratio != 1
    rules = {"lr": recipe.adamw_rate(run) if two else recipe.rate(config.optim.name, run)}
    rules |= {"matrix_lr_ratio": recipe.muon_rate(run).times(1 / rules["lr"].value)} if two else {}
    rules |= {"b2": recipe.b2(run), "batch_tokens": recipe.batch(run), "warmup_steps": recipe.warmup(run)}
    lr, ratio, rest = config.optim.lr, config.optim.matrix_lr_ratio, "embeddings, head and norms"
    if two:
        matrices = lr * ratio, recipe.muon_rate(run).value  # most of the parameters, so priced as one rate is
        found = [_rate(run, "optim.lr", lr, rules["lr"], rest)]
        found += [_rate(run, "optim.matrix_lr_ratio", ratio, rules["matrix_lr_ratio"], "the matrices", matrices)]
    else:
        found = [_rate(run, "optim.lr", lr, rules["lr"], config.optim.name, (lr, rules["lr"].value))]
    found += [_b2(config, run, rules["b2"]), _batch(run, rules["batch_tokens"])]
    found += [_warmup(config, rules["warmup_steps"]), _end(config), _decay(config)]
    return {
        "rules": {name: dataclasses.asdict(rule) for name, rule in rules.items()},
        "departures": [dataclasses.asdict(departure) for departure in found if departure],
    }


def too_high(config: Config) -> list[str]:
    """Returns a line for each rate that is well above its rule, where a run may diverge. Args as `compare`."""
    found = (compare(config) or {"departures": []})["departures"]
    high = [one for one in found if one["key"] in _RATES and one["value"] > one["rule"]["value"]]
    return [
        f"{one['key']}={one['value']:g} is {one['why']}: the run may diverge (jaxlm plan says more)" for one in high
    ]


def tokens_of(run: Run, nats: float) -> float:
    """Returns the share of the run's tokens that `nats` are worth at its end, by the re-fit of Chinchilla's law."""
    law = scaling.LAWS[-1]
    slope = law.beta * law.b / run.tokens**law.beta  # of the loss over the logarithm of the tokens
    return 1 - math.exp(-nats / slope)


def _off(value: float, rule: float) -> float:
    """By which factor a value is off; inf if it is 0."""
    return max(value / rule, rule / value) if value else math.inf


def _rate(
    run: Run, key: str, value: float, rule: Rule, whose: str, priced: tuple[float, float] | None = None
) -> Departure | None:
    """A rate, or the ratio of two. `priced`: a rate and the rule's, whose distance has the price; None if nobody says."""
    if not value or (priced and not priced[0]) or _off(value, rule.value) <= FACTOR:
        return None
    side = "low" if value < rule.value else "high"
    why = f"{_off(value, rule.value):.2g} times too {side} for {whose} by {rule.source}"
    if not priced:
        return Departure(key, value, rule, why, NOT_PRICED, rule.source)
    rate, best = priced
    nats = RATE_NATS * math.log(rate / best) ** 2
    share = tokens_of(run, nats)
    tokens = f", {share:.0%} of the tokens" if share >= 0.005 else ""  # of a run of few tokens
    cost = f"about {nats:.3f} nats{tokens}{'' if rate < best else '; it may diverge'}"
    source = "the sweep at 1.2B of arXiv:2509.02046"
    return Departure(key, value, rule, why, cost, source, nats, (share, share))


def _b2(config: Config, run: Run, rule: Rule) -> Departure | None:
    value = config.optim.b2
    if config.optim.name == "adafactor" or not value:
        return None
    ours, best = recipe.half_life(run, value), recipe.half_life(run, rule.value)
    if _off(ours, best) <= FACTOR:
        return None
    why = f"a half-life of {human(ours)} tokens in place of {human(best)}"
    if run.batch > B2_BATCH:
        return Departure("optim.b2", value, rule, why, "little with so large a batch", rule.source)
    cost = f"{B2_TOKENS[0]:.0%} to {B2_TOKENS[1]:.0%} of the tokens"
    return Departure("optim.b2", value, rule, why, cost, rule.source, tokens=B2_TOKENS)


def _batch(run: Run, rule: Rule) -> Departure | None:
    """A smaller batch than the rule's costs no tokens, so only a larger one departs, and that from the largest rule."""
    if run.batch <= FACTOR * rule.high:
        return None
    why = f"{human(run.batch)} tokens a step, {run.batch / rule.high:.2g} times the largest of the published rules"
    return Departure("train.batch_size", run.batch, rule, why, NOT_PRICED, rule.source)


def _warmup(config: Config, rule: Rule) -> Departure | None:
    value = config.optim.warmup_steps
    if rule.low / FACTOR <= value <= rule.high * FACTOR:
        return None
    short = value < rule.low
    why = "shorter than 1% of the steps" if short else "longer than 10% of the steps"
    return Departure("optim.warmup_steps", value, rule, why, f"{NOT_PRICED}{', but spikes' * short}", rule.source)


def _end(config: Config) -> Departure | None:
    o = config.optim
    ends = 1.0 if o.schedule == "constant" else o.final_lr_ratio
    if ends <= FINAL_RATIO:
        return None
    rule = Rule(0.0, 0.0, FINAL_RATIO, "arXiv:2502.15938")
    why = f"{o.schedule} ends at {ends:g} of the peak, and linear to 0 does better"
    cost = f"about {FINAL_NATS} nats, {FINAL_TOKENS[0]:.0%} to {FINAL_TOKENS[1]:.0%} of the tokens"
    if o.schedule == "constant":
        return Departure("optim.schedule", ends, rule, why, f"more than {cost}", rule.source)
    return Departure("optim.final_lr_ratio", ends, rule, why, cost, rule.source, FINAL_NATS, FINAL_TOKENS)


def _decay(config: Config) -> Departure | None:
    o = config.optim
    if o.schedule != "wsd" or o.decay_fraction >= LEAST_DECAY:
        return None
    rule = Rule(DECAY[0], *DECAY, "nanochat's settings")
    why = f"wsd decays over the last {o.decay_fraction:.0%} of the steps; {DECAY[0]:.0%} to {DECAY[1]:.0%} do better"
    return Departure("optim.decay_fraction", o.decay_fraction, rule, why, NOT_PRICED, rule.source)
