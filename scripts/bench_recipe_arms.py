"""The arms of scripts/bench_recipe.py, its shapes and budgets, and the order of the runs."""

import dataclasses
import functools
import math
import pathlib
import statistics
import typing
from collections.abc import Collection, Iterable, Mapping, Sequence

import bench_recipe_runs as runs_lib
import bench_recipe_stats as stats
from bench_recipe_runs import Fields, Run

from jaxlm.config import Config, ConfigError, config_files, resolve
from jaxlm.plan import rules

Keys = dict[str, typing.Any]


@dataclasses.dataclass(frozen=True)
class Arm:
    """A recipe.

    Attributes:
      base: the arm that it is first compared with.
      keys: the overrides, without `optim.lr`, which is the rule's rate times the run's factor.
      rate: the rule for optim.lr: "rule": the optimizer's own; "reference": lower than that by gpuburnout_1b's ratio;
        "two": AdamW's, and Muon's for the matrices through optim.rates; "": the rate is in `keys`.
    """

    base: str
    keys: Keys
    rate: str = "rule"


LINEAR: Keys = {"optim.schedule": "linear", "optim.final_lr_ratio": 0.0}
B2: Keys = {"optim.b2": 0.0}  # 0 = by rule
REFERENCE: Keys = {"optim.name": "adamw", "optim.b2": 0.95, "optim.schedule": "cosine", "optim.final_lr_ratio": 0.1}
ADAMW = REFERENCE | LINEAR | B2
MUON = ADAMW | {"optim.name": "muon"}
TIED: Keys = {"optim.decay_follows_rate": True}
QK_NORM: Keys = {"model.qk_norm": True}
SPEED = MUON | TIED | QK_NORM
WSD: Keys = {"optim.schedule": "wsd", "optim.decay_fraction": 0.5}

ARMS: dict[str, Arm] = {
    "reference": Arm("reference", REFERENCE, "reference"),  # gpuburnout_1b's
    "adamw": Arm("reference", ADAMW),  # AdamW by the rules
    "speed": Arm("adamw", SPEED, "two"),  # that of configs/speed_1b.py
    # One change more than the base.
    "rate": Arm("reference", REFERENCE),
    "b2": Arm("reference", REFERENCE | B2, "reference"),
    "linear": Arm("reference", REFERENCE | LINEAR, "reference"),
    "muon": Arm("adamw", MUON),
    "two_rates": Arm("muon", MUON, "two"),
    "tied": Arm("muon", MUON | TIED),
    "qk_norm": Arm("muon", MUON | QK_NORM),
    "wsd": Arm("speed", SPEED | WSD, "two"),
}
MAIN = ("reference", "adamw", "speed")
NEVER_STOPPED = ("reference", "adamw")  # the bases of the others

HEADS: Keys = {"model.n_layers": 4, "model.n_kv_heads": 1, "model.head_dim": 64}
SHAPES: dict[str, Keys] = {
    "S0": HEADS | {"model.d_model": 128, "model.n_heads": 2, "model.d_ff": 352},  # 1.3M parameters
    "S1": HEADS | {"model.d_model": 192, "model.n_heads": 3, "model.d_ff": 512},  # 2.4M
}
BUDGETS, SEEDS = (1_000_000, 2_000_000, 4_000_000), (0, 1, 2)
FACTORS = (0.25, 0.5, 1.0, 2.0)  # of the rule's rate; an arm gets three of these, see `factors`
SEQ_LEN, BATCH, WARMUP = 256, 16, 0.05  # tokens per row, rows per step, share of the steps

# The data: all available text, sources in equal parts, so that 4M tokens are one to two epochs of each source.
WEIGHTS = {"prose": 1.0, "math": 1.0, "code": 1.0}
DATA: Keys = {f"prepare.sources.{name}.weight": weight for name, weight in WEIGHTS.items()}
DATA |= {f"prepare.sources.{name}.max_bytes": 10_000_000 for name in WEIGHTS} | {"data.val_fraction": 0.04}
COMMON: Keys = {
    "model.vocab_size": 4096,
    "train.seq_len": SEQ_LEN,
    "train.batch_size": BATCH,
    "train.eval_every_steps": 0,
    "eval.max_mb": 0.0,
    "eval.batch_size": 16,
    "eval.at_start": False,
    "checkpoint.every_steps": 0,
    "checkpoint.every_minutes": 0.0,
    "sample.prompts": "()",
    "sample.every_steps": 0,
    "log.tensorboard": False,
    "runs.supervise": "off",
}
ASSUMED = {"S0": 7000.0, "S1": 4500.0}  # tokens per second, until a run has been measured
START_S = 45.0  # imports, compilation and evaluation of a run, until one has been measured


# ---------------------------------------------------------------------------------------------------------------------
# The settings of a run


def asked(run: Run) -> Fields:
    """Returns key -> value of all settings that influence a run's result, with defaults and rules resolved.

    Empty if this checkout does not know all keys of the run.
    """
    if run.arm not in ARMS or run.shape not in SHAPES:
        return {}
    try:
        return _told(rules.by_rule(_config(_keys(run)), lambda line: None))
    except ConfigError:
        return {}


def defaults() -> Fields:
    """Returns key -> value of configs/base.py, in the form of `asked`."""
    return _told(_config({}))


def _told(config: Config) -> Fields:
    parts = {name: dataclasses.asdict(getattr(config, name)) for name in ("model", "train", "optim", "loss")}
    return {f"{name}.{key}": value for name, keys in parts.items() for key, value in keys.items()}


def steps_of(tokens: int) -> int:
    return max(1, round(tokens / (SEQ_LEN * BATCH)))


def settings(run: Run) -> list[str]:
    """Returns a run's overrides of configs/base.py, KEY=VALUE. Raises ConfigError if this checkout lacks a key."""
    keys = _keys(run)
    _config(keys)
    return words(keys)


def _keys(run: Run) -> Keys:
    arm, steps = ARMS[run.arm], steps_of(run.tokens)
    keys = COMMON | SHAPES[run.shape] | arm.keys | {"seed": run.seed, "train.steps": steps}
    keys["optim.warmup_steps"] = max(1, round(WARMUP * steps))
    lr, ratio = rates(arm, _config(keys))
    keys["optim.lr"] = float(f"{run.factor * lr:.4g}")
    if ratio != 1:
        keys["optim.rates"] = (f"layers_.*/kernel {ratio:.4g}",)
    return keys


def rates(arm: Arm, config: Config) -> tuple[float, float]:
    """Returns (optim.lr, the matrices' rate over it) of an arm, given its config without the two."""
    if not arm.rate:
        return config.optim.lr, 1.0
    run = rules.of(config)
    if arm.rate == "two":
        adamw = rules.rate("adamw", run).value
        return adamw, rules.rate("muon", run).value / adamw
    own = rules.rate(config.optim.name, run).value
    if arm.rate == "reference":
        faithful = _resolved("gpuburnout_1b")
        own *= faithful.optim.lr / rules.rate("adamw", rules.of(faithful)).value
    return own, 1.0


def _config(keys: Keys) -> Config:
    """Returns the checked config with these keys. Raises ConfigError."""
    return _resolved("base", ("workdir=unused", "data.dir=unused", *words(keys)))


@functools.cache
def _resolved(name: str, overrides: Sequence[str] = ()) -> Config:
    return resolve(config_files.load(name, overrides))


def words(keys: Keys) -> list[str]:
    """Returns overrides as the command line takes them, KEY=VALUE."""
    return [f"{key}={value}" for key, value in keys.items()]


def unknown(arms: Iterable[str]) -> dict[str, str]:
    """Returns arm -> the reason in a line, for the arms that this checkout can't run."""
    found = {}
    for arm in arms:
        try:
            settings(Run(arm, next(iter(SHAPES)), BUDGETS[0], SEEDS[0]))
        except ConfigError as error:
            found[arm] = config_files.first_line(error)
    return found


# ---------------------------------------------------------------------------------------------------------------------
# The plan


def planned(arms: Collection[str], done: Mapping[Run, Fields]) -> list[Run]:
    """Returns all runs of these arms, the most informative first. `done` decides the rates of the larger budgets."""
    first, *larger = BUDGETS
    main = [arm for arm in MAIN if arm in arms]
    rest = [arm for arm in ARMS if arm in arms and arm not in MAIN]
    small, *large = SHAPES
    tried = {arm: factors(arm, done) for arm in arms}

    def each(names: Sequence[str], shape: str, tokens: int, number: int | None = None) -> list[Run]:
        """Returns a budget's runs, at rate `number` (0 to 2) of each arm; None for the chosen rate."""
        own = {arm: chosen(arm, done) if number is None else tried[arm][number] for arm in names}
        return [Run(arm, shape, tokens, seed, own[arm]) for seed in SEEDS for arm in names]

    order = [run for number in range(3) for run in each(main, small, first, number)]
    order += [run for tokens in larger for run in each(main, small, tokens)]
    order += each(rest, small, first, 0)
    order += [run for shape in large for run in each(main, shape, BUDGETS[-1])]
    order += [run for number in (1, 2) for run in each(rest, small, first, number)]
    order += [run for tokens in larger for run in each(main, small, tokens, 0)]
    return list(dict.fromkeys(order))


def factors(arm: str, done: Mapping[Run, Fields]) -> tuple[float, float, float]:
    """Returns the three factors of an arm's rate: the rule's, half of that, and one beyond the better of the two.

    The means decide which is better, even if they differ by less than their interval. Until the second rate is finished, the
    third is twice the rule's; if the rule's rate diverges, a quarter.
    """
    both = [curve(arm, next(iter(SHAPES)), factor, done).get(BUDGETS[0], {}) for factor in (1.0, 0.5)]
    if any(len(losses) < len(SEEDS) for losses in both):
        return 1.0, 0.5, 2.0
    rule, half = (statistics.fmean(losses.values()) for losses in both)
    return 1.0, 0.5, 0.25 if half < rule or math.isinf(rule) else 2.0


def curve(arm: str, shape: str, factor: float, done: Mapping[Run, Fields]) -> dict[int, dict[int, float]]:
    """Returns tokens -> seed -> loss of an arm's finished runs at a factor of its rate."""
    found: dict[int, dict[int, float]] = {}
    for run, line in done.items():
        if (run.arm, run.shape, run.factor) == (arm, shape, factor):
            found.setdefault(run.tokens, {})[run.seed] = runs_lib.loss(line)
    return found


def sweep(arm: str, done: Mapping[Run, Fields]) -> dict[float, dict[int, float]]:
    """Returns factor -> seed -> loss of an arm at the first budget of the first shape."""
    shape = next(iter(SHAPES))
    return {factor: curve(arm, shape, factor, done).get(BUDGETS[0], {}) for factor in factors(arm, done)}


def swept(arm: str, done: Mapping[Run, Fields]) -> bool:
    """True if an arm has finished all its rates at the first budget, with all seeds."""
    return all(len(losses) == len(SEEDS) for losses in sweep(arm, done).values())


def chosen(arm: str, done: Mapping[Run, Fields]) -> float:
    """Returns the best factor in an arm's sweep; 1 unless another's gain exceeds its interval."""
    return stats.best_factor(sweep(arm, done)) if swept(arm, done) else 1.0


def stopped(arms: Collection[str], done: Mapping[Run, Fields]) -> dict[str, str]:
    """Returns arm -> the reason, for the arms to stop: worse than their base at the first budget, both at their best rates."""
    found = {}
    for arm in arms:
        base = ARMS[arm].base
        if arm in NEVER_STOPPED or not (swept(arm, done) and swept(base, done)):
            continue
        ours, theirs = (sweep(name, done)[chosen(name, done)] for name in (arm, base))
        if stats.behind(ours, theirs):
            gap = stats.difference(ours, theirs)
            shown = f"{gap.value:.4f} nats [{gap.low:.4f}, {gap.high:.4f}]"
            found[arm] = f"{shown} behind {base} at {BUDGETS[0] / 1e6:g}M tokens"
    return found


def seconds(run: Run, done: Mapping[Run, Fields], given: float = 0.0) -> tuple[float, str]:
    """Returns (how many seconds a run will take, whether its speed is given, measured or assumed)."""
    arms = [line for other, line in done.items() if (other.arm, other.shape) == (run.arm, run.shape)]
    like = arms or [line for other, line in done.items() if other.shape == run.shape]
    like = [line for line in like if line.get("tokens_per_second")]
    beside = [line["seconds"] - line["tokens"] / line["tokens_per_second"] for line in like]
    if given:
        speed, how = given, "given"
    elif like:
        speed, how = statistics.median(line["tokens_per_second"] for line in like), "measured"
    else:
        speed, how = ASSUMED.get(run.shape, min(ASSUMED.values())), "assumed"
    return run.tokens / speed + max(statistics.median(beside), 0.0) if beside else run.tokens / speed + START_S, how


@dataclasses.dataclass(frozen=True)
class State:
    """The state of the plan: finished runs, runs to do in order, arms left out and arms stopped, each with the reason."""

    done: dict[Run, Fields]
    to_come: list[Run]
    left_out: dict[str, str]
    stopped: dict[str, str]


def look(
    path: pathlib.Path, data: str = "", only: Collection[str] = (), left_out: Mapping[str, str] | None = None
) -> State:
    """Reads runs.jsonl and plans the other runs.

    Args:
      path: of runs.jsonl.
      data: the digest of the data of finished runs; "" for any.
      only: the arms to plan; () for all.
      left_out: the result of `unknown`, if known already.
    """
    arms = [arm for arm in ARMS if not only or arm in only]
    left_out = dict(unknown(arms) if left_out is None else left_out)
    done = runs_lib.finished(runs_lib.read(path), asked, data, defaults())
    known = [arm for arm in arms if arm not in left_out]
    behind = stopped(known, done)
    to_come = [run for run in planned(known, done) if run not in done and run.arm not in behind]
    return State(done, to_come, left_out, behind)
