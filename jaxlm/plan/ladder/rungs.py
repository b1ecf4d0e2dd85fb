"""Chooses the runs of a ladder: small models of a config's family, three budgets of tokens for each, and their hours.

- Sizes: a quarter, three eighths and half of the width, in the config's proportions. The vocabulary stays.
- Budgets: all, half and a quarter of the most tokens that fit into the hours; never more than the config's own.
- Batch: the config's own, halved as the budget shrinks: it scales as D^.571 (Step Law, arXiv:2503.04715).
- Rate: the config's own, times the published rule's ratio between the two runs (plan/rules.py). So a config whose rate is
  off by some factor has a ladder whose rates are off by the same. Warm-up and decay keep their share of the steps.
- Hours: half an hour on this machine, or 3% of what the config's own run would take here, if that is more.
"""

import dataclasses
import math
import pathlib
import typing
from collections.abc import Mapping, Sequence

from jaxlm.config import Config, ConfigError, ModelConfig, OptimConfig, older, with_keys
from jaxlm.data.batches.document_rows import MOST_PASSES, Rows
from jaxlm.host.console import human
from jaxlm.plan import flops, settle
from jaxlm.plan.cost import tokens
from jaxlm.run.checkpoints import pace

WIDTHS = (1 / 4, 3 / 8, 1 / 2)  # of the config's own
BUDGETS = (1 / 4, 1 / 2, 1)  # of the largest
TIMES = (0.5, 1.0, 2.0)  # multiples of the rate that are tried at the smallest size and budget
HOURS, SHARE = 0.5, 0.03  # the limit: so many hours, or this share of the config's own hours if that is more
BATCH_EXPONENT = 0.571
# The keys that give a model its size.
SHAPE = ("n_layers", "d_model", "n_heads", "n_kv_heads", "head_dim", "d_ff")
START_S = 30.0  # of a run before its first step and after its last: a guess
EVAL_SPEED = 3  # held-out tokens are this much faster than trained ones: a forward pass alone
ASKED_STEPS = 5  # at least, of a run whose tokens are given
STEPS = 50  # at least, of the smallest run if the hours decide
LOGGED = 50  # lines of metrics.jsonl at least, if a run has as many steps: for the forecast's law
_MULTIPLE = 8  # widths, d_ff and heads are multiples of this
_FREE = ("attention", "remat", "scan_layers", "fuse_projections", "offload")  # of the model: they change no loss


class Rung(typing.NamedTuple):
    """One run of a ladder: its config, and its entry in ladder.json before it is done.

    `times` of the entry: its rate as a multiple of the rate scaled from the config's; `rule`: the rule's rate.
    """

    entry: dict
    config: Config


def check(config: Config) -> None:
    if config.program != "pretrain" or config.adapter.kind != "none":
        raise ConfigError(f"a ladder is of pretraining; this config is of {config.program}")
    if config.origin:
        raise ConfigError(f"a ladder trains from scratch: leave config.origin={config.origin} out")


def sizes(model: ModelConfig) -> list[int]:
    """Returns the widths of the three models. Raises ConfigError if the model is too narrow for three."""
    widths = sorted({rounded(share * model.d_model) for share in WIDTHS})
    if len(widths) < len(WIDTHS) or widths[-1] >= model.d_model:
        raise ConfigError(f"model.d_model={model.d_model} is too narrow for a ladder: name three by --sizes=D,D,D")
    return widths


def kv_heads(model: ModelConfig, heads: int) -> int:
    """Returns the key-value heads for `heads` heads: the divisor of `heads` nearest to their share in `model`."""
    wanted = max(heads * model.n_kv_heads / model.n_heads, 1)
    divisors = (n for n in range(1, heads + 1) if heads % n == 0)
    return min(divisors, key=lambda n: (max(n / wanted, wanted / n), n))


def smaller(model: ModelConfig, width: int) -> ModelConfig:
    """Returns the model of the family with this width, which must be a multiple of 8."""
    share = width / model.d_model
    inner = rounded(share * model.n_heads * model.head_dim)  # width of all query heads together
    possible = [n for n in range(1, inner // _MULTIPLE + 1) if inner % (n * _MULTIPLE) == 0]
    heads = min(possible, key=lambda n: abs(inner / n - model.head_dim))
    sizes = {"d_model": width, "n_layers": max(round(share * model.n_layers), 1), "d_ff": rounded(share * model.d_ff)}
    attention = {"n_heads": heads, "n_kv_heads": kv_heads(model, heads), "head_dim": inner // heads}
    return dataclasses.replace(model, **sizes, **attention)


def rounded(width: float) -> int:
    return max(round(width / _MULTIPLE), 1) * _MULTIPLE


def rungs(config: Config, widths: Sequence[int], budgets: Sequence[float], folder: pathlib.Path) -> list[Rung]:
    """Returns the runs in the order in which they are done: the smallest at three rates, then the rest, the cheapest first."""
    if len({human(budget) for budget in budgets}) < len(budgets):
        close = ", ".join(f"{budget:,.0f}" for budget in budgets)
        raise ConfigError(f"the budgets of {close} tokens are too close: give --tokens that differ in three digits")
    grid = [rung(config, width, budget, folder) for width in widths for budget in budgets]
    grid.sort(key=lambda run: flops.of(run.config).causal * run.entry["tokens"])
    slower, faster = (rung(config, widths[0], budgets[0], folder, times) for times in TIMES if times != 1)
    return [slower, grid[0], faster, *grid[1:]]


def rung(config: Config, width: int, budget: float, folder: pathlib.Path, times: float = 1.0) -> Rung:
    """Returns one run of `budget` tokens, rounded to whole steps, with its folder below `folder`."""
    o, t, rows = config.optim, config.train, batch_size(config, budget)
    steps = max(round(budget / (rows * t.seq_len)), 2)
    rows_at_once = t.microbatch_size if t.microbatch_size == -1 else math.gcd(t.microbatch_size, rows)
    train = {"steps": steps, "batch_size": rows, "microbatch_size": rows_at_once, "eval_every_steps": 0}
    changed = dataclasses.replace(with_keys(config, train=train), model=smaller(config.model, width))
    whole, small, share = by_rule(config), by_rule(changed), steps / t.steps
    off = (o.lr or whole.lr) / whole.lr  # the config's own rate as a multiple of the rule's
    optim = {
        "lr": float(f"{off * small.lr * times:.3g}"),
        # With 0 the matrices would train at the rule's rate, whatever `times` is.
        "rates": o.with_matrices(o.matrix_lr_ratio or float(f"{small.matrix_lr_ratio / off:.3g}")),
        "warmup_steps": min(round(o.warmup_steps * share), steps - 1),
        "decay_at_step": min(round(o.decay_at_step * share), steps - 1),
        "schedule_steps": 0,
    }
    name = f"d{width}-{human(budget)}" + (f"-rate{times:g}" if times != 1 else "")
    changed = dataclasses.replace(with_keys(changed, optim=optim), workdir=str(folder / "runs" / name))
    m, kind = changed.model, "grid" if times == 1 else "rate"
    entry = {"name": name, "d_model": m.d_model, "n_layers": m.n_layers, "parameters": flops.count_params(m)}
    entry |= {"tokens": tokens(changed), "steps": steps, "batch_size": rows, "lr": optim["lr"]}
    entry |= {"times": times, "rule": small.lr, "kind": kind, "planned_hours": None, "hours": 0.0}
    entry |= dict.fromkeys(("loss", "bits_per_byte", "bytes_per_token")) | {"why": ""}
    return Rung(entry, alone(changed))


def by_rule(config: Config) -> OptimConfig:
    """Returns `optim` with `lr` by rule for a config's size, batch and all its steps; other values that are 0 by rule too."""
    return settle.ruled(config, lr=0.0, schedule_steps=0)


def batch_size(config: Config, budget: float) -> int:
    """Returns the rows of a step for a budget of D tokens: the config's own, halved so that they go about with D^.571."""
    rows, least = config.train.batch_size, abs(config.mesh.data * config.mesh.fsdp)
    for _ in range(round(BATCH_EXPONENT * math.log2(max(tokens(config) / budget, 1)))):
        if rows % 2 or rows // 2 < least:
            break
        rows //= 2
    return rows


def alone(c: Config) -> Config:
    """Returns the config without phases, mirror, messages, samples, benchmarks and traces: one of many runs needs none."""
    often = max(c.train.steps // LOGGED, 1)
    seldom = {"every_steps": 0, "every_minutes": pace.AUTO, "keep_last": 1, "keep_every": 0, "keep_best": 0}
    by_loss = {"best_metric": "val/loss", "best_is": "lowest", "mirror": "", "max_unprotected_usd": 0.0}
    return with_keys(
        c,
        checkpoint=seldom | by_loss,
        eval={"at_start": False, "tasks": ()},
        sample={"prompts": ()},
        phases={"plan": {}, "accept": ""},
        stop={"usd": 0.0, "hours": 0.0, "usd_per_centinat": 0.0},
        runs={"on_exit": dataclasses.replace(c.runs.on_exit, done="", gate="", failed="", stopped=""), "notices": ()},
        notify={"urls": (), "heartbeat_url": ""},
        log={"tensorboard": False, "wandb": "", "parameters": False, "every_steps": min(c.log.every_steps, often)},
        profile={"steps": ""},
        stability={"skip": ()},
    )


def held_out_tokens(config: Config, order: Rows) -> int:
    """Returns about how many held-out tokens each run is evaluated on. Raises ConfigError if there are none."""
    e, entries = config.eval, [order.data.entry(source, "val") for source, weight in order.mixture.items() if weight]
    if not sum(entry["tokens"] for entry in entries):
        raise ConfigError(f"the data in {order.data.path} holds out no text, and a ladder is of held-out losses")
    if e.older_batches:
        most = math.prod(e.older_batches) * config.train.seq_len or math.inf
        return sum(min(entry["tokens"], most) for entry in entries)
    if not e.max_mb:
        return sum(entry["tokens"] for entry in entries)
    return sum(round(min(1.0, e.max_mb * 1e6 / max(entry["bytes"], 1)) * entry["tokens"]) for entry in entries)


def check_data(order: Rows, climbed: Sequence[Rung]) -> str:
    """Returns a line on the sources that the largest run repeats; "" if none. Raises ConfigError if it repeats too often."""
    most = max(climbed, key=lambda run: run.entry["tokens"])
    largest = most.entry["tokens"]
    batches = dataclasses.replace(order, batch_size=most.config.train.batch_size)
    epochs = batches.passes(most.config.train.steps)
    times = largest / sum(order.data.token_counts()[source] for source in epochs)
    if times > MOST_PASSES:
        raise ConfigError(
            f"the largest budget, {human(largest)} tokens, goes {times:.3g} times through the data in {order.data.path}, "
            f"and beyond {MOST_PASSES} times repeated tokens teach less: use more data, or fewer tokens (--tokens=N,N,N)"
        )
    again = ", ".join(f"{source} {n:.2g} times" for source, n in epochs.items() if n > 1)
    return again and f"the largest budget reads {again}: the law counts repeated tokens as new ones"


def seconds(n_tokens: float, speed: float, held_out: int) -> float:
    """Returns the seconds of a run on so many tokens, with its start and its evaluation."""
    return START_S + (n_tokens + held_out / EVAL_SPEED) / speed


def budgets(config: Config, speeds: Mapping[int, float], hours: float, held_out: int) -> list[float]:
    """Returns three budgets that fit into `hours`, at most the config's own tokens. Raises ConfigError if these are too few."""
    speed, others = speeds[min(speeds)], len(TIMES) - 1  # runs at other rates, of the smallest size and budget
    fixed = sum(len(BUDGETS) * seconds(0, each, held_out) for each in speeds.values())
    fixed += others * seconds(0, speed, held_out)
    token = sum(BUDGETS) * sum(1 / each for each in speeds.values()) + others * BUDGETS[0] / speed

    def smallest(hours: float) -> tuple[float, float]:
        """Returns the smallest budget, and the tokens that it must have at least: those of STEPS steps of its batch."""
        budget = BUDGETS[0] * min((3600 * hours - fixed) / token, tokens(config))
        return budget, STEPS * batch_size(config, max(budget, 1.0)) * config.train.seq_len

    budget, enough = smallest(hours)
    if budget >= enough:
        return [share / BUDGETS[0] * budget for share in BUDGETS]
    least = f"the smallest run would have {STEPS * max(budget, 0) / enough:.0f} steps, and {STEPS} are the least"
    longer = hours
    while budget < enough:
        if enough > BUDGETS[0] * tokens(config):
            short = f"train.steps={config.train.steps} is too short for a ladder"
            raise ConfigError(f"{short}: {least}; name three by --tokens")
        needed = (fixed + enough / BUDGETS[0] * token) / 3600
        digit = 10.0 ** (math.floor(math.log10(needed)) - 1)  # the second significant one
        longer = float(f"{(math.floor(needed / digit) + 1) * digit:.2g}")
        budget, enough = smallest(longer)
    raise ConfigError(f"{hours:.3g} hours are too short for a ladder here: {least}; give --hours={longer:g}")


def limit(config: Config, speeds: Mapping[int, float]) -> float:
    """Returns the hours that a ladder may take by default. The config's own hours are guessed from the widest model's speed."""
    widest = max(speeds)
    shape = dataclasses.replace(config, model=smaller(config.model, widest))
    speed = speeds[widest] * flops.of(shape).causal / flops.of(config).causal
    return max(HOURS, SHARE * tokens(config) / speed / 3600)


def same(config: Config, order: Rows) -> dict:
    """Returns key -> value of all settings that determine the losses of a config's ladder on its data."""
    parts = {
        "model": {k: v for k, v in dataclasses.asdict(config.model).items() if k not in _FREE},
        "train": {k: getattr(config.train, k) for k in ("steps", "batch_size", "seq_len")},
        "optim": {k: v for k, v in dataclasses.asdict(config.optim).items() if k != "offload"},
        "loss": {"z_loss": config.loss.z_loss},
        "eval": older.ladder_keys(config.eval) or {"max_mb": config.eval.max_mb},
    }
    flat = {f"{section}.{key}": value for section, keys in parts.items() for key, value in keys.items()}
    final = dataclasses.asdict(config.data.final) if order.final else None
    return flat | {"seed": config.seed, "data": order.data.sha256, "mixture": dict(order.mixture), "data.final": final}
