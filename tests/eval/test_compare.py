"""Paired tests: what they must not see, what they must see, and how they say it."""

import numpy as np
import pytest
from scipy import stats

from jaxlm.config import ConfigError
from jaxlm.eval import compare
from jaxlm.eval.results import Item, TaskResult

ITEMS, PAIRS = 1000, 100


def pairs(difference: float):
    """Pairs of models that answer 1,000 items, the answers correlated .7 (their phi), B better by `difference`."""
    random = np.random.default_rng(1)
    p, q = 0.5 - difference / 2, 0.5 + difference / 2
    both = p * q + 0.7 * np.sqrt(p * (1 - p) * q * (1 - q))  # P(both right)
    for _ in range(PAIRS):
        drawn = random.choice(4, ITEMS, p=[1 - p - q + both, q - both, p - both, both])
        yield (drawn >= 2).astype(float), (drawn % 2).astype(float)


def told_apart(difference: float) -> int:
    """How many of the pairs `jaxlm compare` tells apart on one task by its accuracy; bits per byte are compared too."""
    bits, told = np.ones(ITEMS), 0
    for pair in pairs(difference):
        a, b = ({"t": result(side, bits, task="t")} for side in pair)
        accuracy, _ = compare.benchmarks(a, b)
        assert accuracy.metric == "acc"
        told += accuracy.apart
    return told


def test_equal_models_are_rarely_told_apart():
    assert 1 <= told_apart(0.0) <= 7


def test_four_points_are_mostly_seen():
    assert told_apart(0.04) >= 90  # 86 if bits per byte counted as a second comparison


def test_a_model_against_itself():
    a, _ = next(pairs(0.0))
    bits = np.random.default_rng(2).gamma(2.0, size=ITEMS)
    assert compare.mcnemar(a, a) == (1.0, 0.0, 0.0)
    assert compare.paired(bits, bits) == (1.0, 0.0, 0.0)
    assert compare.words([compare.scores("arc_easy", "acc", dict(enumerate(a)), dict(enumerate(a)))], "A", "B") == [
        "A and B can't be told apart on ARC-Easy (p = 1)"
    ]


def test_mcnemar_is_the_binomial_test_of_the_items_on_which_they_differ():
    a, b = np.array([1, 1, 1, 0, 0, 1.0]), np.array([0, 0, 0, 1, 0, 1.0])
    assert compare.mcnemar(a, b)[0] == pytest.approx(2 * stats.binom.cdf(1, 4, 0.5))


def test_the_paired_test_agrees_with_the_t_test():
    random = np.random.default_rng(3)
    for shift in (0.0, 0.05, 0.1):
        a = random.normal(size=400)
        b = a + random.normal(shift, 0.7, size=400)
        p, low, high = compare.paired(a, b)
        assert p == pytest.approx(stats.ttest_rel(a, b).pvalue, abs=0.03)
        assert low < (b - a).mean() < high


def test_few_items_tell_nothing():
    assert compare.paired(np.zeros(1), np.ones(1))[0] == 1.0
    for n in (2, 5, 6, 12):  # the share of all signs that are as far, not an estimate of it
        assert compare.paired(np.zeros(n), np.linspace(1, 2, n))[0] == 2.0 ** (1 - n)
    assert compare.paired(np.zeros(13), np.linspace(1, 2, 13))[0] == pytest.approx(1 / 5000)  # drawn
    assert compare.paired(np.zeros(3), np.array([1.0, 1.0, -1.0]))[0] == 1.0


def test_holm_counts_scores_and_bits_per_byte_apart():
    made = [("acc", 0.02), ("bits_per_byte", 0.03), ("acc", 0.04), ("bits_per_byte", 0.001), ("flagged", 0.01)]
    found = compare.adjust([compare.Comparison("t", name, "", 9, 0, 0, 0, 0, 0, p) for name, p in made])
    assert [one.adjusted for one in found] == pytest.approx([0.04, 0.03, 0.04, 0.002, 0.03])
    assert compare.words(found, "A", "B")[-1] == (
        "p-values are corrected for the number of comparisons (Holm), scores and bits per byte apart: 3 and 2"
    )
    assert compare.words(found[::2], "A", "B")[-1] == "p-values are corrected for the number of comparisons (Holm): 3"


def result(accs, bits=None, task="arc_easy", fewshot=0, first=0) -> TaskResult:
    items = [Item(str(first + n), {"acc": float(acc)}) for n, acc in enumerate(accs)]
    for n, item in enumerate(items):
        item.metrics.update({} if bits is None else {"bits_per_byte": float(bits[n])})
    return TaskResult(task, {}, {}, 0.25, fewshot, items)


def test_the_interval_of_right_and_wrong_answers_is_a_bootstrap_s():
    a, b = next(pairs(0.04))
    random, n = np.random.default_rng(6), len(a)
    means = [(b - a)[random.integers(0, n, n)].mean() for _ in range(4000)]
    np.testing.assert_allclose(compare.mcnemar(a, b)[1:], np.quantile(means, (0.025, 0.975)), atol=0.0025)


def test_the_words():
    random = np.random.default_rng(5)
    accs, bits = random.integers(0, 2, 500), random.gamma(2.0, size=500)
    found = compare.benchmarks({"arc_easy": result(accs, bits)}, {"arc_easy": result(accs, bits - 0.021)})
    assert compare.words(found, "A", "B") == [
        "A and B can't be told apart on ARC-Easy (p = 1); bits per byte of the answers are .021 lower for B (p < .001)",
        "p-values are corrected for the number of comparisons (Holm), scores and bits per byte apart: 1 and 1",
    ]
    assert [one.better for one in found] == ["", "b"]
    own = compare.benchmarks({"mine": result(accs, bits, "mine")}, {"mine": result(accs, bits, "mine")})
    assert "; bits per byte of the answers can't be told apart" in compare.words(own, "A", "B")[0]
    better = compare.benchmarks({"piqa": result(np.zeros(50), task="piqa")}, {"piqa": result(np.ones(50), task="piqa")})
    assert compare.words(better, "runs/a", "runs/b") == ["runs/b is better on PIQA: 1.000 against .000 (p < .001)"]


@pytest.mark.parametrize(
    ("p", "shown"),
    [(1.0, "= 1"), (0.97, "= .970"), (0.8, "= .8"), (0.049, "= .049"), (0.004, "= .004"), (0.0004, "< .001")],
)
def test_a_p_value(p, shown):
    assert compare.probability(p) == shown


def test_items_of_one_side_are_left_out_and_counted():
    found = compare.benchmarks({"t": result([1, 0, 1], task="t")}, {"t": result([0, 1, 1, 1], task="t", first=1)})
    assert (found[0].n, found[0].a_only, found[0].b_only) == (2, 1, 2)
    assert (
        "items left out: 1 that only A has and 2 that only B has; run jaxlm eval on both"
        in compare.words(found, "A", "B")[-1]
    )


def test_what_can_not_be_compared_is_refused():
    with pytest.raises(ConfigError, match="0 worked examples of A and 5 of B"):
        compare.benchmarks({"t": result([1], task="t")}, {"t": result([1], task="t", fewshot=5)})
    asked = [result([1, 0], task="t"), result([1, 0], task="t")]
    for side, words in zip(asked, ("Why?", "How?"), strict=True):
        side.items[1].detail["question"] = words
    with pytest.raises(ConfigError, match="item 1 is not the same question"):
        compare.benchmarks(*({"t": side} for side in asked))
    with pytest.raises(ConfigError, match="no task in common: A has t, B has none"):
        compare.benchmarks({"t": result([1], task="t")}, {})
    with pytest.raises(ConfigError, match=r"^t: A and B have no score in common$"):
        compare.benchmarks({"t": result([], task="t")}, {"t": result([1], task="t", fewshot=None)})
    with pytest.raises(ConfigError, match="no item in common"):
        compare.benchmarks({"t": result([1], task="t")}, {"t": result([1], task="t", first=5)})


def test_votes():
    found = compare.votes(
        [{"winner": "b", "item": n} for n in range(9)] + [{"winner": "a", "item": 9}, {"winner": "tie"}]
    )
    assert (found.n, found.p) == (11, pytest.approx(stats.binomtest(9, 10).pvalue))
    assert compare.words([found], "A", "B") == ["B is better by the votes: .818 against .091 (p = .021)"]
    many = compare.votes([{"winner": "b", "item": "same"}] * 50)  # fifty votes on one item are one item
    assert (many.n, many.p) == (1, 1.0)
    for wrong in ([{"winner": "c"}], ["a"], []):
        with pytest.raises(ConfigError, match=r"winner|no votes"):
            compare.votes(wrong)
