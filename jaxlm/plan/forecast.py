"""Forecasts the loss of a run from the curve so far and the learning rates to come: the Multi-Power Law (arXiv:2503.12811).

    L(t) = L0 + A (S(t) / 3333)^-alpha - B sum_k (r[k-1] - r[k]) G(C r[k]^-gamma S_k(t)),    G(x) = 1 - (1 + x)^-beta

r[k] is the learning rate of step k as a share of the peak, S(t) the sum of r over steps 1 to t, S_k(t) the sum over k to t;
k runs over the steps after the warm-up. The last term is how much each fall of the rate lowers the loss, some steps later;
a rise of the rate undoes it. The paper uses the rates themselves, not shares of the peak. Its runs peak at 3e-4; there both
forms agree, with A and C in other units.

A power law in steps ignores the learning rate, and so predicts too high a loss at the end of nearly every schedule.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

from jaxlm.host.console import dollars

Rate = Callable[[np.ndarray], np.ndarray]  # steps from 1 -> learning rates, in any unit

UNIT = 1 / 3e-4  # A is the power law's height after this many steps at the peak, where the paper's sum of rates is 1
# The mean and standard deviation of the prior of each parameter's logarithm. The means are those of the paper's fits.
PRIORS = {
    "B/A": (np.log(0.22), 0.4),
    "alpha": (np.log(0.45), 0.27),
    "beta": (np.log(0.59), 0.3),
    "gamma": (np.log(0.64), 0.25),
    "C": (np.log(2.05 * 3e-4**0.36), 0.7),
}
MIN_SHARE, MIN_POINTS = 0.25, 20  # of the plan's steps; losses after the warm-up
SKIPPED = 0.1  # this share of the steps after the warm-up is left out of the fit
# The law's own error on public curves: as a share of the losses' range where it is fitted, of the predicted change of the
# loss where it is not. Such errors are correlated over many points, so all points together weigh as much as this many.
MISFIT, DRIFT, WEIGHT = 0.006, 0.06, 40
POINTS, KNOTS = 300, 160  # at most: losses that are fitted, changes of the rate that the law sums over
HUBER, OUTLIER = 1.5, 10  # standard deviations from which a residual counts linearly; from which it is dropped
TENTH = 1.2816  # standard normal: 80% lie within this many standard deviations


@dataclasses.dataclass(frozen=True)
class TooEarly:
    why: str


@dataclasses.dataclass(frozen=True)
class Forecast:
    """The law, fitted to a run's losses up to step `done`.

    `theta`: log(L0), log(A), then the logarithms of PRIORS' parameters. `misfit`: how far the law was from the losses, as a
    standard deviation in nats, without the losses' noise.
    """

    done: int
    rate: Rate
    theta: np.ndarray
    covariance: np.ndarray
    misfit: float

    def at(self, step: int, rate: Rate | None = None) -> tuple[float, float, float]:
        """Returns (loss, low, high) in nats after `step` steps: an 80% interval. `rate`: from now on; None for the plan's."""
        loss, low, high = self.curve(np.array([step]), rate)
        return float(loss[0]), float(low[0]), float(high[0])

    def curve(self, steps: np.ndarray, rate: Rate | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        loss, spread = self._predict(np.append(steps, self.done), rate)
        drift = DRIFT * (loss[:-1] - loss[-1])
        sd = np.sqrt(_variance(spread[:-1], self.covariance) + drift**2 + self.misfit**2)
        return loss[:-1], loss[:-1] - TENTH * sd, loss[:-1] + TENTH * sd

    def gain(self, step: int, rate: Rate | None = None) -> tuple[float, float, float]:
        """Returns how far the loss falls from now to `step`, and its 80% interval, in nats."""
        (then, now), spread = self._predict(np.array([step, self.done]), rate)
        if step <= self.done:
            return 0.0, 0.0, 0.0
        sd = float(np.sqrt(_variance(spread[:1] - spread[1:], self.covariance)[0] + (DRIFT * (now - then)) ** 2))
        gain = float(now - then)
        return gain, gain - TENTH * sd, gain + TENTH * sd

    def squeezed(self, steps: int) -> float:
        """Returns the loss after `steps` steps, with the schedule of the first `done` steps squeezed into them."""
        times = self.done / steps
        return dataclasses.replace(self, done=steps, rate=lambda n: self.rate(n * times)).at(steps)[0]

    def _predict(self, steps: np.ndarray, rate: Rate | None) -> tuple[np.ndarray, np.ndarray]:
        """Returns the losses at `steps`, [steps], and their derivatives by the parameters, [steps, parameters]."""
        schedule = _Schedule(then(self.rate, self.done, rate) if rate else self.rate, int(steps.max()))
        small = 1e-4 * np.eye(self.theta.size)
        ends = [(_law(self.theta + e, schedule, steps), _law(self.theta - e, schedule, steps)) for e in small]
        return _law(self.theta, schedule, steps), np.stack([(up - down) / 2e-4 for up, down in ends], -1)


def then(rate: Rate, done: int, after: Rate) -> Rate:
    return lambda steps: np.where(steps <= done, _rates(rate, steps), _rates(after, steps))


def logged(steps: np.ndarray, rates: np.ndarray) -> Rate:
    """Returns the schedule that a run logged: lines between its points, from 0 on."""
    return lambda s: np.interp(s, [0, *steps], [0, *rates])


def fit(steps: np.ndarray, losses: np.ndarray, rate: Rate, done: int, end: int) -> Forecast | TooEarly:
    """Fits the law to the losses of a run's first `done` steps, of `end` planned steps. Takes about 0.05 s.

    Least squares with Huber's weights and the priors, on the medians of bins. Losses that are not finite are left out; of a
    repeated step (of a resumed run) the later loss counts. Raises ValueError if the rate is 0 or not finite.
    """
    if done < MIN_SHARE * end:
        return TooEarly(f"too early: {done:,} of {end:,} steps are done, and a forecast takes {MIN_SHARE:.0%} of them")
    schedule = _Schedule(rate, end)
    first = schedule.warmup + SKIPPED * (done - schedule.warmup)
    seen = {int(s): float(x) for s, x in zip(steps, losses, strict=True) if x is not None}
    points = np.array([(s, x) for s, x in sorted(seen.items()) if schedule.warmup < s <= done and np.isfinite(x)])
    if len(points) < MIN_POINTS:
        return TooEarly(f"too early: {len(points)} losses after the warm-up, and a forecast takes {MIN_POINTS}")
    x, y = _bins(points[points[:, 0] > first])
    noise = 1.4826 * np.median(np.abs(y[2:] - 2 * y[1:-1] + y[:-2])) / np.sqrt(6)  # second differences see no trend
    misfit = max(MISFIT * float(np.subtract(*np.quantile(y, (0.98, 0.02)))), 1e-6)
    theta, covariance = _least_squares(schedule, x, y, noise, misfit)
    off = np.abs(y - _law(theta, schedule, x))
    usual = 1.4826 * float(np.median(off))
    near = off <= OUTLIER * np.hypot(noise, max(misfit, usual))
    # The law fits these losses worse than the public curves, or some are spikes.
    if usual**2 - noise**2 > misfit**2 or not near.all():
        misfit = max(misfit, np.sqrt(max(usual**2 - noise**2, 0.0)))
        theta, covariance = _least_squares(schedule, x[near], y[near], noise, misfit)
    return Forecast(done, rate, theta, covariance, misfit)


def predicted_rise(forecast: Forecast, rate: Rate, end: int) -> dict:
    """Predicts the losses now, at their peak and at the end: a rate that has decayed and rises again first raises the loss.

    `back_step`: the first step after the peak with a loss of at most `now`; None if there is none.
    """
    done = forecast.done
    steps = np.unique(np.linspace(done, end, min(end - done, 1000) + 1).round().astype(int))
    losses = forecast.curve(steps, rate)[0]
    top = int(np.argmax(losses))
    back = np.flatnonzero(losses[top:] <= losses[0])
    at = {"peak_step": int(steps[top]), "back_step": int(steps[top + back[0]]) if back.size else None}
    return {"now": float(losses[0]), "peak": float(losses[top]), "end": float(losses[-1])} | at


def _rates(rate: Rate, steps: np.ndarray) -> np.ndarray:
    return np.asarray(rate(steps), np.float64) * np.ones(len(steps))


class _Schedule:
    """A schedule as the law sees it.

    Attributes:
      warmup: the last step of the warm-up: the rate rises up to it.
      total: at index t, the sum of the rates of steps 1 to t, as shares of the peak.
      before, falls, shares: of each later change of the rate, close ones merged: `total` before, the rate's fall, rate after.
    """

    def __init__(self, rate: Rate, end: int):
        r = _rates(rate, np.arange(1, end + 1))
        still = np.flatnonzero(r[1:] <= r[:-1])
        warmup = int(still[0]) + 1 if still.size else end  # r[i] is the rate of step i + 1
        if not (np.isfinite(r).all() and r[warmup - 1] > 0):
            raise ValueError("the learning rate is 0 or not finite")
        r = r / r[warmup - 1]
        total = np.append(0.0, np.cumsum(r))
        fall = np.append(0.0, r[:-1] - r[1:])
        fall[:warmup] = 0.0
        at = np.flatnonzero(fall)
        weight = np.abs(fall[at])
        falls = fall[at]
        if at.size > KNOTS:
            way = np.cumsum(weight)
            group = np.minimum((way / way[-1] * KNOTS).astype(int), KNOTS - 1)
            held = np.bincount(group, weight, KNOTS)
            middle = np.bincount(group, weight * at, KNOTS)[held > 0] / held[held > 0]
            falls, at = np.bincount(group, falls, KNOTS)[held > 0], middle.round().astype(int)
        self.warmup, self.total = warmup, total
        self.before, self.falls, self.shares = total[at], falls, np.maximum(r[at], 1e-6)


def _law(theta: np.ndarray, schedule: _Schedule, steps: np.ndarray) -> np.ndarray:
    """Returns the losses that the law gives after `steps` steps."""
    l0, a, ratio, alpha, beta, gamma, c = np.exp(theta)
    total = schedule.total[steps]
    since = np.maximum(total[:, None] - schedule.before, 0.0)
    took = 1 - (1 + c * schedule.shares**-gamma * since) ** -beta
    return l0 + a * ((total / UNIT) ** -alpha - ratio * (took @ schedule.falls))


def _bins(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the steps and losses of at most POINTS bins with as many points each: the mean step, the median loss."""
    parts = np.array_split(points, min(len(points), POINTS))
    steps = np.array([part[:, 0].mean().round() for part in parts], int)
    return steps, np.array([np.median(part[:, 1]) for part in parts])


def _least_squares(
    schedule: _Schedule, steps: np.ndarray, losses: np.ndarray, noise: float, misfit: float
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the parameters that fit losses and priors best, and their covariance (Laplace's approximation)."""
    from scipy import optimize  # here, because its import takes a sixth of a start

    mean, sd = np.array(list(PRIORS.values())).T
    weight = 1 / np.sqrt(noise**2 + misfit**2 * max(1.0, len(steps) / WEIGHT))

    def residuals(theta: np.ndarray) -> np.ndarray:
        return np.append(weight * (_law(theta, schedule, steps) - losses), (theta[2:] - mean) / sd)

    last = np.median(losses[-5:])
    drop = max(np.median(losses[:5]) - last, 1e-3 * abs(last), 1e-6)
    start = np.append(np.log([max(last - drop, 0.3 * last, 1e-3), drop]), mean)
    low, high = start - np.append([5.0, 12.0], 5 * sd), start + np.append([5.0, 12.0], 5 * sd)
    fitted = optimize.least_squares(residuals, start, bounds=(low, high), loss="huber", f_scale=HUBER, max_nfev=200)
    return fitted.x, np.linalg.pinv(fitted.jac.T @ fitted.jac)


def _variance(derivatives: np.ndarray, covariance: np.ndarray) -> np.ndarray:
    return np.einsum("si,ij,sj->s", derivatives, covariance, derivatives)


PLAN, DECAY, STOP = "on to the plan", "decay now", "stop"  # the futures, in this order
GO_ON, TOO_EARLY = "go on", "too early"  # advice is one of these, DECAY and STOP
DECAY_SHARE = 0.15  # "decay now" takes this share of the steps done; WSD decays over 10 to 20% (arXiv:2404.06395)
CENTINAT = 0.01
SURE = 2  # a future costs too much if it does even at the expected gain plus this many half-widths of the 80% interval


@dataclasses.dataclass(frozen=True)
class Future:
    """One way to go on or stop: its loss and gain (how far the loss falls from now on) with 80% intervals, and its cost."""

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
        """Returns the dollars for 0.01 nats; 0 if the future is free, else inf if the loss does not fall."""
        return _price(self.usd, self.gain)

    @property
    def cheapest(self) -> float:
        """Returns the dollars for 0.01 nats at the largest plausible gain."""
        return _price(self.usd, self.gain + SURE * (self.gain_high - self.gain))


@dataclasses.dataclass(frozen=True)
class Advice:
    word: str
    line: str


def futures(
    forecast: Forecast, end: int, seconds_per_step: float, usd_per_hour: float, decay_share: float = DECAY_SHARE
) -> list[Future]:
    """Returns the three futures of a run, in the order PLAN, DECAY, STOP. `decay_share`: of the steps done."""
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


def advice(ahead: Sequence[Future] | TooEarly, usd_per_centinat: float) -> Advice:
    """Returns the advice if 0.01 nats are worth `usd_per_centinat` dollars (0: any price), by each future's `cheapest`."""
    if isinstance(ahead, TooEarly):
        return Advice(TOO_EARLY, ahead.why)
    plan, decay, _ = ahead
    limit = f"{dollars(usd_per_centinat)} for 0.01 nats"
    if not usd_per_centinat or plan.cheapest <= usd_per_centinat:
        return Advice(GO_ON, f"go on: {_words(plan)}")
    if decay.cheapest <= usd_per_centinat:
        return Advice(DECAY, f"decay now: {_words(decay)}. The plan's rest is dearer than {limit}: {_words(plan)}")
    line = f"stop: all that is left is dearer than {limit}. The plan's rest: {_words(plan)}. {_words(decay)}"
    return Advice(STOP, line)


def table(ahead: Sequence[Future]) -> list[str]:
    lines = [f"{'':<16}{'steps':>8}{'loss':>9}{'80%':>18}{'hours':>8}{'dollars':>10}{'per 0.01 nats':>15}"]
    for f in ahead:
        price = dollars(f.usd_per_centinat) if f.usd and math.isfinite(f.usd_per_centinat) else "-"
        interval = f"{f.low:.4f}-{f.high:.4f}"
        usd = dollars(f.usd)
        lines.append(f"{f.name:<16}{f.steps:>8,}{f.loss:>9.4f}{interval:>18}{f.hours:>8.1f}{usd:>10}{price:>15}")
    return lines


def summary(ahead: Sequence[Future] | TooEarly, advised: Advice, done: int) -> dict:
    """Returns the futures after `done` steps for JSON and the run's report: {"advice": line, "rows": [...]}."""
    rows = []
    for f in [] if isinstance(ahead, TooEarly) else ahead:
        price = f.usd_per_centinat if math.isfinite(f.usd_per_centinat) else None
        row = {name: getattr(f, name) for name in ("name", "loss", "low", "high", "hours", "usd")}
        rows.append(row | {"step": done + f.steps, "usd_per_centinat": price})
    return {"advice": advised.line, "rows": rows}


def _price(usd: float, gain: float) -> float:
    return 0.0 if usd <= 0 else usd * CENTINAT / gain if gain > 0 else math.inf


def _words(f: Future) -> str:
    """Returns a future's steps, dollars, gain and price in a few words."""
    what = f"{f.steps:,} steps to loss {f.loss:.3f} ({f.low:.3f} to {f.high:.3f}), {f.gain:.3f} below now"
    what += f", for {dollars(f.usd)}" if f.usd else ""
    price = f.usd_per_centinat
    each = f", {dollars(price)} for 0.01 nats" if f.usd and math.isfinite(price) else ""
    return f"{'a decay of ' if f.name == DECAY else ''}{what}{each}"
