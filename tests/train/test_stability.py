"""Spikes, non-finite steps, overfitting; which checkpoints a rollback spoils and which batches it passes over."""

import dataclasses
import json
import math
import random

import pytest

from jaxlm import config
from jaxlm.config import config_files
from jaxlm.run import ledger, metrics
from jaxlm.train import loop, stability

C = config.resolve(config_files.load("base", ["data.path=x"])).stability


def watch(losses, switch=None, **keys) -> tuple[loop.Ending | None, list]:
    """(what ends the run, what was told) for the losses of steps 1, 2, ..."""
    told = []
    settings = dataclasses.replace(C, **keys)
    spikes = stability.Spikes(settings, lambda *found: told.append(found), switch=switch)
    for step, loss in enumerate(losses, start=1):
        if ending := spikes(step, {"loss": loss}):
            return ending, told
    return None, told


def curve(steps: int, seed: int = 0, noise: float = 0.05) -> list[float]:
    rng = random.Random(seed)
    return [2.5 + 6 * math.exp(-step / 40) + rng.gauss(0, noise) for step in range(steps)]


@pytest.mark.parametrize("seed", range(20))
def test_a_usual_curve_has_no_spike(seed):
    assert watch(curve(600, seed)) == (None, [])


def test_a_spike_that_comes_back_is_told_once_and_ends_nothing():
    losses = curve(300)
    losses[200:205] = [9.0] * 5
    ending, told = watch(losses)
    assert ending is None
    assert [(step, loss) for step, loss, _ in told] == [(201, 9.0)]
    assert told[0][2] > C.spike_z


def test_a_spike_that_stays_rolls_back_to_before_its_first_step():
    ending, _ = watch(curve(200) + [460_612.0] * 30)
    assert (ending.code, ending.first_bad, ending.keep, ending.cause) == (loop.ROLL_BACK, 201, False, "spike")
    assert "step 220: the loss is 4.606e+05 and was 2.5" in ending.why
    assert watch(curve(200) + [9.0] * 30, roll_back=False)[0].code == loop.STOPPED
    assert watch(curve(200) + [9.0] * 30, spike_steps=0)[0] is None
    assert watch(curve(200) + [9.0] * 30, spike_z=0.0) == (None, [])


def test_a_run_that_blows_up_at_once_is_noticed():
    assert watch([8.3, 8.2, 8.1] + [400.0] * 30)[0].first_bad == 4


def test_a_mixture_with_higher_losses_is_no_spike_and_one_in_it_is():
    losses = curve(200) + [loss + 12 for loss in curve(600)[-200:]]
    assert watch(losses)[0].first_bad == 201
    assert watch(losses, switch=200) == (None, [])
    assert watch(losses, switch=199)[0].first_bad == 201
    assert watch(losses[:300] + [30.0] * 30, switch=200)[0].first_bad == 301


def test_a_rise_as_of_a_higher_rate_is_no_spike():
    assert watch(curve(400) + [loss + 0.15 for loss in curve(1000)[-400:]]) == (None, [])


@pytest.mark.parametrize(("roll_back", "code"), [(True, loop.ROLL_BACK), (False, loop.STOPPED)])
def test_non_finite_steps(roll_back, code):
    nonfinite = stability.NonFinite(3, dataclasses.replace(C, roll_back=roll_back))
    assert nonfinite(6, {"skipped_in_a_row": 2.0}) is None
    ending = nonfinite(7, {"skipped_in_a_row": 3.0})
    assert (ending.code, ending.first_bad, ending.keep) == (code, 5, False)
    assert stability.NonFinite(0, C)(7, {"skipped_in_a_row": 3.0}) is None


def overfit(pairs, evaluations=2, switch=None) -> list[str]:
    watching, said = stability.Overfit(evaluations, switch), []
    for pair, (train, held_out) in enumerate(pairs):
        for step in range(3):
            watching(3 * pair + step + 1, {"loss": train})
        said.append(watching.evaluated(held_out))
    return said


def test_overfitting_is_told():
    said = overfit([(4.0, 4.1), (3.5, 4.0), (3.0, 4.2), (2.5, 4.3)])
    assert said[:3] == [""] * 3
    assert "rose 2 times in a row, 4.0000 -> 4.3000" in said[3]
    assert overfit([(4.0, 4.1), (3.5, 4.2), (3.6, 4.3)]) == [""] * 3  # training rose as well
    assert overfit([(4.0, 4.1), (3.5, 4.2), (3.0, 4.3)], evaluations=0) == [""] * 3


def test_losses_of_two_mixtures_are_no_overfitting():
    pairs = [(4.0, 4.1), (3.5, 4.0), (3.0, 4.2), (2.5, 4.3), (2.0, 4.4)]
    said = overfit(pairs, switch=9)  # the fourth pair is the first of the final mixture
    assert said == [""] * 5
    assert "rose 2 times in a row" in overfit([*pairs, (1.5, 4.5)], switch=9)[5]


def rollback(step=25, first=21, steps=(10, 20, 22), before=()):
    return stability.roll_back(loop.Ending(loop.ROLL_BACK, "spike", first_bad=first), step, steps, before)


def test_a_rollback_goes_to_the_last_checkpoint_before_the_window():
    assert rollback() == (20, "")
    assert rollback(steps=(30,)) == (0, "")


def test_the_same_window_twice_stops():
    first = {"steps": [21, 25], "to": 20, "why": "spike", "batches": [21, 25]}
    to, why = rollback(step=24, first=22, before=[first])
    assert to == 0
    assert "lower optim.lr" in why
    assert rollback(step=45, first=41, steps=(10, 20, 40), before=[first]) == (40, "")
    often = [first | {"steps": [n, n + 1]} for n in (100, 200, 300)]
    assert rollback(before=often)[1]


def test_a_checkpoint_is_spoiled_if_it_was_trained_on_the_batches():
    done = {"steps": [21, 25], "batches": [21, 25], "to": 20}
    metas = {
        20: {},
        22: {},
        24: {"passed_over": [[21, 25]]},
        30: {"passed_over": [[5, 40]]},
        31: {"passed_over": [[1, 2]]},
    }
    assert stability.spoiled(metas, [done]) == [22, 31]
    assert stability.spoiled(metas, []) == []


def test_what_was_trained_on_already_cannot_be_passed_over():
    assert stability.passed_over([(3, 5)], [(10, 12), (3, 5), (1, 2), (6, 9)], 7) == (
        [(3, 5), (10, 12), (8, 9)],
        [(1, 2)],
    )


def write_metrics(folder, *records):
    lines = [json.dumps({"step": step, "time": time, "val/loss": loss}) + "\n" for step, time, loss in records]
    (folder / "metrics.jsonl").write_text("".join(lines))


def test_a_rollback_is_one_write_and_undoes_what_was_found_in_its_steps(tmp_path):
    (tmp_path / "samples").mkdir()
    for step in (20, 40):
        (tmp_path / f"samples/{step}.jsonl").write_text("{}")
    for row in ({"phase": "one", "last_step": 20}, {"phase": "two", "last_step": 40}):
        ledger.append(tmp_path, "phases", row)
    ending = loop.Ending(loop.ROLL_BACK, "spike", first_bad=31)
    assert stability.carry_out(tmp_path, ending, 42, [31, 42], [20, 40], "as it was") == ""
    book = ledger.read(tmp_path)
    (entry,) = book["rollbacks"]
    assert (entry["steps"], entry["batches"], entry["to"]) == ([31, 42], [31, 42], 20)
    assert [row["phase"] for row in book["phases"]] == ["one"]
    assert [path.name for path in (tmp_path / "samples").iterdir()] == ["20.jsonl"]
    write_metrics(
        tmp_path, (20, entry["time"] - 9, 4.0), (40, entry["time"] - 5, 460_612.0), (36, entry["time"] + 5, 3.9)
    )
    found = metrics.held_out_losses(tmp_path / "metrics.jsonl", book["rollbacks"])
    assert found == {20: 4.0, 36: 3.9}  # the evaluation of the spoiled step 40 no longer counts
    now = config.resolve(config_files.load("base", ["data.path=x"]))
    assert stability.held_back(book["rollbacks"], now) is None
    why = stability.carry_out(tmp_path, ending, 42, [43, 54], [20, 40], stability.settings(now))
    assert why.endswith("set optim.clip_norm")
    again = ledger.read(tmp_path)["rollbacks"]
    assert stability.spoiled({40: {"passed_over": [[31, 42]]}, 20: {}}, again) == [40]  # saved within the second spike
    held = stability.held_back(again, now)
    assert (held.code, held.why) == (
        loop.STOPPED,
        f"{why}; nothing has changed since: set a key of optim or stability to try again",
    )
    assert stability.held_back(again, config.with_keys(now, optim={"lr": 1e-4})) is None
    older = stability.settings(now).replace(
        "spike_steps=20,", "spike_steps=20, window=256,"
    )  # as until 28 November 2026
    assert older != stability.settings(now)
    assert stability.held_back([*again[:-1], again[-1] | {"stopped": older}], now) == held


def test_the_checkpoint_before_a_series_is_held():
    held = []
    spikes = stability.Spikes(C, lambda *found: None, held.append)
    for step, loss in enumerate([*curve(300)[200:], *[9.0] * 5, *curve(300)[200:], 9.0], start=1):
        spikes(step, {"loss": loss})
    assert held == [101, 206]
    nonfinite = stability.NonFinite(5, C, held.append)
    for step, row in ((7, 0.0), (8, 1.0), (9, 2.0), (10, 0.0), (12, 1.0)):
        nonfinite(step, {"skipped_in_a_row": row})
    assert held[2:] == [8, 12]
