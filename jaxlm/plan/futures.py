"""Compares what a run can do next: go on to its plan, let the learning rate decay now, or stop. And gives advice."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from jaxlm.plan.forecast import Forecast, TooEarly

PLAN, DECAY, STOP = "on to the plan", "decay now", "stop"  # the futures, in this order
GO_ON, TOO_EARLY = "go on", "too early"  # advice is one of these, DECAY and STOP
DECAY_SHARE = 0.15  # "decay now" takes this share of the steps done; WSD decays over 10 to 20% (arXiv:2404.06395)
CENTINAT = 0.01
SURE = 2  # a future is too dear if it is so even with a gain this far above the expected one, in halves of the 80% interval


@dataclasses.dataclass(frozen=True)
class Future:
    """One way to go on, against stopping now.

    Attributes:
      name: PLAN, DECAY or STOP.
      steps: how many more steps it takes.
      loss, low, high: the loss at its end in nats, and its 80% interval.
      gain, gain_low, gain_high: by how much the loss falls from now on, and the 80% interval of that.
      hours, usd: the time and the price of its steps.
    """

    name: str
    steps: int
    loss: float
    low: float
    high: float
    gain: float
    gain_low: float
    gain_high: float
    hours: float
    usd: float

    @property
    def usd_per_centinat(self) -> float:
        """Returns the dollars for 0.01 nats; inf if they cost something and the loss does not fall; 0 if all is free."""
        return _price(self.usd, self.gain)

    @property
    def cheapest(self) -> float:
        """Returns the dollars for 0.01 nats if the loss falls as far as it can be thought to."""
        return _price(self.usd, self.gain + SURE * (self.gain_high - self.gain))


@dataclasses.dataclass(frozen=True)
class Advice:
    """What to do (GO_ON, DECAY, STOP or TOO_EARLY), and why in one line."""

    word: str
    line: str


def futures(
    forecast: Forecast, end: int, seconds_per_step: float, usd_per_hour: float, decay_share: float = DECAY_SHARE
) -> list[Future]:
    """Returns the three futures of a run, in the order PLAN, DECAY, STOP.

    Args:
      end: the last step of the plan.
      seconds_per_step: the time of a step, evaluations and saves included if they should be paid.
      usd_per_hour: the price of the machine.
      decay_share: "decay now" takes this share of the steps done, and no more steps than the plan has left.
    """
    done = forecast.done
    n = min(max(round(decay_share * done), 1), end - done)
    now = float(np.asarray(forecast.rate(np.array([done]))).reshape(-1)[0])

    def decay(steps: np.ndarray) -> np.ndarray:
        return now * np.clip(1 - (steps - done) / max(n, 1), 0.0, 1.0)

    ways = []
    for name, steps, rate in ((PLAN, end - done, None), (DECAY, n, decay), (STOP, 0, None)):
        hours = steps * seconds_per_step / 3600
        loss, gain = forecast.at(done + steps, rate), forecast.gain(done + steps, rate)
        ways.append(Future(name, steps, *loss, *gain, hours, hours * usd_per_hour))
    return ways


def advice(found: Sequence[Future] | TooEarly, usd_per_centinat: float) -> Advice:
    """Returns what to do if 0.01 nats are worth `usd_per_centinat` dollars.

    A future is too dear if it costs more than that even where its loss falls as far as it can be thought to. Stopping late
    wastes dollars. Stopping early wastes the model. The plan's own decay is in the plan's price.

    Args:
      found: the three futures, or why there are none.
      usd_per_centinat: 0 = whatever it costs.
    """
    if isinstance(found, TooEarly):
        return Advice(TOO_EARLY, found.why)
    plan, decay, _ = found
    limit = f"${usd_per_centinat:,.2f} for 0.01 nats"
    if not usd_per_centinat or plan.cheapest <= usd_per_centinat:
        return Advice(GO_ON, f"go on: {_words(plan)}")
    if decay.cheapest <= usd_per_centinat:
        return Advice(DECAY, f"decay now: {_words(decay)}. The plan's rest is dearer than {limit}: {_words(plan)}")
    return Advice(
        STOP, f"stop: all that is left is dearer than {limit}. The plan's rest: {_words(plan)}. {_words(decay)}"
    )


def table(found: Sequence[Future]) -> list[str]:
    """Returns the futures as lines of text, with a head line."""
    lines = [f"{'':<16}{'steps':>8}{'loss':>9}{'80%':>18}{'hours':>8}{'dollars':>10}{'per 0.01 nats':>15}"]
    for f in found:
        price = f"${f.usd_per_centinat:,.2f}" if f.usd and math.isfinite(f.usd_per_centinat) else "-"
        interval = f"{f.low:.4f}-{f.high:.4f}"
        usd = f"${f.usd:,.2f}"
        lines.append(f"{f.name:<16}{f.steps:>8,}{f.loss:>9.4f}{interval:>18}{f.hours:>8.1f}{usd:>10}{price:>15}")
    return lines


def summary(found: Sequence[Future] | TooEarly, said: Advice, done: int) -> dict:
    """Returns what JSON and the run's report show after `done` steps: {"advice": line, "rows": [...]}."""
    rows = []
    for f in [] if isinstance(found, TooEarly) else found:
        price = f.usd_per_centinat if math.isfinite(f.usd_per_centinat) else None
        row = {name: getattr(f, name) for name in ("name", "loss", "low", "high", "hours", "usd")}
        rows.append(row | {"step": done + f.steps, "usd_per_centinat": price})
    return {"advice": said.line, "rows": rows}


def _price(usd: float, gain: float) -> float:
    if usd <= 0:
        return 0.0
    return usd * CENTINAT / gain if gain > 0 else math.inf


def _words(f: Future) -> str:
    """Returns a future's steps, dollars, gain and price in a few words."""
    what = f"{f.steps:,} steps to loss {f.loss:.3f} ({f.low:.3f} to {f.high:.3f}), {f.gain:.3f} below now, for ${f.usd:,.2f}"
    price = f.usd_per_centinat
    each = f", ${price:,.2f} for 0.01 nats" if f.usd and math.isfinite(price) else ""
    return f"{'a decay of ' if f.name == DECAY else ''}{what}{each}"
