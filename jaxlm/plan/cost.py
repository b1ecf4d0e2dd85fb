"""Tokens, FLOPs, hours and dollars of a run, on demand and on machines that are taken away."""

import dataclasses
import math

from jaxlm.config import Config
from jaxlm.plan.accelerators import Accelerator
from jaxlm.plan.flops import flops_per_token


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a run takes on `devices` of one accelerator.

    Attributes:
      tokens_per_second: over all devices, peak x mfu / FLOPs a token (6N + 12LdT).
      hours: of training, nothing going wrong.
      usd: on demand.
      spot_hours: with preemptions, what they lose included; inf where a run would not end.
      usd_spot: of those hours at the spot price.
      usd_per_billion: on demand, for 10^9 tokens.
    """

    tokens_per_second: float
    hours: float
    usd: float
    spot_hours: float
    usd_spot: float
    usd_per_billion: float


def tokens(config: Config) -> int:
    """Tokens that the run trains on, repetitions counted."""
    return config.train.steps * config.train.batch_size * config.train.seq_len


def cost(config: Config, accelerator: Accelerator, devices: int, hosts: int) -> Cost:
    """Hours and dollars of the config's whole run.

    Args:
      config: resolved.
      accelerator: of which `devices` are rented, over `hosts` machines, each of which may be preempted.
    """
    per_token = flops_per_token(config.model, config.train.seq_len).palm
    speed = devices * accelerator.tflops * 1e12 * accelerator.mfu / per_token
    hours = tokens(config) / speed / 3600
    spot_hours = hours * slow_down(config, hours, hosts)
    return Cost(
        tokens_per_second=speed,
        hours=hours,
        usd=hours * devices * accelerator.usd,
        spot_hours=spot_hours,
        usd_spot=spot_hours * devices * accelerator.usd_spot,
        usd_per_billion=devices * accelerator.usd / 3600 * 1e9 / speed,
    )


def slow_down(config: Config, hours: float, hosts: int) -> float:
    """How many times as long a run of `hours` takes on spot machines, in expectation; inf from a hundred times on.

    Preemptions come at a constant rate r, to any host for all; each loses what came since the last checkpoint, and R hours
    until the next step. An interval of h hours between checkpoints then takes (1/r + R)(exp(rh) - 1) (Daly 2006,
    doi:10.1016/j.future.2004.11.016, saving taken as free), which for small r is h + rh (h/2 + R): half an interval and a
    restart for each preemption.
    """
    every = min(config.checkpoint.every_steps or config.train.steps, config.train.steps)
    interval = hours * every / config.train.steps
    rate = config.plan.preemptions_per_day * hosts / 24
    if not rate * interval:
        return 1.0
    factor = (1 / rate + config.plan.restart_minutes / 60) * math.expm1(min(rate * interval, 100)) / interval
    return factor if factor < 100 else math.inf
