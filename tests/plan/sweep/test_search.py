"""A search: Optuna's choices depend on the sweep's runs alone, and its pruner stops those that are worse."""

import math
import pathlib

import numpy as np
import pytest
from scipy import stats

from jaxlm.run import metrics

search = pytest.importorskip("jaxlm.plan.sweep.search", exc_type=ImportError)
SPACE = {"optim.lr": (1e-4, 1e-1), "optim.weight_decay": (0.0, 0.5), "optim.schedule": ["cosine", "linear"]}


def begin(runs: int, highest: bool = False, seed: int = 3) -> dict:
    entries = [{"name": f"trial_{i + 1}", "arm": i, "seed": seed, "loss": None, "why": ""} for i in range(runs)]
    return {"same": {"metric": "val/loss", "highest": highest}, "arms": [{}] * runs, "runs": entries}


def do(made: dict, folder: pathlib.Path, number: int, steps=(10, 20), off: float = 0.0) -> None:
    """Asks for a run's values, unless it has them, and trains it: best at a rate of 1e-2."""
    made["arms"][number] = made["arms"][number] or search.ask(SPACE, made, folder)
    loss = 3 + off + abs(math.log10(float(made["arms"][number]["optim.lr"])) + 2)
    lines = metrics.JsonLines(folder / "runs" / made["runs"][number]["name"] / "metrics.jsonl")
    for step in steps:
        lines.write({"step": step, "val/loss": loss + 1 / step})
    lines.close()
    if steps[-1] == 20:
        made["runs"][number]["loss"] = loss


def test_values_lie_in_their_ranges_and_come_nearer_to_the_best(tmp_path):
    made = begin(30)
    for number in range(30):
        do(made, tmp_path, number)
    for arm in made["arms"]:
        assert 1e-4 <= float(arm["optim.lr"]) <= 1e-1
        assert 0 <= float(arm["optim.weight_decay"]) <= 0.5
        assert arm["optim.schedule"] in ("cosine", "linear")
    losses = [run["loss"] for run in made["runs"]]
    assert sum(losses[15:]) < sum(losses[:15]) - 3  # by .2 nats each
    assert len({arm["optim.lr"] for arm in made["arms"]}) > 20


def test_a_search_that_goes_on_asks_what_an_uninterrupted_one_asks(tmp_path):
    whole = begin(14)
    for number in range(14):
        do(whole, tmp_path, number)
    again = begin(14) | {"arms": [*whole["arms"][:12], {}, {}]}
    again["runs"][:12] = whole["runs"][:12]
    for number in (12, 13):
        do(again, tmp_path, number)
    assert again["arms"] == whole["arms"]


def test_no_combination_is_tried_twice(tmp_path, monkeypatch):
    few = {"optim.schedule": ["cosine", "linear", "wsd"], "model.qk_norm": ["False", "True"], "optim.b2": [".9", ".95"]}
    made = begin(12)
    for run, values in zip(made["runs"], made["arms"], strict=True):
        values = search.ask(few, made, tmp_path)
        made["arms"][run["arm"]], run["loss"] = values, 3.0 + (values["optim.schedule"] != "wsd")
    assert len({tuple(arm.values()) for arm in made["arms"]}) == 12
    monkeypatch.setattr(search, "_ASKS", 0)  # the sampler names no combination that is left
    gone = made["arms"][7]
    made["arms"][7] = {}
    assert search.ask(few, made, tmp_path) == gone
    monkeypatch.undo()
    narrow = begin(12)
    for number in range(12):
        narrow["arms"][number] = search.ask({"optim.lr": (1.0, 1.002)}, narrow, tmp_path)
    assert len({float(arm["optim.lr"]) for arm in narrow["arms"]}) == 12


def test_the_values_spread_as_draws_do_and_no_other_seed_has_them(tmp_path):
    space = {"optim.weight_decay": (0.0, 1.0), "optim.b2": (0.0, 1.0)}
    drawn = []
    for seed in range(20):
        made = begin(10, seed=seed)
        for number in range(10):
            made["arms"][number] = search.ask(space, made, tmp_path)
        drawn += made["arms"]
    values_Nx2 = np.array([[float(arm[key]) for key in space] for arm in drawn])
    assert len(np.unique(values_Nx2, axis=0)) == len(drawn) == 200
    for values in values_Nx2.T:
        assert stats.kstest(values, "uniform").pvalue > 0.01
    assert abs(np.corrcoef(values_Nx2.T)[0, 1]) < 0.2


def test_several_runs_at_a_time_have_values_of_their_own(tmp_path):
    made = begin(4)
    for number in range(4):
        made["arms"][number] = search.ask(SPACE, made, tmp_path)
    assert len({arm["optim.lr"] for arm in made["arms"]}) == 4


@pytest.mark.parametrize("highest", [False, True])
def test_a_run_that_is_worse_than_the_median_after_as_many_steps_is_pruned(tmp_path, highest):
    made = begin(9, highest)
    for number in range(6):
        do(made, tmp_path, number)
    for number, off in ((6, 5.0), (7, -5.0)):
        do(made, tmp_path, number, (10,), off)
    assert [search.pruned(SPACE, made, tmp_path, arm) for arm in (6, 7)] == [not highest, highest]
    made["runs"][6]["why"] = "pruned at step 10"  # it counts among the others
    made["arms"][8] = search.ask(SPACE, made, tmp_path)
    assert not search.pruned(SPACE, made, tmp_path, 8)  # it has no evaluation yet
