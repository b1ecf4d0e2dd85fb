"""Fits a scaling law to the finished runs of a ladder, and predicts a larger model's held-out loss with an interval.

    L(N, D) = e + a / N^alpha + b / D^beta      (Hoffmann et al. 2022, arXiv:2203.15556)

for N parameters (embeddings included) and D tokens, in nats per token of the ladder's own tokenizer and held-out text. As
in that paper, a Huber loss of log L is minimised from several starts. Nine points determine five constants poorly. So three
constants have wide priors from the published fits, and the interval is a bootstrap that redraws points, noise and priors
(`fit`). Beyond the largest run the law is less certain still: see DRIFT.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np
from scipy import optimize

from jaxlm.plan.rules import Law

LEVEL = 0.8  # of the intervals
WIDE = 0.1  # an interval wider than this share of the loss decides little
# Priors: (median, sd of the logarithm). Exponents: the published fits have .28 to .37 (plan/rules.py). E in nats a byte: the
# same fits have 1.69 and 1.82 nats for tokens of about 4.3 bytes; for other text E differs.
PRIORS = {"alpha": (0.34, 0.4), "beta": (0.34, 0.4), "e per byte": (0.4, 0.4)}
# Scatter of log L around the law: the difference between seeds at these sizes, and the law's own error. As a prior it counts
# as PRIOR_RUNS degrees of freedom besides the residuals'.
NOISE, PRIOR_RUNS = 0.004, 4
HUBER = 1.5  # sds from which a residual counts linearly
# The sd of the law's error beyond the largest run, as a share of the fall of the loss that it predicts from there on. Two
# ladders whose targets were trained (dev/LOG.md) were off by .30 and .65 of that fall: both losses came out lower.
DRIFT = 0.5
DRAWS = 100
CONSTANTS = ("e", "a", "b", "alpha", "beta")


Run = Mapping  # a finished run's `parameters`, `tokens` and `loss`, its held-out loss in nats per token


@dataclasses.dataclass(frozen=True)
class Fit:
    """A law with its uncertainty.

    `noise`: sd of log L of a run around the law. `draws_Kx6`: e, a, b, alpha, beta and noise of K laws that fit equally well.
    `params`, `tokens`: the largest run of the ladder, where the drift begins.
    """

    law: Law
    noise: float
    draws_Kx6: np.ndarray
    params: float
    tokens: float

    def loss(self, params: float, tokens: float) -> tuple[float, float, float]:
        """Predicts the loss of a finished run: (loss, low, high), with an interval of probability LEVEL."""
        e, a, b, alpha, beta, noise = self.draws_Kx6.T
        laws = e + a / params**alpha + b / tokens**beta
        known = e + a / min(params, self.params) ** alpha + b / min(tokens, self.tokens) ** beta
        # The same draws for every prediction.
        scatter, drift = np.random.default_rng(1).standard_normal((2, len(laws)))
        losses = laws * np.exp(noise * scatter) + DRIFT * (known - laws) * drift
        low, high = np.quantile(losses, (0.5 - LEVEL / 2, 0.5 + LEVEL / 2))
        loss = self.law.loss(params, tokens)
        return loss, min(loss, float(low)), max(loss, float(high))


def fit(runs: Sequence[Run], bytes_per_token: float, draws: int = DRAWS) -> Fit:
    """Fits the law to finished runs. Takes about a second with all draws. Raises ValueError for one size or number of tokens.

    The interval is a parametric bootstrap. Each draw has its own noise (by the residuals; few points give it long tails), its
    own losses and its own medians of the priors. `bytes_per_token` is of the held-out text: E's prior is in nats a byte.
    """
    if min(len({run[key] for run in runs}) for key in ("parameters", "tokens")) < 2:
        raise ValueError("a fit takes two sizes and two numbers of tokens")
    problem = _Problem(runs)
    logs = np.log([run["loss"] for run in runs])
    priors = np.log([PRIORS["e per byte"][0] * bytes_per_token, PRIORS["alpha"][0], PRIORS["beta"][0]])
    theta = problem.solve(logs, priors, NOISE, problem.starts(float(np.exp(logs.min()))))
    residuals = problem.logs(theta) - logs
    free = max(len(runs) - len(theta), 0)
    rng = np.random.default_rng(0)
    drawn_laws = []
    for _ in range(draws):
        noise = math.sqrt((PRIOR_RUNS * NOISE**2 + float(residuals @ residuals)) / rng.chisquare(PRIOR_RUNS + free))
        drawn = problem.logs(theta) + noise * rng.standard_normal(len(logs))
        other = priors + np.array(_SPREAD) * rng.standard_normal(len(priors))
        drawn_laws.append([*problem.constants(problem.solve(drawn, other, noise, [theta])), noise])
    noise = math.sqrt((PRIOR_RUNS * NOISE**2 + float(residuals @ residuals)) / (PRIOR_RUNS + free))
    last = max(runs, key=lambda run: run["parameters"] * run["tokens"])
    law = Law("ladder", **dict(zip(CONSTANTS, problem.constants(theta), strict=True)))
    return Fit(law, noise, np.array(drawn_laws), last["parameters"], last["tokens"])


_SPREAD = [PRIORS[name][1] for name in ("e per byte", "alpha", "beta")]


class _Problem:
    """The law in nearly independent constants: logs of e, of both terms at the mean of the runs, of alpha and beta."""

    def __init__(self, runs: Sequence[Run]):
        n, d = (np.log([run[key] for run in runs]) for key in ("parameters", "tokens"))
        self.middle = float(n.mean()), float(d.mean())
        self.n, self.d = n - n.mean(), d - d.mean()

    def starts(self, lowest: float) -> list[np.ndarray]:
        grid = itertools.product((0.3, 0.7), (0.2, 0.5, 0.8), (0.2, 0.5))
        return [
            np.log([e * lowest, share * (1 - e) * lowest, (1 - share) * (1 - e) * lowest, exponent, exponent])
            for e, share, exponent in grid
        ]

    def terms(self, theta: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        e, a, b, alpha, beta = np.exp(theta)
        return e * np.ones_like(self.n), a * np.exp(-alpha * self.n), b * np.exp(-beta * self.d)

    def logs(self, theta: np.ndarray) -> np.ndarray:
        return np.log(sum(self.terms(theta)))

    def constants(self, theta: np.ndarray) -> list[float]:
        e, a, b, alpha, beta = np.exp(theta).tolist()
        n, d = self.middle
        return [e, a * math.exp(alpha * n), b * math.exp(beta * d), alpha, beta]

    def solve(self, logs: np.ndarray, priors: np.ndarray, noise: float, starts: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the theta with the least Huber loss of log L and of the priors (medians of e, alpha, beta, as logs)."""

        def residuals(theta: np.ndarray) -> np.ndarray:
            return np.append((self.logs(theta) - logs) / noise, (theta[[0, 3, 4]] - priors) / _SPREAD)

        def slopes(theta: np.ndarray) -> np.ndarray:
            e, a, b = self.terms(theta)
            alpha, beta = np.exp(theta[3:])
            by = np.stack([e, a, b, -alpha * self.n * a, -beta * self.d * b], -1) / (noise * (e + a + b)[:, None])
            return np.vstack([by, np.eye(5)[[0, 3, 4]] / np.array(_SPREAD)[:, None]])

        low, high = np.log([1e-3, 1e-4, 1e-4, 0.02, 0.02]), np.log([50, 50, 50, 2, 2])
        options = {"jac": slopes, "bounds": (low, high), "loss": "huber", "f_scale": HUBER, "max_nfev": 200}
        tries = [
            optimize.least_squares(residuals, np.clip(start, low + 0.01, high - 0.01), **options) for start in starts
        ]
        return min(tries, key=lambda attempt: attempt.cost).x


def missed(runs: Sequence[Run], bytes_per_token: float) -> float:
    """Returns the worst relative error, with its sign, of predictions of the largest size's losses from the other sizes."""
    largest = max(run["parameters"] for run in runs)
    law = fit([run for run in runs if run["parameters"] < largest], bytes_per_token, draws=0).law
    last = [run for run in runs if run["parameters"] == largest]
    errors = [law.loss(largest, run["tokens"]) / run["loss"] - 1 for run in last]
    return max(errors, key=abs)


def best_rate(tried: Sequence[tuple[float, float | None]]) -> tuple[float, bool]:
    """Returns (the best rate, True if it is the smallest or the largest that was tried).

    It is the minimum of a parabola in log rate, or a tried rate: at an end, or beside a rate that diverged (a loss of None).
    """
    losses = sorted((math.log(rate), math.inf if loss is None else loss) for rate, loss in tried)
    index = min(range(len(losses)), key=lambda i: losses[i][1])
    if index in (0, len(losses) - 1):
        return math.exp(losses[index][0]), True
    x, y = zip(*losses[index - 1 : index + 2], strict=True)
    if not math.isfinite(sum(y)):
        return math.exp(x[1]), False
    square, slope, _ = np.polyfit(np.array(x) - x[1], y, 2)
    return math.exp(x[1] - slope / (2 * square)), False
