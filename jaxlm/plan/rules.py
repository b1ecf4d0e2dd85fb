"""Published rules for a pretraining run, where a config departs from them and what that costs, and scaling laws.

A rule returns the value that jaxlm takes, and the range of the published rules. `optim.lr=0` and `optim.b2=0` in a
config mean "by rule": `by_rule` fills them in. Tokens are those of the schedule. Parameters are counted without embeddings,
positions and an untied head. All rates are for a decay towards 0 and a model that begins with new weights. The constants are
as published, none fitted by us, for models of 50M to several billion parameters: for the quickstart they extrapolate far.

The scaling laws are L(N, D) = E + A / N^alpha + B / D^beta, in nats per token OF THEIR OWN TOKENIZER AND TEXT (MassiveText,
32,000 ids). Compare two plans by them, never a plan with a loss that you have measured.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator

from jaxlm.config import BY_RULE, Config, ConfigError, OptimConfig
from jaxlm.host.console import Say, human
from jaxlm.plan.flops import params_by_component

# b2: the half-life of the second moment in tokens. Sweeps find 25M to 70M best, from 100M parameters on.
HALF_LIFE, HALF_LIFE_SPAN = 36e6, (25e6, 70e6)
SMALL, SMALL_HALF_LIFE = 35e6, 10e6  # parameters up to which the half-life is shorter, and that half-life
MOST_OF_RUN = 0.25  # of the run's tokens: a half-life longer than this would still weigh the run's beginning at its end
B2_SPAN = (0.95, 0.9995)
MUON_SPAN = (0.65, 2.5)  # published rates for Muon, as multiples of the rule
WARMUP_SPAN = (0.01, 0.10)  # of the steps
FITTED_FROM = 50e6  # about the fewest parameters on which the laws of the rates were fitted


@dataclasses.dataclass(frozen=True)
class Run:
    """The figures of a run that the rules read. `params`: of the layers; `tokens`: of the schedule; `batch`: tokens a step."""

    params: float
    width: int
    tokens: float
    batch: float


@dataclasses.dataclass(frozen=True)
class Rule:
    """The value that jaxlm takes, and the lowest and highest of the published rules."""

    value: float
    low: float
    high: float
    source: str

    def times(self, factor: float) -> "Rule":
        return dataclasses.replace(self, value=self.value * factor, low=self.low * factor, high=self.high * factor)


ONE_RATE = Rule(1.0, 1.0, 1.0, "AdamW has one rate")


def of(config: Config) -> Run:
    """Returns a config's figures for the rules. The tokens are those of `optim.schedule_steps`, if that is set."""
    by, batch = params_by_component(config.model), config.train.batch_size * config.train.seq_len
    steps = config.optim.schedule_steps or config.train.steps
    return Run(by["attn"] + by["mlp"] + by["norm"], config.model.d_model, steps * batch, batch)


# ---------------------------------------------------------------------------------------------------------------------
# Rates

# AdamW: source -> (the rate at the law's own batch, that batch in tokens). DeepSeek's laws are in C = 6ND; Porian's rate is
# for 20 tokens a parameter.
ADAMW_LAWS: dict[str, tuple[Callable[[Run], float], Callable[[Run], float]]] = {
    "Step Law, arXiv:2503.04715": (
        lambda run: 1.79 * run.params**-0.713 * run.tokens**0.307,
        lambda run: 0.58 * run.tokens**0.571,
    ),
    "DeepSeek LLM, arXiv:2401.02954": (
        lambda run: 0.3118 * (6 * run.params * run.tokens) ** -0.125,
        lambda run: 0.2920 * (6 * run.params * run.tokens) ** 0.3271,
    ),
    "Porian et al., arXiv:2406.19146": (lambda run: 3.7 * run.params**-0.36, lambda run: 0.7576 * run.params**0.703),
}
MARIN = "Marin's 1.2B, arXiv:2509.02046"


def adamw_rates(run: Run) -> dict[str, float]:
    """Returns AdamW's rate by each published rule, scaled by the root of the ratio of batches (arXiv:2205.10287).

    Marin's is one tuned point (2e-3 at 2^20 tokens a step), used only for models near its size.
    """
    rates = {name: rate(run) * math.sqrt(run.batch / batch(run)) for name, (rate, batch) in ADAMW_LAWS.items()}
    return rates | ({MARIN: 2e-3 * math.sqrt(run.batch / 2**20)} if 0.6e9 <= run.params <= 2.4e9 else {})


def adamw_rate(run: Run) -> Rule:
    return _first(adamw_rates(run))


def muon_rate(run: Run) -> Rule:
    """Returns Muon's rate for updates scaled by .2 sqrt(max(inputs, outputs)): 6e-4 (2048/d) (6.5e9/D)^.35 (B/262144)^.5.

    The rule passes through published points; it is no fit. At d 2048 and 6.5B tokens Moonlight's law says 5.5e-4 for this
    scale of updates (arXiv:2502.16982). The exponents are those of Marin's sweeps (-.28 to -.40 for D, .5 for B; issue 5818 of
    marin-community/marin). Rates tuned for other scales, converted: Marin's 1.2B (4e-3 at d 1536, 48B tokens, 2^20 a step:
    5.1e-4) is .65 of the rule, nanochat's (.02 at d 1280, 11.2B tokens, 2^19 a step: 2.8e-3) 2.5 times it.
    """
    rate = 6e-4 * (2048 / run.width) * (6.5e9 / run.tokens) ** 0.35 * math.sqrt(run.batch / 2**18)
    return Rule(rate, *(share * rate for share in MUON_SPAN), "Moonlight's rate at 1B, scaled (arXiv:2502.16982)")


def rate(name: str, run: Run) -> Rule:
    """Returns the rate for `optim.name`. Adafactor's and 8-bit AdamW's are AdamW's, as their updates have its size."""
    return muon_rate(run) if name == "muon" else adamw_rate(run)


def b2(run: Run) -> Rule:
    """Returns b2 = .5^(B/H), in [.95, .9995]: the second moment forgets half in H tokens, whatever the batch.

    H is 36M tokens, 10M for up to 35M parameters; at most a quarter of the run's tokens (issue 4567 of marin-community/marin,
    whose best b2 are half-lives of 25M to 70M tokens; arXiv:2507.07101 for small batches).
    """
    half_lives = (SMALL_HALF_LIFE,) * 3 if run.params <= SMALL else (HALF_LIFE, *HALF_LIFE_SPAN)
    value, low, high = (b2_of(run, tokens) for tokens in half_lives)
    return Rule(value, low, high, "marin issue 4567, arXiv:2507.07101")


def b2_of(run: Run, half_life: float) -> float:
    return min(max(0.5 ** (run.batch / min(half_life, MOST_OF_RUN * run.tokens)), B2_SPAN[0]), B2_SPAN[1])


def half_life(run: Run, value: float) -> float:
    """Returns the tokens in which a second moment of this b2 forgets half; 0 for b2 = 0, inf for 1."""
    return run.batch * math.log(0.5) / math.log(value) if 0 < value < 1 else math.inf * value if value else 0.0


def batch(run: Run) -> Rule:
    """Returns the batch in tokens by Step Law. A smaller one costs no tokens if rate and b2 are adapted (arXiv:2507.07101)."""
    return _first({name: batch(run) for name, (_, batch) in ADAMW_LAWS.items()})


def _first(rules: dict[str, float]) -> Rule:
    """Returns the first published rule; its interval spans all of them."""
    source = next(iter(rules))
    return Rule(rules[source], min(rules.values()), max(rules.values()), source)


def warmup(run: Run) -> Rule:
    """Returns the steps of the warm-up: as many tokens as parameters (arXiv:2406.19146), but 1% to 10% of the steps."""
    steps = run.tokens / run.batch
    low, high = (share * steps for share in WARMUP_SPAN)
    return Rule(min(max(run.params / run.batch, low), high), low, high, "arXiv:2406.19146")


# ---------------------------------------------------------------------------------------------------------------------
# A config


def by_rule(config: Config, say: Say, begun: dict[str, float] | None = None) -> Config:
    """Returns the config with rates and b2 by rule where they are 0, or with the values of `begun` if the run has begun.

    Says these values. Raises ConfigError if a rate is 0 and a new run begins with other weights: no rule is known for it.
    """
    o = config.optim
    left = {key: rule for key, rule in _rules(o).items() if not getattr(o, key)}
    if not left:
        return config
    if begun:
        values = {key: begun[key] for key in left}
        said = (f"optim.{BY_RULE[key]} {value:.4g}" for key, value in values.items())
        say(f"by rule, as this run began: {', '.join(said)}")
        return dataclasses.replace(config, optim=_filled(o, values))
    if config.origin and (unruled := [BY_RULE[key] for key in left if key != "b2"]):
        raise ConfigError(
            f"optim.{unruled[0]}=0 is the rule for new weights, but this model begins with those of "
            f"{config.origin}: give config.optim.{unruled[0]}"
        )
    run = of(config)
    rules = {key: rule(run) for key, rule in left.items()}
    for key, rule in rules.items():
        best, low, high = (f"{rounded(key, number):g}" for number in (rule.value, rule.low, rule.high))
        published = f"; published: {low} to {high}" if low != high else ""
        say(f"by rule: optim.{BY_RULE[key]} {best} ({rule.source}{published})")
    if run.params < FITTED_FROM and any(key != "b2" and rule is not ONE_RATE for key, rule in rules.items()):
        say(
            f"by rule: rates were fitted from about {human(FITTED_FROM)} parameters on, and this model has {human(run.params)} "
            "without embeddings: try half and a quarter too (docs/recipe.md)"
        )
    values = {key: rounded(key, rule.value) for key, rule in rules.items()}
    return dataclasses.replace(config, optim=_filled(o, values))


def _filled(o: OptimConfig, values: dict[str, float]) -> OptimConfig:
    keys = {BY_RULE[key]: o.with_matrices(x) if key == "matrix_lr_ratio" else x for key, x in values.items()}
    return dataclasses.replace(o, **keys)


def _rules(o: OptimConfig) -> dict[str, Callable[[Run], Rule]]:
    """Returns key -> its rule. With Muon and a ratio by rule, `lr` is AdamW's rate, and `lr` times the ratio is Muon's."""
    if o.name != "muon" or o.matrix_lr_ratio:
        ratio = o.matrix_lr_ratio if o.name == "muon" else 1.0
        return {"lr": lambda run: rate(o.name, run).times(1 / ratio), "matrix_lr_ratio": lambda run: ONE_RATE, "b2": b2}

    def of_matrices(run: Run) -> Rule:
        return muon_rate(run).times(1 / (o.lr or adamw_rate(run).value))

    return {"lr": adamw_rate, "matrix_lr_ratio": of_matrices, "b2": b2}


def rounded(key: str, value: float) -> float:
    """Returns a value as it is printed, so that a person who types it gets the same run."""
    return round(value, 5) if key == "b2" else float(f"{value:.3g}")


# ---------------------------------------------------------------------------------------------------------------------
# Scaling laws

# The span of the two laws is widened on both sides by this share of their mean. The laws' own residuals are near 1%, but
# other data and tokenizers move losses by much more.
UNCERTAINTY = 0.10


@dataclasses.dataclass(frozen=True)
class Law:
    """L(N, D) = e + a / N^alpha + b / D^beta."""

    name: str
    e: float
    a: float
    b: float
    alpha: float
    beta: float

    def loss(self, params: float, tokens: float) -> float:
        return self.e + self.a / params**self.alpha + self.b / tokens**self.beta

    def optimal_tokens(self, params: float) -> float:
        """Returns the number of tokens D for which `params` is the best N at a budget of 6ND FLOPs."""
        return (self.beta * self.b / (self.alpha * self.a) * params**self.alpha) ** (1 / self.beta)


LAWS = (
    Law("Hoffmann et al. 2022, approach 3 (arXiv:2203.15556)", 1.69, 406.4, 410.7, 0.34, 0.28),
    Law("Besiroglu et al. 2024, re-fit (arXiv:2404.10102)", 1.8172, 482.01, 2085.43, 0.3478, 0.3658),
)
TOKENS_PER_PARAM = 20.0  # the rule of thumb that Hoffmann et al.'s approaches 1 and 2 come to


def stand(params: float, tokens: float, vocab_size: int) -> dict:
    """Returns what the laws predict for training `params` parameters on `tokens` tokens, as plain values.

    Repeated tokens count as new ones, which is accurate up to about 4 epochs (arXiv:2305.16264). `optimal_tokens` are by the
    rule of 20 tokens a parameter. `loss` is the mean of the laws' final losses; `low` and `high` are the lowest and highest,
    moved apart by UNCERTAINTY times the mean, `high` at most to uniform guessing. The three are None if a law's loss is worse
    than guessing: then the plan is far outside of the laws' range.
    """
    losses = {law.name: law.loss(params, tokens) for law in LAWS}
    mean, guessing = sum(losses.values()) / len(losses), math.log(vocab_size)
    span = min(losses.values()) - UNCERTAINTY * mean, min(max(losses.values()) + UNCERTAINTY * mean, guessing)
    known = max(losses.values()) < guessing
    return {
        "tokens_per_param": tokens / params,
        "optimal_tokens": TOKENS_PER_PARAM * params,
        "optimal_by_law": {law.name: law.optimal_tokens(params) for law in LAWS},
        "loss_by_law": losses if known else {},
        **dict(zip(("loss", "low", "high"), (mean, *span) if known else (None,) * 3, strict=True)),
    }


def growth_pays_from(small: float, large: float, tokens: float) -> float:
    """Returns the tokens on which a model of `small` parameters must have been trained, so that to grow it pays, by the laws.

    Growth pays if `tokens` more on `large` parameters end lower than the same FLOPs on the small model. The large model is
    taken to begin at the small one's loss, as far as tokens of its own would have brought it.
    """

    def gain(begun: float) -> float:
        """Returns the mean over the laws of how much lower the larger model ends."""
        gains = []
        for law in LAWS:
            left = law.loss(small, begun) - law.e - law.a / large**law.alpha
            ahead = (law.b / left) ** (1 / law.beta)
            gains.append(law.loss(small, begun + tokens * large / small) - law.loss(large, ahead + tokens))
        return sum(gains) / len(gains)

    low, high = math.log(small * 1e-3), math.log(small * 1e6)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if gain(math.exp(middle)) > 0 else (middle, high)
    return math.exp(high)


# ---------------------------------------------------------------------------------------------------------------------
# What departs from the rules

FACTOR = 1.5
# A rate that is three times too low costs .026 nats at 1.2B (arXiv:2509.02046); the cost is taken as quadratic in the log rate.
RATE_NATS = 0.026 / math.log(3) ** 2
B2_TOKENS, B2_BATCH = (0.08, 0.15), 2**19  # a b2 off its rule costs this share of the tokens, at up to so many a step
FINAL_RATIO, FINAL_NATS, FINAL_TOKENS = 0.05, 0.02, (0.10, 0.15)  # a rate that ends at a tenth (arXiv:2502.15938)
DECAY, LEAST_DECAY = (0.5, 0.65), 0.33  # wsd: nanochat's shares of the steps, and what is well below them
NOT_PRICED = "no published price"


@dataclasses.dataclass(frozen=True)
class Departure:
    """One key that departs from the rules.

    Attributes:
      cost, source: the cost in words, and the published sweep that it is from; nats: the cost in nats, if published.
      tokens: the share of the tokens that the rule would save, as (least, most), if published.
      high: True if it is the rate of most parameters, and above its rule: the run may diverge.
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


def compare(config: Config) -> dict | None:
    """Returns {"rules": name -> rule, "departures": [...]} as plain values; None where the rules do not apply.

    They apply to pretraining from new weights over a whole schedule, not to a branch that decays. A rate, a half-life of b2,
    a batch or a warm-up departs if it is off by more than FACTOR. Costs are rough: from published sweeps on other models and
    data, at our distance from the rule. `by_rule` must have set all rates and b2.
    """
    if config.program != "pretrain" or config.origin or config.optim.decay_at_step:
        return None
    run, o = of(config), config.optim
    rules = _rate_rules(o, run)
    others = {"b2": b2(run), "batch_tokens": batch(run), "warmup_steps": warmup(run)}
    departures = [*_rates(o, run, rules), *_others(config, run, others), *_shape(o)]
    return {
        "rules": {name: dataclasses.asdict(rule) for name, rule in (rules | others).items()},
        "departures": [dataclasses.asdict(departure) for departure in departures],
    }


def too_high(config: Config) -> list[str]:
    """Returns a line for the rate of most parameters if it is well above its rule: the run may diverge."""
    rows = (compare(config) or {"departures": []})["departures"]
    words = "{key}={value:g}: {why}, which gives {rule[value]:.3g}, and the run may diverge (jaxlm plan)"
    return [words.format(**row) for row in rows if row["high"]]


def tokens_of(run: Run, nats: float) -> float:
    """Returns the share of the run's tokens that `nats` are worth at its end, by the re-fit of Chinchilla's law."""
    law = LAWS[-1]
    slope = law.beta * law.b / run.tokens**law.beta  # of the loss over the logarithm of the tokens
    return 1 - math.exp(-nats / slope)


def _off(value: float, rule: float) -> float:
    return max(value / rule, rule / value) if value else math.inf


def _rate_rules(o: OptimConfig, run: Run) -> dict[str, Rule]:
    """Returns the rules of `lr` and, where the layers' matrices have a rate of their own, of `matrix_lr_ratio`."""
    if o.matrix_lr_ratio == 1:
        return {"lr": rate(o.name, run)}
    lr = adamw_rate(run)  # of embeddings, head and norms, whatever the matrices' optimizer is
    return {"lr": lr, "matrix_lr_ratio": rate(o.name, run).times(1 / lr.value)}


def _rates(o: OptimConfig, run: Run, rules: dict[str, Rule]) -> Iterator[Departure]:
    """Yields departures of `lr` and `matrix_lr_ratio`. Two are priced by their product, under the key that is farther off."""
    values = {key: getattr(o, key) for key in rules}
    own, rule = math.prod(values.values()), math.prod(rules[key].value for key in rules)
    key, two = "", len(rules) > 1
    if own and _off(own, rule) > FACTOR:
        high = own > rule
        key = max(rules, key=lambda key: (values[key] / rules[key].value) * (1 if high else -1))
        whose = f"the matrices' rate, {own:.3g}, is " if two else ""
        source = rate(o.name, run).source
        why = f"{whose}{_off(own, rule):.2g} times too {'high' if high else 'low'} for {o.name} by {source}"
        nats = RATE_NATS * math.log(own / rule) ** 2
        share = tokens_of(run, nats)
        tokens = f", {share:.0%} of the tokens" if share >= 0.005 else ""  # of a run of few tokens
        cost = f"about {nats:.3f} nats{tokens}{'; it may diverge' if high else ''}"
        whence = "the sweep at 1.2B of arXiv:2509.02046"
        yield Departure(f"optim.{BY_RULE[key]}", values[key], rules[key], why, cost, whence, nats, (share, share), high)
    lr = rules["lr"]
    if two and o.lr and key != "lr" and _off(o.lr, lr.value) > FACTOR:
        why = f"{_off(o.lr, lr.value):.2g} times too {'high' if o.lr > lr.value else 'low'} for embeddings, head and norms"
        yield Departure("optim.lr", o.lr, lr, f"{why} by {lr.source}", NOT_PRICED, lr.source)


def _others(config: Config, run: Run, rules: dict[str, Rule]) -> Iterator[Departure]:
    """Yields the departures of b2, batch and warm-up."""
    half, largest, least = (rules[name] for name in ("b2", "batch_tokens", "warmup_steps"))
    ours, best = half_life(run, config.optim.b2), half_life(run, half.value)
    if config.optim.name != "adafactor" and config.optim.b2 and _off(ours, best) > FACTOR:
        why = f"a half-life of {human(ours)} tokens in place of {human(best)}"
        cost, tokens = "little with so large a batch", None
        if run.batch <= B2_BATCH:
            cost, tokens = f"{B2_TOKENS[0]:.0%} to {B2_TOKENS[1]:.0%} of the tokens", B2_TOKENS
        yield Departure("optim.b2", config.optim.b2, half, why, cost, half.source, tokens=tokens)
    # A smaller batch than the rule's costs no tokens, so only one above the largest rule departs.
    if run.batch > FACTOR * largest.high:
        why = (
            f"{human(run.batch)} tokens a step, {run.batch / largest.high:.2g} times the largest of the published rules"
        )
        yield Departure("train.batch_size", run.batch, largest, why, NOT_PRICED, largest.source)
    steps = config.optim.warmup_steps
    if not least.low / FACTOR <= steps <= least.high * FACTOR:
        short = steps < least.low
        why = "shorter than 1% of the steps" if short else "longer than 10% of the steps"
        cost = NOT_PRICED + ", but spikes" * short
        yield Departure("optim.warmup_steps", steps, least, why, cost, least.source)


def _shape(o: OptimConfig) -> Iterator[Departure]:
    """Yields the departures of the schedule: where it ends, and how long it decays."""
    constant = o.schedule == "constant"
    ends = 1.0 if constant else o.final_lr_ratio
    if ends > FINAL_RATIO:
        rule = Rule(0.0, 0.0, FINAL_RATIO, "arXiv:2502.15938")
        why = f"{o.schedule} ends at {ends:g} of the peak, and linear to 0 does better"
        cost = f"about {FINAL_NATS} nats, {FINAL_TOKENS[0]:.0%} to {FINAL_TOKENS[1]:.0%} of the tokens"
        key, more = ("schedule", "more than ") if constant else ("final_lr_ratio", "")
        known = () if constant else (FINAL_NATS, FINAL_TOKENS)
        yield Departure(f"optim.{key}", ends, rule, why, more + cost, rule.source, *known)
    if o.schedule == "wsd" and o.decay_fraction < LEAST_DECAY:
        rule = Rule(DECAY[0], *DECAY, "nanochat's settings")
        why = f"wsd decays over the last {o.decay_fraction:.0%} of the steps; 50% to 65% do better"
        yield Departure("optim.decay_fraction", o.decay_fraction, rule, why, NOT_PRICED, rule.source)
