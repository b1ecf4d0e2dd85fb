"""Finds the best model for a budget in dollars on each accelerator, from a scaling law and our speed model.

The models are the config's, narrower or wider in the same proportions. The money buys hours, and the hours buy tokens, fewer
for a larger model. The law is a ladder's (`plan.ladder`) or a published one, which ranks sizes but does not forecast a loss.
"""

import bisect
import dataclasses
import math
from collections.abc import Sequence

from jaxlm.config import Config, ConfigError, ModelConfig, milestones, with_keys
from jaxlm.plan import accelerators, cost, fit, rules, settle
from jaxlm.plan.accelerators import Accelerator
from jaxlm.plan.flops import count_params
from jaxlm.plan.ladder import rungs
from jaxlm.plan.ladder.law import Fit

LAW = rules.LAWS[-1]  # chooses the sizes: the re-fit corrects errors of the first law
NARROWEST, WIDEST = 128, 16_384  # d_model of the models to choose from
UNEVEN = 1.5  # the factor by which key-value heads may be off their share
LEAST_STEPS = 20  # of the shortest run that is considered
WARMUP = 0.02  # of the steps, as in configs/speed_1b.py


def dollars_of(text: str) -> float:
    """Returns the dollars that `--budget` names. Raises ConfigError if it names none."""
    try:
        usd = float(text.removeprefix("$"))
    except ValueError:
        usd = 0.0
    if not 0 < usd < math.inf:
        raise ConfigError(f"--budget={text}: give dollars above 0, such as --budget=200")
    return usd


def check(config: Config) -> None:
    if config.program != "pretrain":
        raise ConfigError(f"--budget chooses a model to pretrain, and this is a config of {config.program}")
    if config.plan.mesh:
        raise ConfigError("--budget chooses the devices too: leave config.plan.mesh out")


def plan(config: Config, usd: float, known: Fit | None = None) -> dict:
    """Returns the best model for the money on each accelerator (or on `plan.accelerator`), best first.

    The config's proportions, rows, vocabulary and optimizer are kept. `known`: the fit of a ladder on the user's data, in
    place of the published law. Raises ConfigError if the money buys no run, or no run that fits.
    """
    prices = accelerators.load(config.plan.prices)
    chosen = (prices.named(config.plan.accelerator),) if config.plan.accelerator else prices.accelerators
    planners: dict[tuple[ModelConfig, int], fit.Planner] = {}
    rows = [row for device in chosen if (row := _best(config, usd, device, planners, known))]
    if not rows:
        names = ", ".join(device.name for device in chosen)
        if not any(_ranked(config, usd, device, known) for device in chosen):
            raise ConfigError(f"--budget={usd:g} buys no {LEAST_STEPS} steps of any model on {names}: give more")
        raise ConfigError(
            f"no model that --budget={usd:g} buys fits into {names}, even with a device for each row of its batch: shorten the "
            f"rows (config.train.seq_len={config.train.seq_len})"
        )
    return {
        "budget_usd": usd,
        "ladder": None,
        "law": (known.law if known else LAW).name,
        "prices_as_of": prices.as_of,
        "accelerators": sorted(rows, key=lambda row: (row["law_loss"], row["name"])),
    }


def family(model: ModelConfig) -> list[ModelConfig]:
    """Returns models in the proportions of `model`, narrow to wide, with whole heads and key-value heads."""
    models = []
    step = max(model.head_dim, 64)
    for heads in range(1, WIDEST // step + 1):
        width, kv = heads * model.head_dim, rungs.kv_heads(model, heads)
        share = max(heads * model.n_kv_heads / model.n_heads, 1)
        if not NARROWEST <= width <= WIDEST or max(kv / share, share / kv) > UNEVEN:
            continue  # such as 13 heads, which have no divisor near 13 / 4
        ratio = width / (model.n_heads * model.head_dim)
        d_model, d_ff = (max(64, round(size * ratio / 64) * 64) for size in (model.d_model, model.d_ff))
        sizes = {"n_layers": max(2, round(model.n_layers * ratio)), "d_model": d_model, "d_ff": d_ff}
        models.append(dataclasses.replace(model, **sizes, n_heads=heads, n_kv_heads=kv))
    return models


def of_size(config: Config, model: ModelConfig, tokens: float) -> Config | None:
    """Returns the config that trains `model` on `tokens` tokens in batches near the rule's; None for too few steps."""
    t = config.train
    rough = dataclasses.replace(with_keys(config, train={"steps": 1}), model=model)
    rule = rules.batch(dataclasses.replace(rules.of(rough), tokens=tokens)).value
    rows = 2 ** max(round(math.log2(rule / t.seq_len)), 0)
    steps = int(tokens / (rows * t.seq_len))
    if steps < LEAST_STEPS:
        return None
    train = {"steps": steps, "batch_size": rows, "microbatch_size": min(16, rows)}
    return with_keys(rough, train=train, optim={"warmup_steps": round(WARMUP * steps), "schedule_steps": 0})


def _hours(config: Config, asked: Config, tokens_per_second: float, devices: int, steps: int) -> float:
    return sum(row["hours"] for row in cost.by_phase(of_steps(config, asked, steps), tokens_per_second, devices))


def _best(config: Config, usd: float, device: Accelerator, planners: dict, known: Fit | None) -> dict | None:
    """Returns the row of one accelerator; None if the money buys no run there, or none that fits."""
    for run in _ranked(config, usd, device, known):
        key = run.model, run.train.batch_size
        planner = planners[key] = planners.get(key) or fit.Planner(run)
        if fitting := planner.fewest(device.memory):
            return _row(config, run, usd, device, fitting, known)
    return None


def _ranked(config: Config, usd: float, device: Accelerator, known: Fit | None) -> list[Config]:
    """Returns for each size the run that `usd` buys, whether or not it fits in memory; the lowest loss by the law is first."""
    runs, law, hours = [], known.law if known else LAW, usd / device.usd
    for model in family(config.model):
        sized = dataclasses.replace(fit.with_changes(config, microbatch=16), model=model)
        fast = cost.speed(sized, device, 1)
        tokens = hours * 3600 * fast  # if all hours went into steps
        steps = max(int(tokens / (config.train.batch_size * config.train.seq_len)), 1)
        beside = _hours(sized, config, fast, 1, steps) - hours
        tokens *= max(1 - beside / hours, 0)
        if tokens and (run := of_size(config, model, tokens)):
            runs.append((law.loss(count_params(model), tokens), run))
    return [run for _, run in sorted(runs, key=lambda pair: pair[0])]


def _row(config: Config, run: Config, usd: float, device: Accelerator, fitting: fit.Fit, known: Fit | None) -> dict:
    """Returns the row of a run: its steps and tokens for the money, on the devices of `fitting`. `config` is the user's."""
    devices, fitted = fitting.devices, fit.with_changes(run, microbatch=fitting.microbatch)
    t, m, batch_tokens = run.train, run.model, run.train.batch_size * run.train.seq_len
    fast, hours = cost.speed(fitted, device, devices), usd / (devices * device.usd)
    most = range(LEAST_STEPS, int(hours * 3600 * fast / batch_tokens) + 1)
    bought = bisect.bisect_right(most, hours, key=lambda steps: _hours(fitted, config, fast, devices, steps))
    steps = max(LEAST_STEPS + bought - 1, LEAST_STEPS)
    run = of_steps(fitted, config, steps)
    params, tokens = count_params(m), steps * batch_tokens
    ruled = settle.ruled(run, lr=0.0, b2=0.0)
    keys = {f"model.{key}": getattr(m, key) for key in rungs.SHAPE}
    keys |= {"train.steps": steps, "train.batch_size": t.batch_size, "train.microbatch_size": fitting.microbatch}
    keys |= {"optim.warmup_steps": run.optim.warmup_steps, "optim.lr": 0.0, "optim.b2": 0.0}
    keys |= {"optim.schedule_steps": 0} if config.optim.schedule_steps else {}
    keys |= {"mesh.fsdp": devices} if devices > 1 else {}
    keys |= {"hardware.usd_per_hour": float(f"{devices * device.usd:.6g}"), "stop.usd": usd}
    keys |= _phases(config, cost.by_phase(run, fast, devices), usd)
    return {
        "name": device.name,
        "devices": devices,
        "parameters": params,
        "tokens": tokens,
        "steps": steps,
        "batch_tokens": batch_tokens,
        "tokens_per_second": fast,
        "hours": hours,
        "usd": usd,
        **_foretold(params, tokens, m.vocab_size, known),
        "lr": ruled.lr,
        "matrix_lr": rules.rounded("lr", ruled.lr * ruled.matrix_lr_ratio),
        "b2": ruled.b2,
        "mfu_from": device.mfu_from,
        "epochs": None,
        "overrides": keys,
    }


def _phases(asked: Config, planned: Sequence[dict], usd: float) -> dict[str, int | float]:
    """Returns the keys of the phases: the end of each, and its share of the money by its hours. The shares add up to `usd`."""
    keys: dict[str, int | float] = {}
    hours = sum(row["hours"] for row in planned)
    for row in planned:
        if phase := asked.phases.plan.get(row["name"]):
            keys[f"phases.plan.{row['name']}.steps"] = row["last_step"]
            keys |= {f"phases.plan.{row['name']}.tokens": 0} if phase.tokens else {}
            keys[f"phases.plan.{row['name']}.usd"] = round(usd * row["hours"] / hours, 4)
    return keys


def _foretold(params: int, tokens: int, vocab_size: int, known: Fit | None) -> dict[str, float | None]:
    """Returns the law's loss, which ranks rows, and the forecast with its interval: None far outside of the law's range."""
    if known:
        loss, low, high = known.loss(params, tokens)
        return {"law_loss": loss, "loss": loss, "low": low, "high": high}
    stand, loss = rules.stand(params, tokens, vocab_size), LAW.loss(params, tokens)
    return {key: stand[key] for key in ("low", "high")} | {"law_loss": loss, "loss": stand["loss"] and loss}


def of_steps(config: Config, asked: Config, steps: int) -> Config:
    """Returns the config with `steps` steps; the warm-up and the phases of `asked` keep their shares of the steps."""
    phases, plan, end = {}, milestones.planned(asked.phases, asked.train), 0
    for phase in plan:
        end = max(round(steps * phase.last / plan[-1].last), end + 1)
        phases[phase.name] = dataclasses.replace(phase.config, steps=end, tokens=0)
    warmup = {"warmup_steps": round(WARMUP * steps)}
    return with_keys(config, train={"steps": steps}, optim=warmup, phases={"plan": phases})
