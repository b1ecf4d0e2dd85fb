"""Tells differences between the arms of a sweep from noise. Imports no JAX.

Each seed is a block: all arms train on it, so what a seed does to all of them cancels in a difference. What arms and seeds
together leave is the noise, one variance for all arms (a two-way layout without replication). The differences are named
together: none is named in 95% of the sweeps in which no arm differs (Dunnett 1955 for comparisons with one base; here the
largest of correlated t's, drawn). Pair by pair, a t-test names twice the scatter in 11% of sweeps.

Shapes: S seeds, A arms, C differences; `...`: any number of sweeps at once.
"""

import bisect
import dataclasses
import functools
import math
import typing

import numpy as np
from scipy import optimize, stats

LEVEL = 0.05  # the share of sweeps without a difference in which one is named
POWER = 0.8  # the share of sweeps that find the smallest difference
_DRAWS, _SEED = 100_000, 0


class Noise(typing.NamedTuple):
    """The variance of a run as a sum of squares and its degrees of freedom; 0 and 0: unknown."""

    squares: float | np.ndarray
    df: int

    @property
    def scatter(self) -> float | np.ndarray:
        """The standard deviation of a run beyond its arm and its seed."""
        return np.sqrt(self.squares / self.df)

    def with_(self, other: "Noise") -> "Noise":
        return Noise(self.squares + other.squares, self.df + other.df)


UNKNOWN = Noise(0.0, 0)


def left_over(losses_SxA: np.ndarray) -> Noise:
    """Returns what arms and seeds leave of the losses [..., S, A]."""
    by_arm, by_seed = losses_SxA.mean(-2, keepdims=True), losses_SxA.mean(-1, keepdims=True)
    rest_SxA = losses_SxA - by_arm - by_seed + losses_SxA.mean((-2, -1), keepdims=True)
    seeds, arms = losses_SxA.shape[-2:]
    return Noise((rest_SxA**2).sum((-2, -1)), (seeds - 1) * (arms - 1))


@dataclasses.dataclass(frozen=True, eq=False)
class Family:
    """The differences that are named together: `weights_CxA` of the arms' means, which add up to 0 in each row."""

    weights_CxA: np.ndarray

    def errors(self, seeds: int) -> np.ndarray:
        """Returns the standard error of each difference, as a multiple of the scatter."""
        return np.linalg.norm(self.weights_CxA, axis=1) / math.sqrt(seeds)

    @functools.cached_property
    def _largest(self) -> np.ndarray:
        """Draws the largest difference in standard errors, of any sign, where there is none and the scatter is known."""
        unit_CxA = self.weights_CxA / np.linalg.norm(self.weights_CxA, axis=1, keepdims=True)
        drawn = np.random.default_rng(_SEED).standard_normal((_DRAWS, self.weights_CxA.shape[1]))
        return np.abs(drawn @ unit_CxA.T).max(1)

    def critical(self, df: int) -> float:
        """Returns how many standard errors a difference must exceed; inf if the noise is unknown."""
        if not df:
            return math.inf
        scatter = np.sqrt(np.random.default_rng(_SEED + 1).chisquare(df, _DRAWS) / df)
        return float(np.quantile(self._largest / scatter, 1 - LEVEL))

    def judge(self, losses_SxA: np.ndarray, borrowed: Noise = UNKNOWN) -> tuple[np.ndarray, np.ndarray]:
        """Returns the differences [..., C], and half of each one's interval: a larger difference is more than noise.

        Args:
          losses_SxA: the losses [..., S, A] of all arms on all seeds.
          borrowed: the noise of other sweeps.
        """
        noise, seeds = left_over(losses_SxA).with_(borrowed), losses_SxA.shape[-2]
        differences = losses_SxA.mean(-2) @ self.weights_CxA.T
        if not noise.df:
            return differences, np.full_like(differences, math.inf)
        return differences, self.critical(noise.df) * np.multiply.outer(noise.scatter, self.errors(seeds))

    def smallest(self, seeds: int, borrowed_df: int = 0) -> float:
        """Returns the smallest difference that is found in POWER of sweeps, in scatters; inf if the noise is unknown."""
        critical = self.critical(df := (seeds - 1) * (self.weights_CxA.shape[1] - 1) + borrowed_df)
        if critical == math.inf:
            return math.inf
        away = optimize.brentq(lambda shift: stats.nct.sf(critical, df, shift) - POWER, 0.1, 10 * critical)
        return float(away * self.errors(seeds).max())

    def seeds_for_half(self, seeds: int, borrowed_df: int = 0) -> int:
        """Returns how many seeds find half of the smallest difference of `seeds` seeds: at most four times as many."""
        half, more = self.smallest(seeds, borrowed_df) / 2, range(seeds, 4 * seeds)
        return seeds + bisect.bisect_left(more, True, key=lambda n: self.smallest(n, borrowed_df) <= half)
