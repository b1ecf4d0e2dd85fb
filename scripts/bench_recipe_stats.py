"""The statistics of scripts/bench_recipe.py: tokens to a loss, as a ratio of two arms, with paired bootstrap intervals.

A curve is the held-out losses of finished runs: tokens of the run -> seed -> loss. Each point is a separate run whose learning
rate decayed to its end; no point is from the middle of a run. Runs of one seed had the same batches and, if their shapes are
the same, the same initial weights, so arms are compared seed by seed.
"""

import dataclasses
import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence

import numpy as np

Curve = Mapping[int, Mapping[int, float]]

LEVEL = 0.95  # of all intervals. With three seeds, of which only 27 resamples exist, it gives the seeds' range
ALL_RESAMPLES = 50_000  # up to this number all resamples are taken; else DRAWN random ones
DRAWN = 10_000


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A figure over the seeds and its bootstrap interval.

    Attributes:
      value, low, high: the figure and the interval's ends. For `ratio`: inf if the target was not reached, 0 if it was
        reached before the arm's first budget.
      seeds: the number of seeds.
    """

    value: float
    low: float
    high: float
    seeds: int


@dataclasses.dataclass(frozen=True)
class Ratio(Estimate):
    """The tokens that an arm needs to reach a loss, over the tokens that its base needs.

    Attributes:
      target: the loss.
      tokens, base_tokens: the tokens that arm and base need, from the mean losses over the seeds.
      least, most: the range of ratios that both arms' budgets can measure; nothing is extrapolated.
    """

    target: float
    tokens: float
    base_tokens: float
    least: float
    most: float

    def shown(self, times: float = 1.0) -> str:
        """Returns a text with the ratio and its interval, multiplied by a number such as the ratio of two step times."""
        words = f"{self._one(self.value, times)} [{self._one(self.low, times)}, {self._one(self.high, times)}]"
        return f"not reached: {words}" if math.isinf(self.value) else words

    def _one(self, value: float, times: float) -> str:
        if math.isinf(value):
            return f">{times * self.most:.2f}"
        return f"{times * value:.3f}" if value else f"<{times * self.least:.2f}"


def complete(curve: Curve, seeds: Sequence[int]) -> dict[int, dict[int, float]]:
    """Returns the part of a curve whose budgets all these seeds have finished."""
    return {
        tokens: {seed: curve[tokens][seed] for seed in seeds}
        for tokens in sorted(curve)
        if all(seed in curve[tokens] for seed in seeds)
    }


def tokens_to(budgets: Sequence[int], losses: Sequence[float], target: float) -> float:
    """Returns the tokens at which a curve first reaches a loss, interpolated in log tokens between finished budgets.

    0.0 if the first budget's loss is below the target already, inf if no budget reaches it: a curve is never extrapolated.

    Args:
      budgets: tokens of the finished runs, ascending.
      losses: the loss of each run.
      target: a loss.
    """
    for i, (tokens, loss) in enumerate(zip(budgets, losses, strict=True)):
        if loss == target:
            return float(tokens)
        if loss < target:
            if i == 0:
                return 0.0
            if math.isinf(losses[i - 1]):
                return float(tokens)  # the previous run diverged, so nothing to interpolate
            share = (losses[i - 1] - target) / (losses[i - 1] - loss)
            return math.exp(math.log(budgets[i - 1]) + share * math.log(tokens / budgets[i - 1]))
    return math.inf


def resamples(seeds: Sequence[int]) -> list[tuple[int, ...]]:
    """Returns the bootstrap's draws of seeds with replacement: all draws, or `DRAWN` random ones if there are too many."""
    n = len(seeds)
    if n**n <= ALL_RESAMPLES:
        return list(itertools.product(seeds, repeat=n))
    draw = random.Random(0)
    return [tuple(draw.choices(seeds, k=n)) for _ in range(DRAWN)]


def estimate(seeds: Sequence[int], figure: Callable[[Sequence[int]], float]) -> Estimate:
    """Returns `figure(seeds)` with its percentile interval over the resamples. The ends are always values of resamples."""
    values = [figure(picks) for picks in resamples(seeds)]
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(values, (tail, 1 - tail), method="inverted_cdf")
    return Estimate(figure(seeds), float(low), float(high), len(seeds))


def difference(arm: Mapping[int, float], base: Mapping[int, float]) -> Estimate | None:
    """Returns an arm's loss minus its base's, paired by seed; None if no seed is finished in both.

    A diverged run has the loss inf.
    """
    seeds = sorted(arm.keys() & base.keys())
    if not seeds:
        return None

    def mean(picks: Sequence[int]) -> float:
        if any(math.isinf(base[seed]) for seed in picks):
            return -math.inf
        return _mean(arm, picks) - _mean(base, picks)

    return estimate(seeds, mean)


def behind(arm: Mapping[int, float], base: Mapping[int, float]) -> bool:
    """True if an arm's loss exceeds its base's by more than the interval. Needs at least two seeds."""
    found = difference(arm, base)
    return found is not None and found.seeds > 1 and found.low > 0


def best_factor(by_factor: Mapping[float, Mapping[int, float]]) -> float:
    """Returns the factor of the best rate; 1 unless that rate beats the rule's by more than its interval.

    Args:
      by_factor: factor -> seed -> loss, at one budget. Factors that lack a seed of the rule's are skipped.
    """
    rule = by_factor.get(1.0, {})
    seeds = sorted(rule)
    found = {
        factor: _mean(losses, seeds) for factor, losses in by_factor.items() if seeds and rule.keys() <= losses.keys()
    }
    best = min(found, key=lambda factor: (found[factor], factor != 1.0), default=1.0)
    return best if best == 1.0 or behind(rule, by_factor[best]) else 1.0


def ratio(arm: Curve, base: Curve, tokens: int, of_base: bool = True) -> Ratio | None:
    """Returns the arm's tokens to a loss over its base's, with the interval over the seeds that both finished.

    The target is the lowest mean loss of the base (or, if not `of_base`, of the arm) with at most `tokens` tokens, computed
    in each resample again. So an arm against itself gives exactly 1. None if no seed has finished enough runs.
    """
    first = [set(curve[min(curve)]) for curve in (arm, base) if curve]
    seeds = sorted(set.intersection(*first)) if len(first) == 2 else []
    arm, base = complete(arm, seeds), complete(base, seeds)
    owner = base if of_base else arm
    if not seeds or tokens not in owner:
        return None

    def both(picks: Sequence[int]) -> tuple[float, float, float]:
        target = min(_mean(owner[budget], picks) for budget in owner if budget <= tokens)
        return target, *(tokens_to(list(c), [_mean(c[b], picks) for b in c], target) for c in (arm, base))

    def figure(picks: Sequence[int]) -> float:
        _, ours, theirs = both(picks)
        if theirs == 0 or math.isinf(ours):
            return math.inf
        return ours / theirs  # x / inf = 0: the base never reached the target

    found = estimate(seeds, figure)
    target, ours, theirs = both(seeds)
    least = min(arm) / theirs if of_base else ours / max(base)
    most = max(arm) / theirs if of_base else ours / min(base)
    return Ratio(found.value, found.low, found.high, found.seeds, target, ours, theirs, least, most)


def _mean(losses: Mapping[int, float], picks: Sequence[int]) -> float:
    return math.fsum(losses[seed] for seed in picks) / len(picks)
