"""Results of votes: ratings with intervals, who is better than whom, agreement of raters, biases of length and side.

Bradley-Terry (1952), fitted by Newton's method, in points of Elo: 400 points are odds of 10 to 1. The bootstrap draws prompts,
with all their votes. For each two contestants two imagined prompts are added, one won by each (as Agresti and Coull 1998), so
that unanimous votes have an interval too. Elo and Krippendorff's alpha are evalica's.
"""

import collections
import dataclasses
import importlib.util
import itertools
import typing
from collections.abc import Mapping, Sequence

import numpy as np
from scipy import special, stats

from jaxlm.config import ConfigError, pip_install
from jaxlm.serve.arena.store import Vote

POINTS = 400 / np.log(10)  # of Elo in one unit of log odds
LEVEL = 0.05
_DRAWS, _ELO_DRAWS, _SEED = 1000, 200, 0
_PRIOR = 1.0  # ties between each two contestants before the first vote: else one who wins all is infinitely strong
_FEW = 20  # fewer decided votes are too few to look for a bias
_FEW_PROMPTS = 6  # fewer can all go to one side by chance in more than 1 of 20 cases


@dataclasses.dataclass(frozen=True)
class Rating:
    """A contestant's two ratings with 95% intervals. Means over contestants: 0 for `rating`, about 1,000 for `elo`."""

    name: str
    votes: int
    rating: float
    low: float
    high: float
    elo: float
    elo_low: float
    elo_high: float


@dataclasses.dataclass(frozen=True)
class Gap:
    """How much better one contestant is than another, in points; the interval is corrected for the number of pairs."""

    better: str
    worse: str
    points: float
    low: float
    high: float
    prompts: int

    @property
    def apart(self) -> bool:
        return self.prompts >= _FEW_PROMPTS and self.low > 0


@dataclasses.dataclass(frozen=True)
class Bias:
    """A test for bias by "side" or "length": `share` of decided votes went to the left (longer) answer; `p`: its p-value."""

    kind: str
    share: float
    votes: int
    p: float

    @property
    def found(self) -> bool:
        return self.p < LEVEL


class Agreement(typing.NamedTuple):
    """`share` of the pairs of votes on the same battle that agree; `pairs` their number; Krippendorff's `alpha`."""

    share: float
    pairs: int
    alpha: float


@dataclasses.dataclass(frozen=True)
class Results:
    votes: int
    ties: int
    raters: int
    ratings: list[Rating]
    gaps: list[Gap]
    biases: list[Bias]
    agreement: Agreement | None


def results(votes: Sequence[Vote], names: Mapping[int, str]) -> Results:
    """Returns the results of the votes, the best contestant first. Raises ConfigError without evalica."""
    if importlib.util.find_spec("evalica") is None:
        raise ConfigError(f"results need evalica: {pip_install('arena')}")
    place = {number: at for at, number in enumerate(names)}
    ratings_N, drawn_SxN = bootstrapped(votes, place)
    elo_SxN, order = _elo(votes, place), np.argsort(-ratings_N, kind="stable")
    low_N, high_N = np.quantile(drawn_SxN, (LEVEL / 2, 1 - LEVEL / 2), axis=0)
    elo_3xN = np.quantile(elo_SxN, (0.5, LEVEL / 2, 1 - LEVEL / 2), axis=0)
    counts, labels = collections.Counter(side for vote in votes for side in (vote.first, vote.second)), [*names]
    ratings = [
        Rating(names[labels[i]], counts[labels[i]], *map(float, (ratings_N[i], low_N[i], high_N[i], *elo_3xN[:, i])))
        for i in order
    ]
    ties, raters = sum(vote.winner == "tie" for vote in votes), len({vote.rater for vote in votes})
    apart = gaps(votes, ratings_N, drawn_SxN, names)
    return Results(len(votes), ties, raters, ratings, apart, biases(votes, place), _agreement(votes))


def gaps(votes: Sequence[Vote], ratings_N: np.ndarray, drawn_SxN: np.ndarray, names: Mapping[int, str]) -> list[Gap]:
    """Returns the gap of every two contestants, the better one first; `ratings_N` and `drawn_SxN` are from `bootstrapped`."""
    ids, each = [*names], []
    prompts = collections.Counter(frozenset(sides) for _, *sides in {(v.prompt, v.first, v.second) for v in votes})
    pairs = [*itertools.combinations(np.argsort(-ratings_N, kind="stable"), 2)]
    for i, j in pairs:
        tail = LEVEL / 2 / len(pairs)  # Bonferroni
        interval = map(float, np.quantile(drawn_SxN[:, i] - drawn_SxN[:, j], (tail, 1 - tail)))
        sides, points = (ids[i], ids[j]), float(ratings_N[i] - ratings_N[j])
        each.append(Gap(*(names[side] for side in sides), points, *interval, prompts[frozenset(sides)]))
    return each


def bradley_terry(wins_SxNxN: np.ndarray) -> np.ndarray:
    """Returns ratings [S, N] in points, with mean 0. [s, i, j] counts how often i won against j; a tie counts half for each.

    The S tables are fitted at once. Every two contestants need a win each way, directly or through others.
    """
    played_SxNxN, size = wins_SxNxN + wins_SxNxN.swapaxes(1, 2), wins_SxNxN.shape[-1]
    odds_SxN = np.zeros(wins_SxNxN.shape[:2])
    for _ in range(100):
        expected_SxNxN = played_SxNxN * special.expit(odds_SxN[:, :, None] - odds_SxN[:, None])
        spread_SxNxN = expected_SxNxN * special.expit(odds_SxN[:, None] - odds_SxN[:, :, None])
        # The last term keeps the mean 0.
        curve_SxNxN = np.eye(size) * spread_SxNxN.sum(2)[:, :, None] - spread_SxNxN + 1 / size
        step_SxN = np.linalg.solve(curve_SxNxN, (wins_SxNxN - expected_SxNxN).sum(2)[..., None])[..., 0]
        odds_SxN += np.clip(step_SxN, -1, 1)
        if np.abs(step_SxN).max() < 1e-6:
            break
    return POINTS * (odds_SxN - odds_SxN.mean(1, keepdims=True))


def _draws(votes: Sequence[Vote], place: Mapping[int, int]) -> tuple[list[list[Vote]], np.ndarray]:
    """Returns (the votes of each prompt, imagined prompts last; how often each draw contains each prompt, [S, C])."""
    # The first draw contains each real prompt once. An imagined prompt has as many votes as its two contestants have on a
    # real one on average.
    prompts, pairs, clusters = collections.defaultdict(list), collections.defaultdict(list), []
    for vote in votes:
        prompts[vote.prompt].append(vote)
        pairs[frozenset((vote.first, vote.second))].append(vote.prompt)
    for a, b in itertools.combinations(place, 2):
        theirs = pairs[frozenset((a, b))]
        count = round(len(theirs) / max(len(set(theirs)), 1)) or 1
        clusters += [[Vote("", "", a, b, "", "", a, winner)] * count for winner in ("first", "second")]
    once, count = np.repeat([1, 0], (len(prompts), len(clusters)))[None], len(prompts) + len(clusters)
    drawn_SxC = np.random.default_rng(_SEED).multinomial(count, np.full(count, 1 / count), _DRAWS)
    return [*prompts.values(), *clusters], np.concatenate([once, drawn_SxC])


def bootstrapped(votes: Sequence[Vote], place: Mapping[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the ratings [N], and those of `_DRAWS` draws of the prompts [S, N]. `place`: contestant -> column."""
    (clusters, weights_SxC), size = _draws(votes, place), len(place)
    wins_CxNxN = np.zeros((len(clusters), size, size))
    for at, cluster in enumerate(clusters):
        for vote in cluster:
            i, j = place[vote.first], place[vote.second]
            share = {"first": 1.0, "second": 0.0, "tie": 0.5}[vote.winner]
            wins_CxNxN[at, i, j] += share
            wins_CxNxN[at, j, i] += 1 - share
    wins_SxNxN = np.tensordot(weights_SxC, wins_CxNxN, 1) + _PRIOR / 2 * (1 - np.eye(size))
    ratings_SxN = bradley_terry(wins_SxNxN)
    return ratings_SxN[0], ratings_SxN[1:]


def _elo(votes: Sequence[Vote], place: Mapping[int, int]) -> np.ndarray:
    """Returns Elo ratings [S, N] of S draws of the prompts. Their votes are in random order, since Elo depends on the order."""
    import evalica
    import pandas as pd

    outcome = {"first": evalica.Winner.X, "second": evalica.Winner.Y, "tie": evalica.Winner.Draw}
    random, index, draws = np.random.default_rng(_SEED), pd.Index([*place]), []
    clusters, weights_SxC = _draws(votes, place)
    for weights_C in weights_SxC[1 : _ELO_DRAWS + 1]:
        drawn = [vote for at in np.repeat(np.arange(len(clusters)), weights_C) for vote in clusters[at]]
        random.shuffle(drawn)
        sides = [[getattr(vote, side) for vote in drawn] for side in ("first", "second")]
        scores = evalica.elo(*sides, [outcome[vote.winner] for vote in drawn], index=index).scores
        draws.append(scores.reindex(index).to_numpy())
    return np.asarray(draws)


def _agreement(votes: Sequence[Vote]) -> Agreement | None:
    import evalica
    import pandas as pd

    outcomes: dict[tuple, dict[str, int]] = collections.defaultdict(dict)
    for vote in votes:
        outcomes[vote.prompt, vote.first, vote.second][vote.rater] = ("first", "second", "tie").index(vote.winner)
    shared = [by_rater for by_rater in outcomes.values() if len(by_rater) > 1]
    pairs = [pair for by_rater in shared for pair in itertools.combinations(by_rater.values(), 2)]
    if not pairs:
        return None
    alpha = float(evalica.alpha(pd.DataFrame(shared).T).alpha)
    return Agreement(sum(a == b for a, b in pairs) / len(pairs), len(pairs), alpha)


def biases(votes: Sequence[Vote], place: Mapping[int, int]) -> list[Bias]:
    """Returns the biases of side and length, each tested as a term of a logistic regression; [] below _FEW decided votes."""
    decided = [vote for vote in votes if vote.winner != "tie"]
    if len(decided) < _FEW:
        return []
    won_V, longer_V = np.zeros(len(decided)), np.zeros(len(decided))
    strengths_VxN = np.zeros((len(decided), len(place)))
    for at, vote in enumerate(decided):
        on_left = vote.left == vote.first
        left, right = (vote.first_text, vote.second_text)[:: 1 if on_left else -1]
        won_V[at] = on_left == (vote.winner == "first")
        longer_V[at] = np.log1p(len(left)) - np.log1p(len(right))
        strengths_VxN[at, place[vote.first]] = 1 if on_left else -1
        strengths_VxN[at, place[vote.second]] = -1 if on_left else 1
    side_V, unequal = np.ones(len(decided)), longer_V != 0
    alone = {"side": np.column_stack([strengths_VxN, longer_V]), "length": np.column_stack([strengths_VxN, side_V])}
    both = _likelihood(np.column_stack([alone["side"], side_V]), won_V)
    p = {kind: float(stats.chi2.sf(max(0.0, 2 * (both - _likelihood(x, won_V))), 1)) for kind, x in alone.items()}
    longer_won = ((longer_V > 0) == (won_V == 1))[unequal]
    return [
        Bias("side", float(won_V.mean()), len(decided), p["side"]),
        Bias("length", float(longer_won.mean()) if unequal.any() else 0.5, int(unequal.sum()), p["length"]),
    ]


def _likelihood(x_VxF: np.ndarray, won_V: np.ndarray) -> float:
    """Returns the largest log-likelihood of a logistic regression, by Newton's method with a tiny ridge."""
    weights_F, ridge_FxF = np.zeros(x_VxF.shape[1]), 1e-3 * np.eye(x_VxF.shape[1])
    for _ in range(50):
        p_V = special.expit(x_VxF @ weights_F)
        slope_F = x_VxF.T @ (won_V - p_V) - ridge_FxF @ weights_F
        step_F = np.linalg.solve((x_VxF.T * (p_V * (1 - p_V))) @ x_VxF + ridge_FxF, slope_F)
        weights_F += np.clip(step_F, -2, 2)
        if np.abs(step_F).max() < 1e-8:
            break
    at_V = x_VxF @ weights_F
    return float((special.log_expit(at_V) * won_V + special.log_expit(-at_V) * (1 - won_V)).sum())


def words(results: Results) -> list[str]:
    """Returns the results as sentences."""
    lines = []
    for gap in results.gaps:
        if gap.apart:
            chance = special.expit(gap.points / POINTS)
            lines.append(f"{gap.better} is better than {gap.worse}: it would win {chance:.0%} of battles")
        else:
            lines.append(f"{gap.better} and {gap.worse} can't be told apart yet")
    if any(gap.prompts < _FEW_PROMPTS for gap in results.gaps):
        lines.append(
            f"fewer than {_FEW_PROMPTS} prompts can't tell two contestants apart: ask for votes on more prompts"
        )
    if results.agreement:
        share, pairs, alpha = results.agreement
        lines.append(f"raters agree in {share:.0%} of {pairs:,} pairs of votes on the same battle (alpha {alpha:.2f})")
    else:
        lines.append("no battle was judged by two raters, so nothing is known of their agreement")
    for bias in results.biases:
        name = {"side": "the left side", "length": "the longer answer"}[bias.kind]
        says = f"{name} won {bias.share:.0%} of {bias.votes:,} decided votes"
        p = "(p < .001)" if bias.p < 0.001 else f"(p = {bias.p:.2g})"
        unexplained = f", which the models' strengths don't explain {p}: beware of a bias"
        lines.append(says + (unexplained if bias.found else f": no sign that this decided votes {p}"))
    if not results.biases:
        lines.append(f"under {_FEW} decided votes: too few to look for a bias of length or side")
    return lines
