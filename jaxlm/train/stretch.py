"""Says what it costs to give a run more steps after its learning rate has come down."""

import pathlib

import jax
import numpy as np

from jaxlm import config as config_lib
from jaxlm import config_files
from jaxlm.config import Config, OptimConfig
from jaxlm.plan import forecast
from jaxlm.step import optim
from jaxlm.train import metrics

JUMP = 1.05  # the rate rises by less than this where steps are added early in a run: that is no news


def warning(folder: pathlib.Path, config: Config, done: int) -> str:
    """Returns a line if `config` makes the rate jump after `done` steps; "" if it does not. Reads what the folder has.

    The rate jumps where more `train.steps` stretch a schedule that has come down. The line says by how much the loss rises
    first, if enough of the run is logged to tell.
    """
    saved = folder / "config.json"
    if not done or not saved.is_file():
        return ""
    before = config_lib.resolve(config_files.from_run(saved))
    old, new = rate(before.optim, before.train.steps), rate(config.optim, config.train.steps)
    last, following = float(old(np.array([done]))[0]), float(new(np.array([done + 1]))[0])
    if config.train.steps <= before.train.steps or not JUMP * last < following:
        return ""
    return (
        f"train.steps was {before.train.steps:,} and is {config.train.steps:,}: {config.optim.schedule} is stretched, and "
        f"the learning rate jumps from {last:.3g} to {following:.3g}{_rise(folder, old, new, done, config.train.steps)}. "
        "optim.schedule=wsd can be prolonged without a jump before its decay; jaxlm train RUN --branch=decay --steps=N "
        "finishes from any milestone"
    )


def rate(config: OptimConfig, steps: int) -> forecast.Rate:
    """Returns the learning rates of a run as a function of an array of steps."""
    each = jax.vmap(optim.rates(config, steps))
    return lambda numbers: np.asarray(each(np.asarray(numbers)))


def _rise(folder: pathlib.Path, old: forecast.Rate, new: forecast.Rate, done: int, end: int) -> str:
    """What the forecast says of the loss with the new rates; "" if it is too early to say."""
    logged = [
        (r["step"], r.get("train/loss")) for r in metrics.records(folder / "metrics.jsonl") if r.get("train/loss")
    ]
    if not logged:
        return ""
    found = forecast.fit(*map(np.array, zip(*logged, strict=True)), old, done, done)
    if isinstance(found, forecast.TooEarly):
        return ""
    rise = forecast.predicted_rise(found, new, end)
    back = f"is back at step {rise.back_step:,}" if rise.back_step else "does not come back"
    return f"; by the forecast the loss rises from {rise.now:.3f} to {rise.peak:.3f}, {back} and ends at {rise.end:.3f}"
