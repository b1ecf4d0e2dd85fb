"""Computes the tokens, hours and dollars of a run, on demand and on spot machines."""

import dataclasses
import math

from jaxlm.config import Config
from jaxlm.plan.accelerators import Accelerator
from jaxlm.plan.flops import flops_per_token


@dataclasses.dataclass(frozen=True)
class Cost:
    """The time and the price of a run on a number of devices of one accelerator.

    Attributes:
      tokens_per_second: the speed of all devices together: peak x mfu / FLOPs a token (6N + 12LdT).
      hours: the hours of training without any interruption.
      usd: the dollars for `hours` on demand.
      spot_hours: the hours of training with preemptions, lost work included; inf if the run would never end.
      usd_spot: the dollars for `spot_hours` on spot machines.
      usd_per_billion: the dollars for 10^9 tokens on demand.
    """

    tokens_per_second: float
    hours: float
    usd: float
    spot_hours: float
    usd_spot: float
    usd_per_billion: float


def tokens(config: Config) -> int:
    """Returns the number of tokens that the run trains on, repeated ones included."""
    return config.train.steps * config.train.batch_size * config.train.seq_len


def cost(config: Config, accelerator: Accelerator, devices: int, hosts: int) -> Cost:
    """Returns the hours and dollars of the config's whole run.

    Args:
      config: the resolved config.
      accelerator: the kind of device to rent.
      devices: the number of devices.
      hosts: the number of machines that hold the devices; each may be preempted.
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
    """Returns the expected factor by which preemptions prolong a run of `hours` on spot machines; inf if it is 100 or more.

    Preemptions come at a constant rate r, and the preemption of one host stops all hosts. Each preemption costs the
    work since the last checkpoint, and R hours for the restart. The h hours between two checkpoints then take (1/r +
    R)(exp(rh) - 1) hours (Daly 2006, doi:10.1016/j.future.2004.11.016, if saving takes no time). For small r that is h
    + rh (h/2 + R): each preemption costs half an interval and a restart.
    """
    every = min(config.checkpoint.every_steps or config.train.steps, config.train.steps)
    interval = hours * every / config.train.steps
    rate = config.plan.preemptions_per_day * hosts / 24
    if not rate * interval:
        return 1.0
    factor = (1 / rate + config.plan.restart_minutes / 60) * math.expm1(min(rate * interval, 100)) / interval
    return factor if factor < 100 else math.inf
