"""Compares two models on the same items by paired tests, corrected for multiple comparisons, and words the results.

Accuracies: McNemar's exact test (1947), which counts only the items that exactly one of the two models answers right. Other
scores: a paired randomization test, with a bootstrap interval (Efron and Tibshirani 1993, chapters 13 and 15). Votes: a sign
test. The p-values are corrected by Holm (1979), those of bits per byte separately from the others.
"""

import collections
import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from scipy import stats

from jaxlm.config import ConfigError
from jaxlm.eval.results import TaskResult, has
from jaxlm.report.benchmarks import BITS, accuracy, title

LEVEL = 0.05  # below this p-value two models differ
_DRAWS, _CHUNK = 4999, 2_000_000  # random draws of a test; numbers in memory at a time
_ALL = 12  # up to so many items all 2^n signs are fewer than the draws
_SEED = 0
_FEW = 6  # fewer items have equal signs by chance in more than 1 of 20 cases
# Metrics of which lower is better.
_LOWER = frozenset({BITS, "perplexity", "word_perplexity", "byte_perplexity", "brier_score", "ter", "flagged"})
_EVEN = {"stereotype": 0.5}  # metric -> the best score


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The result of one paired test.

    Attributes:
      task, metric: what was compared: `arc_easy` and `acc_norm`; `votes` and `wins`.
      test: "McNemar", "randomization" or "sign test".
      n: the number of items that both models have.
      a, b: the mean scores.
      difference: b - a; `low` and `high` are the ends of its 95% interval.
      p: the p-value of this test alone, of "no difference"; `adjusted` is corrected for the number of comparisons.
      a_only, b_only: the number of items that only A or only B has; they are not compared.
      better: "a" or "b", the side with the better mean; "" if neither is better.
      direction: what `better` assumes where the metric's name does not say it: "if higher is better".
    """

    task: str
    metric: str
    test: str
    n: int
    a: float
    b: float
    difference: float
    low: float
    high: float
    p: float
    adjusted: float = 1.0
    a_only: int = 0
    b_only: int = 0
    better: str = ""
    direction: str = ""

    @property
    def apart(self) -> bool:
        return self.adjusted < LEVEL


def mcnemar(a: np.ndarray, b: np.ndarray) -> tuple[float, float, float]:
    """Returns (p-value, low, high) as `paired`, for right (1) and wrong (0) answers; the p-value is of McNemar's test."""
    lost, won, n = int(np.sum(a > b)), int(np.sum(b > a)), len(a)
    if not lost + won:
        return 1.0, 0.0, 0.0
    shares = np.asarray([lost, won, n - lost - won]) / n
    drawn = np.random.default_rng(_SEED).multinomial(n, shares, _DRAWS)  # a bootstrap's draws, counted
    low, high = np.quantile((drawn[:, 1] - drawn[:, 0]) / n, (0.025, 0.975))
    return float(stats.binomtest(lost, lost + won).pvalue), float(low), float(high)


def paired(a: np.ndarray, b: np.ndarray) -> tuple[float, float, float]:
    """Returns (p-value, low, high) of the mean of b - a; `low` to `high` is its 95% bootstrap interval.

    p is how often the mean is as far from 0 if each difference gets a random sign, as it would if A and B were equal
    (Fisher's randomization test; unlike a bootstrap's p-value it is valid for few items too): of all signs where there are few.
    """
    differences = b - a
    mean, n = float(differences.mean()), len(differences)
    if not np.any(differences):
        return 1.0, 0.0, 0.0
    random, at_once, far, means = np.random.default_rng(_SEED), max(1, _CHUNK // n), 1, []
    least = abs(mean) - 1e-9 * np.abs(differences).mean()  # rounding must not part equal means

    def as_far(kept: np.ndarray) -> int:
        return int(np.sum(np.abs(kept @ (2 * differences / n) - mean) >= least))

    for start in range(0, _DRAWS, at_once):
        size = (min(at_once, _DRAWS - start), n)
        far += as_far(random.integers(0, 2, size, np.int8))
        means.append(differences[random.integers(0, n, size, np.int32)].mean(axis=1))
    low, high = np.quantile(np.concatenate(means), (0.025, 0.975))
    few = n <= _ALL
    p = as_far(np.arange(2**n)[:, None] >> np.arange(n) & 1) / 2**n if few else far / (_DRAWS + 1)
    return p, float(low), float(high)


def scores(
    task: str, metric: str, a: Mapping[str, float], b: Mapping[str, float], lower: bool | None = None
) -> Comparison:
    """Compares the scores of two models; `a` and `b` map item -> score. Raises ConfigError if they have no item in common.

    Args:
      lower: True if lower is better; False for an unknown metric, taken as higher is better; None if the metric is known.
    """
    common = [item for item in a if item in b]
    if not common:
        raise ConfigError(f"{task}: A and B have no item in common")
    left, right = (np.asarray([side[item] for item in common], float) for side in (a, b))
    binary = np.isin(np.concatenate([left, right]), (0.0, 1.0)).all()
    test, compared = ("McNemar", mcnemar) if binary else ("randomization", paired)
    p, low, high = compared(left, right)
    difference = float(right.mean() - left.mean())
    gain = -difference if lower or metric.split(",")[0] in _LOWER else difference
    direction = "" if lower is None else "where lower is better" if lower else "if higher is better"
    if metric in _EVEN:
        gain = round(abs(left.mean() - _EVEN[metric]) - abs(right.mean() - _EVEN[metric]), 9)
    only = {"a_only": len(a) - len(common), "b_only": len(b) - len(common)}
    better = "b" if gain > 0 else "a" if gain < 0 else ""
    means = (float(left.mean()), float(right.mean()), difference)
    return Comparison(task, metric, test, len(common), *means, low, high, p, **only, better=better, direction=direction)


def benchmarks(a: Mapping[str, TaskResult], b: Mapping[str, TaskResult]) -> list[Comparison]:
    """Compares two models on all tasks that both have: by accuracy, and by bits per byte of the right answer.

    Raises ConfigError if they have no task in common, or a task was asked in different ways.
    """
    common = [task for task in a if task in b]
    if not common:
        raise ConfigError(f"no task in common: A has {', '.join(a) or 'none'}, B has {', '.join(b) or 'none'}")
    comparisons = []
    for task in common:
        sides = (a[task], b[task])
        if not all(side.items for side in sides):  # `core` is a mean over tasks, which are compared one by one
            continue
        ours, theirs = (side.fewshot for side in sides)
        if ours != theirs:
            raise ConfigError(f"{task} has {ours} worked examples of A and {theirs} of B: use one --fewshot for both")
        _check_questions(task, *sides)
        for metric in _metrics(*sides):
            of_items = [{i.id: i.metrics[metric] for i in side.items if has(i.metrics, metric)} for side in sides]
            comparisons.append(scores(task, metric, *of_items))
    if not comparisons:
        raise ConfigError(f"{', '.join(common)}: A and B have no score in common")
    return adjust(comparisons)


def _check_questions(task: str, a: TaskResult, b: TaskResult) -> None:
    """Raises ConfigError if an id is not the same question on both sides: the task's version or data differs."""
    questions = {item.id: item.detail.get("question") for item in a.items}
    for item in b.items:
        question = item.detail.get("question")
        if question is not None and questions.get(item.id) not in (None, question):
            raise ConfigError(f"{task}: item {item.id} is not the same question in A and B: evaluate both again")


def _metrics(a: TaskResult, b: TaskResult) -> list[str]:
    """Returns the names of accuracy and bits per byte if both sides have them; if neither, of the first common metric."""
    names = [dict.fromkeys(name for item in side.items for name in item.metrics) for side in (a, b)]
    both = {name: 0.0 for name in names[0] if name in names[1]}
    chosen = [name for name in (accuracy(both), BITS) if name in both]
    return chosen or [*both][:1]


def votes(records: Sequence) -> Comparison:
    """Compares two models by votes: {"winner": "a", "b" or "tie", "item": ...}.

    All votes on an item count as one: the item goes to the side with more votes. Tied items count in `n`, not in p.

    Raises ConfigError if a vote has no winner, or there are no votes.
    """
    leads: dict[str, int] = collections.defaultdict(int)  # of B over A, by item
    for number, record in enumerate(records, start=1):
        winner = record.get("winner") if isinstance(record, dict) else None
        if winner not in ("a", "b", "tie"):
            raise ConfigError(f'vote {number}: "winner" is {winner!r}; it must be "a", "b" or "tie"')
        leads[str(record.get("item", f"vote {number}"))] += {"a": -1, "b": 1, "tie": 0}[winner]
    if not leads:
        raise ConfigError("no votes")
    lost, won = sum(lead < 0 for lead in leads.values()), sum(lead > 0 for lead in leads.values())
    n, p, low, high = len(leads), 1.0, 0.0, 0.0
    if lost + won:
        test = stats.binomtest(won, lost + won)
        interval = test.proportion_ci()
        p, share = float(test.pvalue), (lost + won) / n
        low, high = ((2 * float(end) - 1) * share for end in (interval.low, interval.high))
    better = "b" if won > lost else "a" if lost > won else ""
    return Comparison(
        "votes", "wins", "sign test", n, lost / n, won / n, (won - lost) / n, low, high, p, adjusted=p, better=better
    )


def adjust(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Returns the comparisons with p-values corrected for their number (Holm 1979), bits per byte separately from scores.

    So a task's accuracy is not judged more strictly because bits per byte are compared too.
    """
    adjusted = {}
    for family in _families(comparisons):
        worst = 0.0
        for rank, index in enumerate(sorted(family, key=lambda i: comparisons[i].p)):
            worst = max(worst, min(1.0, comparisons[index].p * (len(family) - rank)))
            adjusted[index] = worst
    return [dataclasses.replace(c, adjusted=adjusted[index]) for index, c in enumerate(comparisons)]


def _families(comparisons: Sequence[Comparison]) -> list[list[int]]:
    return [[index for index, c in enumerate(comparisons) if (c.metric == BITS) == bits] for bits in (False, True)]


# In words


def words(comparisons: Sequence[Comparison], a: str, b: str) -> list[str]:
    """Returns a sentence for each task, and remarks: too few items, items left out, how p-values were corrected."""
    lines, questions = [], {c.task for c in comparisons if c.metric != BITS}
    for task in dict.fromkeys(c.task for c in comparisons):
        whose = "of the answers" if task in questions else f"on {title(task)}, the mean of documents,"
        lines.append("; ".join(_clause(c, a, b, whose) for c in comparisons if c.task == task))
    if any(c.n < _FEW and c.task != "votes" for c in comparisons):
        lines.append(f"fewer than {_FEW} items can't tell two models apart: ask more")
    for c in comparisons:
        if (c.a_only or c.b_only) and c.task not in [other.task for other in comparisons[: comparisons.index(c)]]:
            both = c.a_only and c.b_only
            more = "; run jaxlm eval on both with the same --limit to compare more" if both else ""
            sides = [f"{n:,} that only {who} has" for n, who in ((c.a_only, a), (c.b_only, b)) if n]
            lines.append(f"{title(c.task)}: items left out: {' and '.join(sides)}{more}")
    if len(comparisons) > 1:
        number, bits = map(len, _families(comparisons))
        each = f", scores and bits per byte apart: {number} and {bits}" if number and bits else f": {len(comparisons)}"
        lines.append(f"p-values are corrected for the number of comparisons (Holm){each}")
    return lines


def _clause(c: Comparison, a: str, b: str, whose: str) -> str:
    p = f"(p {probability(c.adjusted)})"
    if c.metric == BITS:
        bits = f"bits per byte {whose}"
        if not c.apart:
            return f"{bits} can't be told apart: {_short(c.a)} and {_short(c.b)} {p}"
        moved = "lower" if c.difference < 0 else "higher"
        return f"{bits} are {_short(abs(c.difference))} {moved} for {b} {p}"
    on = "by the votes" if c.task == "votes" else f"on {title(c.task)}"
    if not c.apart:
        return f"{a} and {b} can't be told apart {on} {p}"
    if not c.better:
        return f"{a} and {b} differ {on}, and neither is better: {_short(c.a)} and {_short(c.b)} {p}"
    winner = b if c.better == "b" else a
    best, rest = (c.b, c.a) if c.better == "b" else (c.a, c.b)
    on += f", {c.direction}" * bool(c.direction)
    return f"{winner} is better {on}: {_short(best)} against {_short(rest)} {p}"


def _short(value: float) -> str:
    return f"{value:.3f}".replace("0.", ".", 1) if abs(value) < 1 else f"{value:.3f}"


def probability(p: float) -> str:
    """Returns a p-value as "= .8", "= .031" or "< .001"."""
    if p < 0.001:
        return "< .001"
    if p >= 0.9995:
        return "= 1"
    digits = 3 if p < 0.1 or p >= 0.95 else 1
    return f"= {p:.{digits}f}".replace("0.", ".", 1)
