"""A sweep as values and as a file: which arms are compared, what is borrowed, what is left out."""

import itertools
import os

import numpy as np
import pytest

from jaxlm.config import ConfigError
from jaxlm.host import files
from jaxlm.plan import lower
from jaxlm.plan.sweep import sweep
from jaxlm.plan.sweep.noise import Noise
from jaxlm.run import metrics

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
    verdicts = [row[1] for row in sweep.tables(found)[1][1:]]
    assert verdicts == ["can't be told apart", "worse", "can't be told apart"]
    found["same"]["highest"] = True
    assert sweep.tables(found)[1][2][1] == "better"
    assert "in 80% of cases" in "\n".join(sweep.lines(found))


def test_a_diverged_arm_is_left_out_and_seeds_count_once_all_arms_have_done_them(tmp_path):
    partial = made(GRID)
    partial["runs"][4] |= {"loss": None, "why": "3 steps in a row are not finite"}
    partial["runs"][-1]["loss"] = None
    sweep.conclude(partial, tmp_path)
    assert partial["result"]["arms"] == [0, 1, 2, 3, 5]
    assert partial["result"]["seeds"] == 2
    words = "\n".join(sweep.lines(partial))
    assert "left out: lr=3 norm=a: 4-0: 3 steps in a row are not finite" in words
    assert "seeds that all arms have done: 2" in words


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
    assert "10 of them borrowed from same" in "\n".join(sweep.lines(own))
    alone = made(pair, base={"lr": "1"}, seeds=1)
    sweep.conclude(alone, tmp_path / "elsewhere" / "own")
    assert alone["result"]["differences"][0]["half"] is None
    assert sweep.tables(alone)[1][1][1::2] == ["can't be told apart", "unknown"]
    assert "one seed tells nothing apart" in "\n".join(sweep.lines(alone))


def test_a_damaged_file_is_one_line(tmp_path):
    assert sweep.read(tmp_path) is None
    (tmp_path / sweep.FILE).write_text('{"version": 1, "runs": 3}')
    with pytest.raises(ConfigError, match="is damaged: delete it; runs that are done are kept"):
        sweep.read(tmp_path)


MACHINE = {"kind": "cpu", "needed": 2e9, "hours": 1.0}


@pytest.mark.parametrize(
    ("memory", "cores", "threads", "rows", "expected"),
    [
        (100e9, 8, 0, [MACHINE], [[0], [1], [2], [3], [4], [5], [6], [7]]),  # as many as cores
        (8e9, 8, 0, [MACHINE], [[0, 1, 2, 3], [4, 5, 6, 7]]),  # two fit into the memory
        (8e9, 8, 0, [MACHINE, MACHINE | {"needed": 5e9}], [[0, 1, 2, 3, 4, 5, 6, 7]]),  # the largest counts
        (8e9, 8, 2, [MACHINE], [[0, 1], [2, 3]]),  # the cores of a run stay as the sweep began
        (100e9, 2, 4, [MACHINE], [[0, 1]]),  # which this machine has not
        (1e9, 8, 0, [MACHINE], [[0, 1, 2, 3, 4, 5, 6, 7]]),  # too little: training says so
        (100e9, 8, 0, [MACHINE | {"kind": "NVIDIA H200"}], [[0, 1, 2, 3, 4, 5, 6, 7]]),
        (100e9, 8, 0, [{"why": "never measured"}], [[0, 1, 2, 3, 4, 5, 6, 7]]),
    ],
)
def test_as_many_runs_train_at_a_time_as_memory_and_cores_allow(monkeypatch, memory, cores, threads, rows, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    monkeypatch.setattr(files, "cores", lambda: cores)
    monkeypatch.setattr(lower, "available_bytes", lambda: memory)
    begun = made(GRID, threads=threads)
    begun["runs"] = [run | {"loss": None} for run in begun["runs"]]
    assert sweep.cores(begun, rows) == expected
    assert sweep.cores(begun, rows) == expected  # and so again, when it goes on
    assert begun["threads"] == len(expected[0])


def test_no_more_runs_at_a_time_than_are_left(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    monkeypatch.setattr(files, "cores", lambda: 8)
    monkeypatch.setattr(lower, "available_bytes", lambda: 100e9)
    begun = made(GRID, threads=0)
    begun["runs"][0]["loss"] = begun["runs"][1]["loss"] = None
    assert sweep.cores(begun, [MACHINE]) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def curve(folder, name, losses, rates=None, **more):
    """A run whose training loss, held-out loss and rate are these, each ten steps."""
    lines = metrics.JsonLines(folder / "runs" / name / "metrics.jsonl")
    for number, loss in enumerate(losses, start=1):
        rate = rates[number - 1] if rates is not None else 1e-3
        record = {"step": 10 * number, "tokens": 1000 * number, "cost_usd": 0.01 * number, "train/loss": loss}
        lines.write(record | {"train/lr": rate, "val/loss": loss} | more)
    lines.close()


@pytest.mark.parametrize("highest", [False, True])
def test_a_better_value_is_worth_the_tokens_that_it_does_not_need(tmp_path, highest):
    """By the run's own curve: of 3.2, 3.1, ... 2.8 the last two tenths are 40% of the steps, and of 2.4, 2.5, ... 2.8."""
    better = 0.2 if highest else -0.2
    made_of = {"base": {"lr": "1"}, "seeds": 4, "effect": lambda arm: better * (arm["lr"] == "2")}
    done = made([{"lr": "1"}, {"lr": "2"}], **made_of)
    done["shape"]["program"], done["same"]["highest"] = "sft", highest
    for run in done["runs"]:
        curve(tmp_path, run["name"], [2.8 - better * n / 2 for n in (4, 3, 2, 1, 0)])
    sweep.conclude(done, tmp_path)
    (change,) = done["result"]["differences"]
    share = 2 * abs(change["difference"])
    assert change["saves"] == pytest.approx([share, share * 5000, share * 0.05], abs=1e-6)
    row = sweep.tables(done)[1][1]
    assert row[1::3] == ["better", f"{share:.0%}: {share * 5:.3g}k tokens, ${share * 0.05:.3f}"]


def test_what_is_no_better_or_has_no_curve_is_worth_nothing(tmp_path):
    done = made([{"lr": "1"}, {"lr": "2"}], base={"lr": "1"})
    sweep.conclude(done, tmp_path)
    assert done["result"]["differences"][0]["saves"] is None
    done = made([{"lr": "1"}, {"lr": "2"}], base={"lr": "1"}, effect=lambda arm: float(arm["lr"]))
    done["shape"]["program"] = "pretrain"
    sweep.conclude(done, tmp_path)
    assert done["result"]["differences"][0]["saves"] is None


def test_in_pretraining_the_forecasts_law_says_how_many_steps_reach_a_loss(tmp_path):
    """At a constant rate a shorter run is the first part of a longer one. The evaluations alone would not know it."""
    steps = np.arange(10, 1010, 10)
    losses = 2.5 + 0.6 * (steps * 3e-4) ** -0.45
    curve(tmp_path, "whole", losses, **{"val/loss": None})
    lines = metrics.JsonLines(tmp_path / "runs/whole/metrics.jsonl")
    lines.write({"step": 1000, "val/loss": losses[-1]})
    lines.close()
    one = {"shape": {"program": "pretrain"}, "same": {"metric": "val/loss", "highest": False}}
    share, tokens, _ = sweep._saved(one, tmp_path / "runs/whole", losses[69] - losses[-1])
    assert share == pytest.approx(0.3, abs=0.01)
    assert tokens == pytest.approx(100_000 * share)
    one["shape"]["program"] = "sft"
    assert sweep._saved(one, tmp_path / "runs/whole", losses[69] - losses[-1]) is None
