"""A sweep as values and as a file: which arms are compared, what is borrowed, what is left out."""

import itertools

import numpy as np
import pytest

from jaxlm.config import ConfigError
from jaxlm.plan.sweep import sweep, text
from jaxlm.plan.sweep.noise import Noise

BASE = {"lr": "1", "norm": "a"}
GRID = [dict(zip(BASE, values, strict=True)) for values in itertools.product("123", "ab")]
SCATTER = 0.01


def made(arms, base=BASE, seeds=3, effect=lambda arm: 0.0, **changed):
    """A finished sweep: losses of scatter SCATTER, and of ten times that between seeds."""
    random = np.random.default_rng(5)
    common = 10 * SCATTER * random.standard_normal(seeds)
    runs = [
        {"name": f"{arm}-{seed}", "arm": arm, "seed": seed, "planned_hours": 1.0, "hours": 2.0, "why": ""}
        | {"loss": 3 + common[seed] + effect(arms[arm]) + SCATTER * random.standard_normal()}
        for seed in range(seeds)
        for arm in range(len(arms))
    ]
    same = {"keys": ", ".join(base), "metric": "val/loss", "highest": False, "data": "x"}
    made = {"version": 1, "same": same, "shape": {"steps": 5}, "base": base, "arms": arms, "runs": runs}
    return made | changed


def test_all_combinations_give_the_main_effect_of_each_key():
    rows = {(key, value): weights for key, value, weights in sweep.contrasts(made(GRID), range(6))}
    assert [*rows] == [("lr", "2"), ("lr", "3"), ("norm", "b")]
    np.testing.assert_allclose(rows["lr", "3"], [-0.5, -0.5, 0, 0, 0.5, 0.5])
    np.testing.assert_allclose(rows["norm", "b"], np.array([-1, 1, -1, 1, -1, 1]) / 3)
    without = {(key, value): weights for key, value, weights in sweep.contrasts(made(GRID), [0, 1, 2, 3, 4])}
    np.testing.assert_allclose(without["lr", "3"], [-1, 0, 0, 0, 1])  # the pair whose other arm diverged is left out


def test_one_at_a_time_compares_each_arm_with_the_base():
    arms = [BASE, BASE | {"lr": "2"}, BASE | {"norm": "b"}]
    rows = [weights.tolist() for *_, weights in sweep.contrasts(made(arms), range(3))]
    assert rows == [[-1, 1, 0], [-1, 0, 1]]


def test_what_is_more_than_noise_is_named_and_the_rest_can_not_be_told_apart(tmp_path):
    done = made(GRID, effect=lambda arm: 0.1 * (arm["lr"] == "3"))
    (tmp_path / "s").mkdir()
    sweep.write(tmp_path / "s", done)
    found = sweep.read(tmp_path / "s")
    assert found["result"]["seeds"] == 3
    assert Noise(**found["noise"]).scatter == pytest.approx(SCATTER, rel=0.5)
    verdicts = [row[3] for row in text.tables(found)[1][1:]]
    assert verdicts == ["can't be told apart", "worse", "can't be told apart"]
    found["same"]["highest"] = True
    assert text.tables(found)[1][2][3] == "better"
    assert "in 80% of cases" in "\n".join(text.lines(found))


def test_a_diverged_arm_is_left_out_and_seeds_count_once_all_arms_have_done_them(tmp_path):
    partial = made(GRID)
    partial["runs"][4] |= {"loss": None, "why": "3 steps in a row are not finite"}
    partial["runs"][-1]["loss"] = None
    sweep.conclude(partial, tmp_path)
    assert partial["result"]["arms"] == [0, 1, 2, 3, 5]
    assert partial["result"]["seeds"] == 2
    words = "\n".join(text.lines(partial))
    assert "left out: lr=3 norm=a: 4-0: 3 steps in a row are not finite" in words
    assert "by the 2 seeds that all arms have done" in words


def test_noise_is_borrowed_from_finished_sweeps_of_the_same_shape(tmp_path):
    pair = [{"lr": "1"}, {"lr": "2"}]
    others = {"same": made(GRID), "longer": made(GRID, shape={"steps": 6}), "unfinished": made(GRID)}
    others["unfinished"]["runs"][0]["loss"] = None
    for name, other in others.items():
        (tmp_path / name).mkdir()
        sweep.write(tmp_path / name, other)
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / sweep.FILE).write_text("{")
    own = made(pair, base={"lr": "1"}, seeds=1)
    sweep.conclude(own, tmp_path / "own")
    assert own["borrowed"]["of"] == ["same"]
    assert own["borrowed"]["df"] == 10
    assert own["result"]["differences"][0]["half"] > 0
    assert "10 of them borrowed from same" in "\n".join(text.lines(own))
    alone = made(pair, base={"lr": "1"}, seeds=1)
    sweep.conclude(alone, tmp_path / "elsewhere" / "own")
    assert alone["result"]["differences"][0]["half"] is None
    assert text.tables(alone)[1][1][2:] == ["unknown", "can't be told apart"]
    assert "one seed tells nothing apart" in "\n".join(text.lines(alone))


def test_a_damaged_file_is_one_line(tmp_path):
    assert sweep.read(tmp_path) is None
    (tmp_path / sweep.FILE).write_text('{"version": 1, "runs": 3}')
    with pytest.raises(ConfigError, match="is damaged: delete it; runs that are done are kept"):
        sweep.read(tmp_path)
