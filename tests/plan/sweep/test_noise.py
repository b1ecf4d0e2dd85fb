"""What a sweep names: 2,000 simulated sweeps of each shape, with and without a share that seeds have in common."""

import numpy as np
import pytest
from scipy import stats

from jaxlm.plan.sweep.noise import Family, Noise, left_over

SWEEPS = 2000
FOUR = Family(np.column_stack([-np.ones(4), np.eye(4)]))  # four arms against the base
KEYS = Family(np.array([[-0.5, 0.5, -0.5, 0.5], [-0.5, -0.5, 0.5, 0.5]]))  # of 2 x 2: each key over the other
PAIR = Family(np.array([[-1.0, 1.0]]))
BORROWED = 20


def losses(means, seeds: int, common: float, sweeps: int = SWEEPS, seed: int = 7) -> np.ndarray:
    """Losses [sweeps, S, A] of scatter 1; `common`: the scatter of what each seed does to all arms."""
    random = np.random.default_rng(seed)
    own = random.standard_normal((sweeps, seeds, len(means)))
    return 3.0 + np.asarray(means) + common * random.standard_normal((sweeps, seeds, 1)) + own


def borrowed(sweeps: int = SWEEPS) -> Noise:
    return Noise(np.random.default_rng(11).chisquare(BORROWED, sweeps), BORROWED)


def named(family: Family, means, seeds: int, common: float, **more) -> np.ndarray:
    differences, half = family.judge(losses(means, seeds, common), **more)
    return np.abs(differences) > half


@pytest.mark.parametrize("common", [0.0, 3.0])
@pytest.mark.parametrize(
    ("family", "arms", "more"),
    [(FOUR, 5, {}), (KEYS, 4, {}), (PAIR, 2, {}), (PAIR, 2, {"borrowed": borrowed()})],
    ids=["four", "2 x 2", "pair", "borrowed"],
)
def test_without_a_difference_one_is_named_in_5_percent(family, arms, more, common):
    share = named(family, [0.0] * arms, 3, common, **more).any(1).mean()
    assert 0.035 < share <= 0.06


@pytest.mark.parametrize("common", [0.0, 3.0])
@pytest.mark.parametrize(
    ("family", "means", "more", "least"),
    [
        (FOUR, [0.0, 3.0, 0.0, 0.0, 0.0], {}, 0.65),
        (FOUR, [0.0, 4.0, 0.0, 0.0, 0.0], {}, 0.90),
        (KEYS, [0.0, 2.0, 0.0, 2.0], {}, 0.65),
        (PAIR, [0.0, 2.0], {"borrowed": borrowed()}, 0.60),
    ],
    ids=["3 times", "4 times", "2 x 2", "borrowed"],
)
def test_a_difference_is_found(family, means, more, least, common):
    assert named(family, means, 3, common, **more)[:, 0].mean() >= least


def test_the_critical_value_is_dunnetts():
    for df in (4, 8, 40):
        t, corr = FOUR.critical(df), np.full((4, 4), 0.5) + 0.5 * np.eye(4)
        inside = stats.multivariate_t(shape=corr, df=df, seed=1).cdf([t] * 4, lower_limit=[-t] * 4)
        assert inside == pytest.approx(0.95, abs=0.002)
    assert PAIR.critical(4) == pytest.approx(stats.t.ppf(0.975, 4), rel=0.02)


def test_left_over_is_the_residual_of_least_squares():
    table = losses([0.0, 1.0, 2.0], 4, 2.0, sweeps=1)[0]
    seeds, arms = np.indices(table.shape).reshape(2, -1)
    design = np.column_stack([seeds[:, None] == range(4), arms[:, None] == range(1, 3)]).astype(float)
    _, (squares,), rank, _ = np.linalg.lstsq(design, table.ravel())
    assert left_over(table) == (pytest.approx(squares), table.size - rank)


def test_the_smallest_difference_is_found_in_80_percent_and_half_of_it_with_the_seeds_it_names():
    smallest = FOUR.smallest(3)
    assert named(FOUR, [0.0, smallest, 0.0, 0.0, 0.0], 3, 1.0)[:, 0].mean() == pytest.approx(0.8, abs=0.03)
    seeds = FOUR.seeds_for_half(3)
    assert FOUR.smallest(seeds) <= smallest / 2 < FOUR.smallest(seeds - 1)
    half = named(FOUR, [0.0, smallest / 2, 0.0, 0.0, 0.0], seeds, 1.0)[:, 0].mean()
    assert 0.77 < half < 0.9
    assert PAIR.smallest(3, BORROWED) < PAIR.smallest(3)


def test_one_seed_names_nothing_unless_its_noise_is_borrowed():
    table = losses([0.0, 9.0], 1, 0.0)
    differences, half = PAIR.judge(table)
    assert not (np.abs(differences) > half).any()
    assert PAIR.smallest(1) == np.inf
    differences, half = PAIR.judge(table, borrowed())
    assert (np.abs(differences) > half).mean() > 0.9


def test_runs_that_are_the_same_to_the_bit_are_not_named():
    differences, half = PAIR.judge(np.array([[3.0, 3.0], [3.1, 3.1]]))
    assert not (np.abs(differences) > half).any()
