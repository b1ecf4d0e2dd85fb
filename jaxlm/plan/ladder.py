"""Fits a scaling law to the finished runs of a ladder, and foretells a larger model's held-out loss with an interval.

    L(N, D) = e + a / N^alpha + b / D^beta      (Hoffmann et al. 2022, arXiv:2203.15556)

for N parameters (embeddings included) and D tokens, in nats per token of the ladder's own tokenizer and held-out text. As
there, a Huber loss of log L is minimised from several starts. Nine points say little about five constants, so three of
them have wide priors from the published fits, and the interval is a bootstrap in which the points, their noise and the priors are
drawn anew (`fit`). What lies beyond the largest run is less certain still: see DRIFT.

`jaxlm ladder` keeps what it found in LADDER/ladder.json, which is written anew after each run, and `read` takes back:

    version   1
    target    the model that is foretold: config (as it was named), parameters, tokens, vocab_size, lr, and shape:
              family, n_layers, d_model, n_heads, n_kv_heads, head_dim, d_ff
    same      what must not change while the ladder stands: {"model.d_model": 256, "data": sha256 of the manifest, ...}
    held_out  the text that all losses are of: seq_len, rows (of each source, at most), source -> weight
    machine   the device kind and the number of devices ("cpu x 1"); null before a speed was measured
    hours     limit (what was asked for), planned (null if the speed is unknown), spent
    runs      one for each run, in the order in which they are done: name (its folder is LADDER/runs/NAME), d_model,
              n_layers, parameters, tokens, steps, batch_size (rows), lr, times (its rate over the one that the target's own
              implies), kind ("grid", or "rate" for one that only varies the rate), planned_hours (or null), hours, loss,
              bits_per_byte (source -> value), bytes_per_token, why. `loss` is null until the run is done, and stays null
              if it did not end well; then `why` says so.
    rates     null until the runs at three rates are done; then {"tried": [{"lr", "times", "loss"}, ...], "best": the lowest
              point of a parabola through them in log lr, or the best of them, "edge": true if that is the smallest or the
              largest, "rule": the published rule's rate for that run, or null, "lr": the target's own, scaled to that run}
    fit       null until all runs of the grid are done; then law {"e", "a", "b", "alpha", "beta"}, noise (sd of log L),
              draws [[e, a, b, alpha, beta, noise], ...], from {"parameters", "tokens"} (where the drift begins),
              check {"parameters", "error"}: how far off the largest size's losses are when foretold from the others, as a
              share of them, the worst one
    foretold  null until then; then rows {"parameters", "tokens", "loss", "low", "high"} of the target after a quarter, half,
              all and twice its tokens, each a finished run; the third is the target itself
"""

import dataclasses
import json
import math
import pathlib
import typing
from collections.abc import Mapping, Sequence

import numpy as np
from scipy import optimize

from jaxlm import files
from jaxlm.config import ConfigError
from jaxlm.plan.scaling import Law

FILE, VERSION = "ladder.json", 1
LEVEL = 0.8  # of the intervals
WIDE = 0.1  # an interval wider than this share of the loss decides little
# Priors: (median, sd of the logarithm). Exponents: the published fits have .28 to .37 (plan/scaling.py). E in nats a byte: the
# same fits have 1.69 and 1.82 nats for tokens of about 4.3 bytes; other text has more or less of it.
PRIORS = {"alpha": (0.34, 0.4), "beta": (0.34, 0.4), "e per byte": (0.4, 0.4)}
# Scatter of log L around the law: what two seeds differ by at these sizes, and what the law itself is off. It counts as much as
# PRIOR_RUNS degrees of freedom beside the residuals'.
NOISE, PRIOR_RUNS = 0.004, 4
HUBER = 1.5  # sds from which a residual counts linearly
DRIFT = 0.1  # of the change of loss that is foretold from the largest run on: a guess of what the law is off beyond it, as one sd
DRAWS = 200
_CONSTANTS = ("e", "a", "b", "alpha", "beta")


@dataclasses.dataclass(frozen=True)
class Point:
    """A finished run: its parameters, its tokens, its held-out loss in nats per token."""

    params: float
    tokens: float
    loss: float


@dataclasses.dataclass(frozen=True)
class Fit:
    """A law with what is uncertain about it.

    Attributes:
      law: the constants.
      noise: sd of log L of a run around the law.
      draws_Kx6: e, a, b, alpha, beta and noise of K laws that would fit as well.
      params, tokens: the largest run of the ladder, where the drift begins.
    """

    law: Law
    noise: float
    draws_Kx6: np.ndarray
    params: float
    tokens: float

    def loss(self, params: float, tokens: float) -> tuple[float, float, float]:
        """Returns the loss of a finished run, and the ends of the interval that holds it with LEVEL: (loss, low, high)."""
        e, a, b, alpha, beta, noise = self.draws_Kx6.T
        laws = e + a / params**alpha + b / tokens**beta
        last = e + a / self.params**alpha + b / self.tokens**beta
        scatter, drift = np.random.default_rng(1).standard_normal((2, len(laws)))  # the same for every run that is asked for
        found = laws * np.exp(noise * scatter) + DRIFT * (last - laws) * drift
        low, high = np.quantile(found, (0.5 - LEVEL / 2, 0.5 + LEVEL / 2))
        loss = self.law.loss(params, tokens)
        return loss, min(loss, float(low)), max(loss, float(high))


def fit(points: Sequence[Point], bytes_per_token: float, draws: int = DRAWS) -> Fit:
    """Fits the law to finished runs. Takes about 2 s with all draws.

    The interval is a parametric bootstrap: each draw has its own noise (by the residuals, with as many degrees of freedom as are
    left, so that few points give long tails), its own losses, and priors with other medians; the law is fitted to it again.

    Args:
      points: at least two sizes with at least two numbers of tokens.
      bytes_per_token: of the held-out text; E's prior is in nats a byte.
      draws: of the bootstrap.

    Raises:
      ValueError: there are fewer sizes or budgets.
    """
    if min(len({p.params for p in points}), len({p.tokens for p in points})) < 2:
        raise ValueError("a fit takes two sizes and two numbers of tokens")
    problem = _Problem.of(points)
    logs = np.log([p.loss for p in points])
    priors = np.log([PRIORS["e per byte"][0] * bytes_per_token, PRIORS["alpha"][0], PRIORS["beta"][0]])
    theta = problem.solve(logs, priors, NOISE, problem.starts(float(np.exp(logs.min()))))
    residuals = problem.logs(theta) - logs
    free = max(len(points) - len(theta), 0)
    rng = np.random.default_rng(0)
    found = []
    for _ in range(draws):
        noise = math.sqrt((PRIOR_RUNS * NOISE**2 + float(residuals @ residuals)) / rng.chisquare(PRIOR_RUNS + free))
        drawn = problem.logs(theta) + noise * rng.standard_normal(len(logs))
        other = priors + np.array(_SPREAD) * rng.standard_normal(len(priors))
        found.append([*problem.constants(problem.solve(drawn, other, noise, [theta])), noise])
    noise = math.sqrt((PRIOR_RUNS * NOISE**2 + float(residuals @ residuals)) / (PRIOR_RUNS + free))
    last = max(points, key=lambda p: p.params * p.tokens)
    law = Law("ladder", **dict(zip(_CONSTANTS, problem.constants(theta), strict=True)))
    return Fit(law, noise, np.array(found), last.params, last.tokens)


_SPREAD = [PRIORS[name][1] for name in ("e per byte", "alpha", "beta")]


@dataclasses.dataclass(frozen=True)
class _Problem:
    """The law in other constants, which points determine each by its own: theta = logs of e, the two terms at the middle of the
    points, alpha, beta.

    Attributes:
      n, d: logs of parameters and tokens of the points, over their means.
      middle: these means.
    """

    n: np.ndarray
    d: np.ndarray
    middle: tuple[float, float]

    @classmethod
    def of(cls, points: Sequence[Point]) -> "_Problem":
        n, d = np.log([p.params for p in points]), np.log([p.tokens for p in points])
        return cls(n - n.mean(), d - d.mean(), (float(n.mean()), float(d.mean())))

    def starts(self, lowest: float) -> list[np.ndarray]:
        """Places to begin, for a lowest loss."""
        shares = [(e, share) for e in (0.3, 0.7) for share in (0.2, 0.5, 0.8)]
        return [
            np.log([e * lowest, share * (1 - e) * lowest, (1 - share) * (1 - e) * lowest, exponent, exponent])
            for e, share in shares
            for exponent in (0.2, 0.5)
        ]

    def terms(self, theta: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        e, a, b, alpha, beta = np.exp(theta)
        return e * np.ones_like(self.n), a * np.exp(-alpha * self.n), b * np.exp(-beta * self.d)

    def logs(self, theta: np.ndarray) -> np.ndarray:
        """log L at the points."""
        return np.log(sum(self.terms(theta)))

    def constants(self, theta: np.ndarray) -> list[float]:
        """e, a, b, alpha, beta."""
        e, a, b, alpha, beta = np.exp(theta).tolist()
        n, d = self.middle
        return [e, a * math.exp(alpha * n), b * math.exp(beta * d), alpha, beta]

    def solve(self, logs: np.ndarray, priors: np.ndarray, noise: float, starts: Sequence[np.ndarray]) -> np.ndarray:
        """The theta with the least Huber loss of log L and of the priors (medians of e, alpha, beta, as logs)."""

        def residuals(theta: np.ndarray) -> np.ndarray:
            return np.append((self.logs(theta) - logs) / noise, (theta[[0, 3, 4]] - priors) / _SPREAD)

        def slopes(theta: np.ndarray) -> np.ndarray:
            e, a, b = self.terms(theta)
            alpha, beta = np.exp(theta[3:])
            by = np.stack([e, a, b, -alpha * self.n * a, -beta * self.d * b], -1) / (noise * (e + a + b)[:, None])
            return np.vstack([by, np.eye(5)[[0, 3, 4]] / np.array(_SPREAD)[:, None]])

        low, high = np.log([1e-3, 1e-4, 1e-4, 0.02, 0.02]), np.log([50, 50, 50, 2, 2])
        kept = {"jac": slopes, "bounds": (low, high), "loss": "huber", "f_scale": HUBER, "max_nfev": 200}
        tries = [optimize.least_squares(residuals, np.clip(start, low + 0.01, high - 0.01), **kept) for start in starts]
        return min(tries, key=lambda found: found.cost).x


def missed(points: Sequence[Point], bytes_per_token: float) -> float:
    """Returns how far off the largest size's losses are when foretold from the other sizes: the worst, as a share of the loss.

    Raises:
      ValueError: there are fewer than two other sizes.
    """
    largest = max(p.params for p in points)
    law = fit([p for p in points if p.params < largest], bytes_per_token, draws=0).law
    errors = [law.loss(p.params, p.tokens) / p.loss - 1 for p in points if p.params == largest]
    return max(errors, key=abs)


def best_rate(tried: Sequence[tuple[float, float | None]]) -> tuple[float, bool]:
    """Returns (the best rate, True if it is the smallest or the largest that was tried).

    It is the lowest point of the parabola through three losses in the logarithm of the rate, if that is among them, else the
    best rate itself.

    Args:
      tried: (rate, loss) of each; a loss of None is that of a run that diverged.
    """
    found = sorted((math.log(rate), math.inf if loss is None else loss) for rate, loss in tried)
    index = min(range(len(found)), key=lambda i: found[i][1])
    if index in (0, len(found) - 1):
        return math.exp(found[index][0]), True
    x, y = zip(*found[index - 1 : index + 2], strict=True)
    if not math.isfinite(sum(y)):
        return math.exp(x[1]), False
    square, slope, _ = np.polyfit(np.array(x) - x[1], y, 2)
    return math.exp(x[1] - slope / (2 * square)), False


def fit_to_json(found: Fit) -> dict[str, typing.Any]:
    """Returns `fit` as ladder.json has it, without its check."""
    law = {name: getattr(found.law, name) for name in _CONSTANTS}
    draws = [[float(f"{value:.6g}") for value in draw] for draw in found.draws_Kx6.tolist()]
    return {
        "law": law,
        "noise": found.noise,
        "draws": draws,
        "from": {"parameters": found.params, "tokens": found.tokens},
    }


def fit_of(ladder: Mapping[str, typing.Any]) -> Fit | None:
    """Returns the fit of what `read` returned; None if its runs are not all done."""
    if not (found := ladder["fit"]):
        return None
    last, draws = found["from"], np.array(found["draws"])
    return Fit(Law("ladder", **found["law"]), found["noise"], draws, last["parameters"], last["tokens"])


def read(folder: pathlib.Path) -> dict[str, typing.Any] | None:
    """Returns what LADDER/ladder.json holds; None if there is no such file. Raises ConfigError if it is damaged or of another version."""
    path = folder / FILE
    try:
        found = json.loads(path.read_bytes())
        if found["version"] != VERSION:
            raise ConfigError(f"{path} is of version {found['version']}, this jaxlm writes {VERSION}: delete it")
        if not ({"target", "same", "runs", "fit"} <= found.keys()):
            raise ValueError
        fit_of(found)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} is damaged: delete it; runs that are done are kept") from error
    return found


def write(folder: pathlib.Path, ladder: Mapping[str, typing.Any]) -> None:
    """Writes LADDER/ladder.json. Raises OSError if it can't."""
    folder.mkdir(parents=True, exist_ok=True)
    files.write_atomically(folder / FILE, (json.dumps(ladder, indent=1) + "\n").encode())
