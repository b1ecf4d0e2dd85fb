"""Says where a pretraining config departs from the published rules of `recipe`, and what published sweeps say that costs.

A rate, a half-life of b2, a batch or a warm-up departs if it is off by more than `FACTOR`. Costs are rough: sweeps of others,
on their models and data, read at our distance from the rule.
"""

import dataclasses
import math
import typing
from collections.abc import Iterator

from jaxlm.config import Config, OptimConfig
from jaxlm.host.console import human
from jaxlm.plan import recipe, scaling
from jaxlm.plan.recipe import Rule, Run

FACTOR = 1.5
# A rate that is three times too low costs .026 nats at 1.2B (arXiv:2509.02046); log rates are taken to cost by their square.
RATE_NATS = 0.026 / math.log(3) ** 2
B2_TOKENS, B2_BATCH = (0.08, 0.15), 2**19  # of the tokens, with steps of up to so many tokens
FINAL_RATIO, FINAL_NATS, FINAL_TOKENS = 0.05, 0.02, (0.10, 0.15)  # a rate that ends at a tenth (arXiv:2502.15938)
DECAY, LEAST_DECAY = (0.5, 0.65), 0.33  # wsd: nanochat's shares of the steps, and what is well below them
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
      high: True for a rate above its rule that most parameters have: the run may diverge.
    """

    key: str
    value: float
    rule: Rule
    why: str
    cost: str
    source: str
    nats: float | None = None
    tokens: tuple[float, float] | None = None
    high: bool = False


def compare(config: Config) -> dict[str, typing.Any] | None:
    """Returns {"rules": name -> rule, "departures": [...]} as plain values; None where the rules do not hold.

    They hold for pretraining that begins with new weights, and for a whole schedule: not for a branch that decays.

    Args:
      config: a config whose rate and b2 are not left to the rule (`recipe.by_rule`).
    """
    if config.program != "pretrain" or config.origin or config.optim.decay_at_step:
        return None
    run, o = recipe.of(config), config.optim
    rules = _rate_rules(o, run)
    others = {"b2": recipe.b2(run), "batch_tokens": recipe.batch(run), "warmup_steps": recipe.warmup(run)}
    departures = [*_rates(o, run, rules), *_others(config, run, others), *_shape(o)]
    return {
        "rules": {name: dataclasses.asdict(rule) for name, rule in (rules | others).items()},
        "departures": [dataclasses.asdict(departure) for departure in departures],
    }


def too_high(config: Config) -> list[str]:
    """Returns a line for the rate of most parameters if it is well above its rule: the run may diverge. Args as `compare`."""
    rows = (compare(config) or {"departures": []})["departures"]
    return [
        f"{one['key']}={one['value']:g}: {one['why']}, {one['rule']['value']:.3g} there, and the run may diverge (jaxlm plan)"
        for one in rows
        if one["high"]
    ]


def tokens_of(run: Run, nats: float) -> float:
    """Returns the share of the run's tokens that `nats` are worth at its end, by the re-fit of Chinchilla's law."""
    law = scaling.LAWS[-1]
    slope = law.beta * law.b / run.tokens**law.beta  # of the loss over the logarithm of the tokens
    return 1 - math.exp(-nats / slope)


def _off(value: float, rule: float) -> float:
    """By which factor a value is off; inf if it is 0."""
    return max(value / rule, rule / value) if value else math.inf


def _rate_rules(o: OptimConfig, run: Run) -> dict[str, Rule]:
    """The rules of `lr` and, where the layers' matrices have a rate of their own, of `matrix_lr_ratio`."""
    if o.matrix_lr_ratio == 1:
        return {"lr": recipe.rate(o.name, run)}
    lr = recipe.adamw_rate(run)  # of embeddings, head and norms, whatever the matrices' optimizer is
    return {"lr": lr, "matrix_lr_ratio": recipe.rate(o.name, run).times(1 / lr.value)}


def _rates(o: OptimConfig, run: Run, rules: dict[str, Rule]) -> Iterator[Departure]:
    """What departs of `lr` and `matrix_lr_ratio`.

    The rate of most parameters has the price: with two rates that of the matrices, their product. It stands by the key that is
    farther off on the same side.
    """
    values = {key: getattr(o, key) for key in rules}
    rate, rule = math.prod(values.values()), math.prod(rules[key].value for key in rules)
    key, two = "", len(rules) > 1
    if rate and _off(rate, rule) > FACTOR:
        high = rate > rule
        key = max(rules, key=lambda key: (values[key] / rules[key].value) * (1 if high else -1))
        whose = f"the matrices' rate, {rate:.3g}, is " if two else ""
        source = recipe.rate(o.name, run).source
        why = f"{whose}{_off(rate, rule):.2g} times too {'high' if high else 'low'} for {o.name} by {source}"
        nats = RATE_NATS * math.log(rate / rule) ** 2
        share = tokens_of(run, nats)
        tokens = f", {share:.0%} of the tokens" if share >= 0.005 else ""  # of a run of few tokens
        cost = f"about {nats:.3f} nats{tokens}{'; it may diverge' if high else ''}"
        whence = "the sweep at 1.2B of arXiv:2509.02046"
        yield Departure(f"optim.{key}", values[key], rules[key], why, cost, whence, nats, (share, share), high)
    lr = rules["lr"]
    if two and o.lr and key != "lr" and _off(o.lr, lr.value) > FACTOR:
        why = f"{_off(o.lr, lr.value):.2g} times too {'high' if o.lr > lr.value else 'low'} for embeddings, head and norms"
        yield Departure("optim.lr", o.lr, lr, f"{why} by {lr.source}", NOT_PRICED, lr.source)


def _others(config: Config, run: Run, rules: dict[str, Rule]) -> Iterator[Departure]:
    """What departs of b2, batch and warm-up."""
    b2, batch, warmup = rules["b2"], rules["batch_tokens"], rules["warmup_steps"]
    ours, best = recipe.half_life(run, config.optim.b2), recipe.half_life(run, b2.value)
    if config.optim.name != "adafactor" and config.optim.b2 and _off(ours, best) > FACTOR:
        why = f"a half-life of {human(ours)} tokens in place of {human(best)}"
        cost, tokens = "little with so large a batch", None
        if run.batch <= B2_BATCH:
            cost, tokens = f"{B2_TOKENS[0]:.0%} to {B2_TOKENS[1]:.0%} of the tokens", B2_TOKENS
        yield Departure("optim.b2", config.optim.b2, b2, why, cost, b2.source, tokens=tokens)
    # A smaller batch than the rule's costs no tokens, so only a larger one departs, and that from the largest rule.
    if run.batch > FACTOR * batch.high:
        why = f"{human(run.batch)} tokens a step, {run.batch / batch.high:.2g} times the largest of the published rules"
        yield Departure("train.batch_size", run.batch, batch, why, NOT_PRICED, batch.source)
    steps = config.optim.warmup_steps
    if not warmup.low / FACTOR <= steps <= warmup.high * FACTOR:
        short = steps < warmup.low
        why, spikes = (
            "shorter than 1% of the steps" if short else "longer than 10% of the steps",
            ", but spikes" * short,
        )
        yield Departure("optim.warmup_steps", steps, warmup, why, f"{NOT_PRICED}{spikes}", warmup.source)


def _shape(o: OptimConfig) -> Iterator[Departure]:
    """What departs of the schedule: where it ends, and how long it decays."""
    constant = o.schedule == "constant"
    ends = 1.0 if constant else o.final_lr_ratio
    if ends > FINAL_RATIO:
        rule = Rule(0.0, 0.0, FINAL_RATIO, "arXiv:2502.15938")
        why = f"{o.schedule} ends at {ends:g} of the peak, and linear to 0 does better"
        cost = f"about {FINAL_NATS} nats, {FINAL_TOKENS[0]:.0%} to {FINAL_TOKENS[1]:.0%} of the tokens"
        if constant:
            yield Departure("optim.schedule", ends, rule, why, f"more than {cost}", rule.source)
        else:
            yield Departure("optim.final_lr_ratio", ends, rule, why, cost, rule.source, FINAL_NATS, FINAL_TOKENS)
    if o.schedule == "wsd" and o.decay_fraction < LEAST_DECAY:
        rule = Rule(DECAY[0], *DECAY, "nanochat's settings")
        why = (
            f"wsd decays over the last {o.decay_fraction:.0%} of the steps; {DECAY[0]:.0%} to {DECAY[1]:.0%} do better"
        )
        yield Departure("optim.decay_fraction", o.decay_fraction, rule, why, NOT_PRICED, rule.source)
