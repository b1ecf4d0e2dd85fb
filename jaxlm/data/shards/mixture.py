"""Decides which source each row comes from, and which batches a run skips. Pure functions.

Grain's `MapDataset.mix` is not used: it truncates weights to integers (87/10/3 becomes 2899/333/100) and refuses a
weight of zero. Shapes: C slots of a cycle, K sources.
"""

import dataclasses
import fractions
import functools
import math
import sys
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from jaxlm.config import Config, ConfigError, PrepareSourceConfig, SourceConfig

MAX_CYCLE = 65536
Windows = tuple[tuple[int, int], ...]  # of batch numbers from 1: (first, last), both included


def normalise_mixture(mixture: Mapping[str, float], names: Sequence[str]) -> dict[str, fractions.Fraction]:
    """Returns source -> exact share, for positive weights, read as decimals (0.87 is 87/100). Raises ConfigError."""
    for name, weight in mixture.items():
        if name not in names:
            raise ConfigError(f"mixture names source '{name}', but the data has {', '.join(sorted(names))}")
        if not 0 <= weight <= sys.float_info.max:
            raise ConfigError(f"mixture weight of '{name}' is {weight}; give a number of at least 0")
    weights = {name: fractions.Fraction(repr(float(mixture[name]))) for name in names if mixture.get(name, 0) > 0}
    if not weights:
        raise ConfigError("every mixture weight is 0; give at least one source a positive weight")
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()}


def drawn_mixture(mixture: Mapping[str, float], names: Sequence[str]) -> dict[str, fractions.Fraction]:
    """Returns source -> its share of the slots: the share of `normalise_mixture`, as `mixture_cycle` may round it."""
    shares = normalise_mixture(mixture, sorted(names))
    _, per_cycle = cycle_ranks(tuple(shares.values()))
    drawn = {name: fractions.Fraction(int(n), int(per_cycle.sum())) for name, n in zip(shares, per_cycle, strict=True)}
    return {name: drawn[name] for name in normalise_mixture(mixture, names)}


def rounding(mixture: Mapping[str, float], names: Sequence[str]) -> str:
    """Returns a line on the source whose drawn share differs most from its weight's share, if by over 1%; else ""."""
    shares, drawn = normalise_mixture(mixture, names), drawn_mixture(mixture, names)
    off = {name: abs(float(drawn[name] / share) - 1) for name, share in shares.items()}
    worst = max(off, key=off.get)
    if off[worst] <= 0.01:
        return ""
    more = sum(value > 0.01 for value in off.values()) - 1
    return (
        f"{worst} is drawn with a share of {float(drawn[worst]):.3g}, its weight is {float(shares[worst]):.3g}: shares are "
        f"whole 65,536ths where weights have no smaller common denominator{f'; {more} more are off by over 1%' if more else ''}"
    )


def weights_of(listed: Mapping[str, SourceConfig | PrepareSourceConfig], names: Sequence[str]) -> dict[str, float]:
    """Returns name -> weight in the config, or 1 for each if `listed` is empty. Raises ConfigError if it lacks a name."""
    if not listed:
        return {name: 1.0 for name in names}
    if missing := [name for name in names if name not in listed]:
        advice = f'add data.sources.{missing[0]} = dict(path="", weight=...) to the config, 0 to leave it out'
        raise ConfigError(f"the data has the source '{missing[0]}', but the config gives it no weight: {advice}")
    return {name: listed[name].weight for name in names}


@functools.lru_cache(maxsize=64)
def mixture_cycle(shares: tuple[fractions.Fraction, ...]) -> np.ndarray:
    """Returns one period of the mixture, int32[C]: the source of each slot.

    After any number of slots, the draws of a source differ from its share of the cycle by less than 1: each draw has a
    first slot and a deadline, and the earliest deadline goes first (Tijdeman 1980; Baruah et al. 1996, Pfair
    scheduling). C is the common denominator of the shares, or 65,536 with rounded shares, none of them 0.
    """
    cycle = math.lcm(*(share.denominator for share in shares))
    counts = [int(share * cycle) for share in shares] if cycle <= MAX_CYCLE else _round_shares(shares, MAX_CYCLE)
    cycle = min(cycle, MAX_CYCLE)
    drawn = [0] * len(counts)
    order = np.empty(cycle, np.int32)
    for slot in range(cycle):
        # Draw j of a source with share c/C may start at slot floor(j*C/c) and must be done by slot ceil((j+1)*C/c).
        released = (k for k, c in enumerate(counts) if drawn[k] < c and drawn[k] * cycle // c <= slot)
        source = min(released, key=lambda k: (-(-(drawn[k] + 1) * cycle // counts[k]), k))
        order[slot] = source
        drawn[source] += 1
    return order


def _round_shares(shares: Sequence[fractions.Fraction], total: int) -> list[int]:
    """Rounds shares to integers that sum to `total` (largest remainder), each at least 1 unless its share is 0."""
    counts = [max(1, math.floor(share * total)) if share else 0 for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda k: (counts[k] - shares[k] * total, k))
    for k in by_remainder[: max(0, total - sum(counts))]:
        counts[k] += 1
    while sum(counts) > total:
        counts[counts.index(max(counts))] -= 1
    return counts


@functools.lru_cache(maxsize=64)
def cycle_ranks(shares: tuple[fractions.Fraction, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Returns (how often each slot's source came before in the cycle, int64[C]; slots of each source, int64[K])."""
    cycle = mixture_cycle(shares)
    rank = np.empty(cycle.size, np.int64)
    per_cycle = np.bincount(cycle, minlength=len(shares)).astype(np.int64)
    for k in range(len(shares)):
        rank[cycle == k] = np.arange(per_cycle[k])
    return rank, per_cycle


@functools.lru_cache(maxsize=64)
def count_draws(shares: tuple[fractions.Fraction, ...], slots: int) -> np.ndarray:
    """Returns how many of the first `slots` slots each source has, int64[K]."""
    cycle = mixture_cycle(shares)
    turns, rest = divmod(slots, cycle.size)
    _, per_cycle = cycle_ranks(shares)
    return turns * per_cycle + np.bincount(cycle[:rest], minlength=len(shares))


def merge_windows(windows: Iterable[Sequence[int]]) -> Windows:
    """Returns the windows sorted, none overlapping or touching. Raises ConfigError if one is no pair of whole numbers."""
    merged: list[tuple[int, int]] = []
    for window in sorted(map(_window, windows)):
        if merged and window[0] <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], window[1]))
        else:
            merged.append(window)
    return tuple(merged)


def _window(given: Sequence[int]) -> tuple[int, int]:
    pair = tuple(given) if isinstance(given, Sequence) and not isinstance(given, str) else ()
    whole = len(pair) == 2 and all(isinstance(number, int) and not isinstance(number, bool) for number in pair)
    if not whole or not 1 <= pair[0] <= pair[1] < 2**62:
        raise ConfigError(f"{given} is no window of batches to pass over: a first and a last number, from 1")
    return pair


def batch_number(step: int, passed_over: Windows) -> int:
    """Returns the number of a step's batch, both from 1: the `step`-th number that is in no window."""
    for first, last in passed_over:
        step += (last - first + 1) * (step >= first)
    return step


def step_of(number: int, passed_over: Windows) -> int:
    """Returns the last step whose batch has at most this number; the inverse of `batch_number`."""
    return number - sum(max(0, min(last, number) - first + 1) for first, last in passed_over)


@dataclasses.dataclass(frozen=True)
class Final:
    """The mixture of a run's last batches, `data.final`: the last `share` of the steps, or from a branch on.

    Skipped batches do not move it: after a rollback its first batch has the same number.
    """

    mixture: Mapping[str, float]  # source -> weight; absent: 0
    share: float  # of `steps`; 0 if it only begins with a branch
    steps: int  # that the learning rate's schedule is made for
    branch: int = 0  # the step after which it begins; 0: there is none

    def fingerprint(self, names: Sequence[str]) -> dict[str, str]:
        """Returns what decides the final mixture's batches, as strings, for the fingerprint of the run's order."""
        shares = normalise_mixture(self.mixture, names)
        return {"final": words(shares), "final_share": f"{self.share:g}"} | self._ends()

    def begins(self, passed_over: Windows = ()) -> int:
        """Returns the number, from 1, of the last batch before the final mixture; 0 if this has all batches."""
        return int(begins(self._ends(), passed_over))

    def switch(self, passed_over: Windows = ()) -> int:
        return step_of(self.begins(passed_over), passed_over)

    def _ends(self) -> dict[str, str]:
        """Returns where the first mixture ends: after a batch, or the batch of a branch's step; the earlier one counts."""
        batch = {"final_batch": str(self.steps - max(1, round(self.share * self.steps)))} if self.share else {}
        return batch | ({"final_branch": str(self.branch)} if self.branch else {})


def final_of(config: Config, mixture: Mapping[str, float]) -> Final | None:
    """Returns this mixture as the final one of a config's run; None if `data.final` has no weights."""
    o, share = config.optim, config.data.final.share
    if not config.data.final.weights:
        return None
    return Final(mixture, share, o.schedule_steps or config.train.steps, o.decay_at_step)


def begins(fingerprint: Mapping[str, str], passed_over: Windows = ()) -> float:
    """Returns the number of the last batch before the final mixture, by a fingerprint; infinity if there is none."""
    ends = [float(fingerprint["final_batch"])] if "final_batch" in fingerprint else []
    if "final_branch" in fingerprint:
        ends.append(batch_number(int(fingerprint["final_branch"]), passed_over))
    return min(ends, default=math.inf)


def words(shares: Mapping[str, fractions.Fraction]) -> str:
    return ", ".join(f"{name} {share}" for name, share in shares.items())
