"""What scripted votes of known worlds say: the true order, biases that are there and none that are not, agreement."""

import evalica
import numpy as np
import pandas as pd
import pytest

from jaxlm.serve.arena import ratings
from jaxlm.serve.arena.ratings import POINTS, bradley_terry, results, words
from jaxlm.serve.arena.store import Vote

NAMES = {1: "alpha", 2: "beta", 3: "gamma"}
TRUE = {1: 90.0, 2: 0.0, 3: -90.0}  # points


def world(seed: int, votes: int = 200, ties: float = 0.15, raters: int = 3, side: float = 0.0, length: float = 0.0):
    """Votes of people who judge by strengths, and in a biased world by the side and by the length too (log odds)."""
    random, found = np.random.default_rng(seed), []
    for n in range(votes):
        first, second = ((1, 2), (1, 3), (2, 3))[n % 3]
        sizes = random.integers(20, 400, 2)
        left = (first, second)[random.integers(2)]
        odds = (TRUE[first] - TRUE[second]) / POINTS + side * (1 if left == first else -1)
        odds += length * np.log(sizes[0] / sizes[1])
        winner = "first" if random.random() < 1 / (1 + np.exp(-odds)) else "second"
        winner = "tie" if random.random() < ties else winner
        texts = [f"{'x' * size}" for size in sizes]
        found.append(Vote(f"rater {n % raters}", f"prompt {n}", first, second, *texts, left, winner))
    return found


def found_gaps(votes, names):
    return ratings.gaps(votes, *ratings.bootstrapped(votes, {number: at for at, number in enumerate(names)}), names)


def two(random, prompts: int, raters: int, better: float = 0.5):
    """Votes on two contestants. The first wins a prompt with probability `better`; how often all raters say so, is drawn."""
    follow, found = random.random(), []
    for n in range(prompts):
        wins = random.random() < better
        for rater in range(raters):
            first = wins if random.random() < follow else random.random() < better
            found.append(Vote(f"{rater}", f"{n}", 1, 2, "x", "y", 1, "first" if first else "second"))
    return found


def told_apart(random, worlds: int, *sizes) -> int:
    return sum(found_gaps(two(random, *sizes), {1: "alpha", 2: "beta"})[0].apart for _ in range(worlds))


@pytest.mark.parametrize("raters", [1, 5])
@pytest.mark.parametrize("prompts", [6, 10, 20, 60])
def test_two_equal_models_are_hardly_ever_told_apart(trials, draw, prompts, raters):
    worlds = trials(10)
    apart = told_apart(draw, worlds, prompts, raters)
    print(f"{prompts} prompts, {raters} raters: {apart} of {worlds} worlds told apart")
    assert apart <= max(1, 0.08 * worlds)


def test_a_model_that_wins_three_of_four_prompts_is_found(trials, draw):
    worlds = trials(10)
    apart = told_apart(draw, worlds, 60, 1, 0.75)
    print(f"{apart} of {worlds} worlds told apart")
    assert apart >= 0.8 * worlds


@pytest.mark.parametrize("prompts", [1, 2, 5])
def test_with_few_prompts_no_winner_is_named(draw, prompts):
    """However many raters agree; and no interval has width 0."""
    found = results(two(draw, prompts, 5, better=1.0), {1: "alpha", 2: "beta"})
    assert words(found)[0] == "alpha and beta can't be told apart yet"
    assert words(found)[1].startswith("fewer than 6 prompts can't tell two contestants apart")
    assert found.gaps[0].low < found.gaps[0].points < found.gaps[0].high
    for one in found.ratings:
        assert one.low < one.high
        assert one.elo_low < one.elo_high


def test_the_true_differences_lie_inside_the_intervals_in_at_least_90_of_100_worlds():
    inside = order = 0
    for seed in range(100):
        votes, names = world(seed, ties=0.0), {number: str(number) for number in NAMES}
        gaps = found_gaps(votes, names)
        true = [TRUE[int(gap.better)] - TRUE[int(gap.worse)] for gap in gaps]
        inside += all(gap.low <= value <= gap.high for gap, value in zip(gaps, true, strict=True))
        order += not any(gap.apart and value < 0 for gap, value in zip(gaps, true, strict=True))
    assert inside >= 90
    assert order >= 99


def test_bradley_terry_is_evalicas():
    random = np.random.default_rng(0)
    xs, ys = random.integers(0, 4, 400), random.integers(1, 4, 400)
    ys = (xs + ys) % 4
    kinds = [evalica.Winner.X, evalica.Winner.X, evalica.Winner.Y, evalica.Winner.Draw]
    outcome = [kinds[n] for n in random.integers(0, 4, 400)]
    theirs = evalica.bradley_terry(
        [*xs], [*ys], outcome, index=pd.Index(range(4)), tolerance=1e-12, limit=10_000
    ).scores
    wins_1xNxN = np.zeros((1, 4, 4))
    for x, y, winner in zip(xs, ys, outcome, strict=True):
        share = {evalica.Winner.X: 1, evalica.Winner.Y: 0, evalica.Winner.Draw: 0.5}[winner]
        wins_1xNxN[0, x, y] += share
        wins_1xNxN[0, y, x] += 1 - share
    logs = POINTS * np.log(theirs.sort_index().to_numpy())
    np.testing.assert_allclose(bradley_terry(wins_1xNxN)[0], logs - logs.mean(), atol=0.05)


def test_one_who_wins_all_has_a_finite_rating():
    votes = [Vote("ann", f"{n}", 1, 2, "x", "y", 1, "first") for n in range(12)]
    found = results(votes, {1: "alpha", 2: "beta"})
    assert 0 < found.gaps[0].low <= found.gaps[0].points < 1000
    assert found.ratings[0].name == "alpha"
    assert words(found)[0].startswith("alpha is better than beta: it would win 9")


def test_biases_are_found_where_they_are_and_hardly_where_they_are_not():
    place = {number: at for at, number in enumerate(NAMES)}
    found = {
        kind: [{bias.kind for bias in ratings.biases(world(seed, **biased), place) if bias.found} for seed in range(40)]
        for kind, biased in (("none", {}), ("side", {"side": 0.8}), ("length", {"length": 0.8}))
    }
    for kind in ("side", "length"):
        assert sum(kind in kinds for kinds in found[kind]) >= 36
        assert sum(kind in kinds for kinds in found["none"]) <= 6  # 2 of 40 by chance
        assert sum(({"side", "length"} - {kind}) <= kinds for kinds in found[kind]) <= 6


def test_the_better_model_may_write_more_without_a_bias():
    """Its length goes with its strength, and says nothing beside it."""
    random, fired = np.random.default_rng(0), 0
    for _ in range(40):
        votes = []
        for n in range(200):
            texts = ["x" * int(size) for size in random.normal([300, 150], 30)]
            winner = "first" if random.random() < 0.8 else "second"
            votes.append(Vote("ann", f"{n}", 1, 2, *texts, int(random.integers(1, 3)), winner))
        length = ratings.biases(votes, {1: 0, 2: 1})[1]
        assert length.share > 0.7
        fired += length.found
    assert fired <= 6


def test_agreement():
    both = [("ann", "first"), ("ben", "first")]
    votes = [Vote(rater, f"{n}", 1, 2, "x", "y", 1, said) for n in range(10) for rater, said in both]
    votes += [Vote(rater, "last", 1, 2, "x", "y", 1, said) for rater, said in (("ann", "first"), ("ben", "second"))]
    found = results(votes, NAMES).agreement
    assert (found.share, found.pairs) == (10 / 11, 11)
    assert found.alpha < 0.1  # nearly all votes are the same, so chance explains as much
    mixed = [Vote(rater, f"{n}", 1, 2, "x", "y", 1, ("first", "second")[n % 2]) for n in range(10) for rater in "ab"]
    assert results(mixed, NAMES).agreement.alpha == 1
    alone = results(votes[:1], NAMES)
    assert alone.agreement is None
    assert "no battle was judged by two raters, so nothing is known of their agreement" in words(alone)


def test_what_is_said_of_a_world():
    found = results(world(0, votes=600, side=1.0), NAMES)
    assert [one.name for one in found.ratings] == ["alpha", "beta", "gamma"]
    assert [one.elo for one in found.ratings] == sorted((one.elo for one in found.ratings), reverse=True)
    said = "\n".join(words(found))
    assert "alpha is better than gamma: it would win" in said
    assert "the left side won" in said
    assert "which the models' strengths don't explain (p < .001): beware of a bias" in said
    for one in found.ratings:
        assert one.low < one.rating < one.high
        assert one.elo_low <= one.elo <= one.elo_high
    assert (found.votes, found.raters) == (600, 3)
