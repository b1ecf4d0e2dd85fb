"""Bends of a training curve: found on curves that were made, named after what came there, and not seen on smooth ones."""

import csv
import json
import pathlib

import numpy as np
import pytest
from tiny_curves import law, schedule

from jaxlm import config
from jaxlm.config import config_files
from jaxlm.plan import bends
from jaxlm.plan.sweep import sweep
from jaxlm.train import outlook

CURVES = pathlib.Path(__file__).parents[3] / "shared/data/curves"
STEPS = np.arange(1, 121)


def smooth(seed: int, noise: float = 0.02, lasting: float = 0.0) -> np.ndarray:
    """A loss that falls ever more slowly, with noise; `lasting` noise of the same size stays for some ten steps."""
    rng = np.random.default_rng(seed)
    slow = np.zeros(len(STEPS))
    for i, drawn in enumerate(rng.standard_normal(len(STEPS) - 1), start=1):
        slow[i] = 0.9 * slow[i - 1] + np.sqrt(1 - 0.9**2) * drawn
    return 2.8 + 4.1 * (1 + STEPS / 12) ** -0.9 + noise * rng.standard_normal(len(STEPS)) + lasting * slow


def found(losses: np.ndarray, *events: tuple[int, str]) -> list[tuple[int, list[str]]]:
    return [(bend["step"], bend["events"]) for bend in bends.find(STEPS, losses, events)]


@pytest.mark.parametrize("lasting", [0.0, 0.04])
def test_a_smooth_curve_has_no_bend(lasting):
    """Also where noise lasts for some steps: one in twenty of such curves may be named."""
    named = [seed for seed in range(6) if found(smooth(seed, lasting=lasting), (40, "a"), (70, "b"), (100, "c"))]
    assert len(named) <= 1


@pytest.mark.parametrize(
    ("shape", "step"),
    [
        (0.2 * (STEPS >= 70), 70),  # at once, as by another mixture
        (-0.2 * np.clip((STEPS - 69) / 6, 0, 1), 70),  # in some steps, as by a lower rate
        (-0.3 * np.clip((STEPS - 69) / 24, 0, 1), 70),  # slowly, as by a decay
    ],
)
def test_a_bend_is_named_after_the_event_there_and_no_other(shape, step):
    (bend,) = bends.find(STEPS, smooth(1) + shape, [(40, "before"), (step, "cause"), (100, "after")])
    assert bend["events"] == ["cause"]
    assert abs(bend["step"] - step) <= 1
    assert bend["change"] == pytest.approx(shape[-1], abs=0.07)


def test_what_came_at_the_same_step_is_named_together():
    assert found(smooth(1) + 0.2 * (STEPS >= 70), (70, "one"), (40, "far"), (70, "two")) == [(70, ["one", "two"])]


def test_a_bend_without_an_event_is_none_of_the_events():
    assert found(smooth(1) + 0.3 * (STEPS >= 70), (40, "before"), (100, "after")) == [(70, [])]


def test_two_bends_have_two_causes():
    both = 0.3 * (STEPS >= 50) - 0.3 * (STEPS >= 90)
    assert found(smooth(1) + both, (50, "up"), (90, "down")) == [(50, ["up"]), (90, ["down"])]


def test_one_loss_that_is_far_off_is_no_bend():
    losses = smooth(1)
    losses[60] = 9.0
    assert found(losses, (61, "a")) == []


def test_few_losses_have_no_bends():
    assert bends.find(STEPS[:19], smooth(1)[:19], []) == []
    assert bends.find(STEPS[:0], smooth(1)[:0], []) == []


def test_losses_without_noise_have_no_bends():
    for loss in (0.0, 2.5):
        assert bends.find(STEPS, np.full(len(STEPS), loss), [(50, "a restart")]) == []


@pytest.mark.parametrize(
    ("kind", "every", "named"),
    [
        ("constant", 1, [(21, "the warm-up ended")]),
        ("cosine", 10, [(21, "the warm-up ended")]),
        ("linear", 1, [(21, "the warm-up ended")]),
        ("wsd", 1, [(21, "the warm-up ended"), (181, "the decay of the rate began")]),
        ("wsd", 8, [(17, "the warm-up ended"), (177, "the decay of the rate began")]),  # it turns between two
    ],
)
def test_turns_of_the_rate(kind, every, named):
    steps = np.array([1, *range(every, 201, every)])[every == 1 :]
    assert list(bends._turns(steps, schedule(kind, 200, 20)(steps))) == named


def test_jumps_of_the_rate():
    assert list(bends._turns(STEPS, np.where(STEPS < 60, 1e-2, 1e-3))) == [(60, "the rate went from 0.01 to 0.001")]
    assert list(bends._turns(STEPS[:0], STEPS[:0])) == []


def test_records_without_a_loss_or_a_rate_are_left_out(tmp_path):
    losses = smooth(1) + 0.3 * (STEPS >= 70)
    losses[[3, 80]] = np.nan
    a_run(tmp_path / "run", losses, np.where(STEPS == 50, np.nan, 1e-2), {"starts": [BEGAN, BEGAN | {"step": 69}]})
    assert why(tmp_path / "run") == [(70, "a restart: nothing changed")]


def test_the_law_explains_the_change_that_it_made():
    def rate(s):
        return schedule("constant", 20_000, 400)(s) * np.where(s <= 12_000, 1, 0.2)

    steps = np.arange(100, 20_001, 100)
    losses = law(rate, steps, 400) + 0.003 * np.random.default_rng(0).standard_normal(len(steps))
    (bend,) = bends.find(steps, losses, [*bends._turns(steps, rate(steps))])
    assert bend["events"] == ["the rate went from 0.0003 to 6e-05"]
    assert bends._explained(bend, steps, losses, rate(steps)) == pytest.approx(bend["change"], rel=0.35)
    assert bends._explained(bend | {"step": 500}, steps, losses, rate(steps)) is None  # too early


@pytest.mark.shared
@pytest.mark.skipif(not CURVES.is_dir(), reason="the public curves are not beside the checkout")
@pytest.mark.parametrize("path", sorted(CURVES.glob("100M*.csv")), ids=lambda path: path.stem)
def test_bends_of_public_curves(path):
    """Those whose rate falls at once or decays bend there and nowhere else; constant and cosine ones don't."""
    steps, rates, losses = np.array([list(map(float, row)) for row in list(csv.reader(path.open()))[1:]]).T
    names = [bend["events"] for bend in bends.find(steps, losses, [*bends._turns(steps, rates)])]
    if "wsd" not in path.name:
        assert names == []
    else:
        ((name,),) = names
        assert name.startswith("the rate went from 0.0003" if "wsdcon" in path.name else "the decay of the rate began")


def a_run(folder: pathlib.Path, losses: np.ndarray, rates: np.ndarray, book: dict, *keys: str) -> None:
    folder.mkdir(parents=True)
    c = config.resolve(config_files.load("quickstart", [f"workdir={folder}", "train.steps=120", *keys]))
    (folder / "config.json").write_text(config.to_json(c))
    (folder / "run.json").write_text(json.dumps(book))
    lines = [
        {"step": int(s), "train/loss": float(y), "train/lr": float(r), "time": 1.0, "wall_s": 1.0}
        for s, y, r in zip(STEPS, losses, rates, strict=True)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def why(folder: pathlib.Path) -> list[tuple[int, str]]:
    c = config.resolve(config_files.from_run(folder / "config.json"))
    return [(bend["step"], bend["why"]) for bend in outlook.of_run(folder, c).summary(c.stop)["bends"]]


BEGAN = {"time": "2026-11-29T10:00:00+00:00", "step": 0}


def test_a_restart_is_named_with_what_it_changed_beside_the_rate_and_the_law(tmp_path):
    changed = [{"name": "optim.lr", "was": 0.01, "is": 0.001}]
    book = {"starts": [BEGAN, BEGAN | {"step": 69, "changed": changed}, BEGAN | {"step": 99}]}
    rates = np.where(STEPS < 70, 1e-2, 1e-3)
    a_run(tmp_path / "run", smooth(1) - 0.2 * (STEPS >= 71), rates, book)
    ((step, words),) = why(tmp_path / "run")
    assert step in (70, 71)
    for part in ("the rate went from 0.01 to 0.001", "a restart: optim.lr was 0.01, is 0.001", "law expects "):
        assert part in words
    assert "nothing changed" not in words
    summary = outlook.gather(tmp_path / "run")
    assert [row["events"] for row in bends.of_run(tmp_path / "run", summary, [])] == [words.split("; ")[:2]]


@pytest.mark.parametrize(
    ("book", "words"),
    [
        ({"starts": [BEGAN, BEGAN | {"step": 69}]}, "a restart: nothing changed"),
        ({"phases": [{"phase": "pilot", "last_step": 69, "ended": True}]}, "phase pilot was over"),
        (
            {"rollbacks": [{"steps": [70, 75], "batches": [70, 75], "time": 0.0, "to": 60}]},
            "a rollback, past batches 70 to 75",
        ),
        ({}, "no event of the run is there"),
    ],
)
def test_events_of_the_ledger(tmp_path, book, words):
    a_run(tmp_path / "run", smooth(1) + 0.3 * (STEPS >= 70), np.full(120, 1e-2), book)
    assert why(tmp_path / "run") == [(70, words)]


def test_the_final_mixture_is_named_with_its_weights(tmp_path):
    keys = ["data.final.share=0.25", "data.final.weights.math=90", "optim.warmup_steps=0"]
    a_run(tmp_path / "run", smooth(1) + 0.3 * (STEPS >= 91), np.full(120, 1e-2), {}, *keys)
    assert why(tmp_path / "run") == [(91, "the final mixture began: math 90")]


def test_a_sweep_says_whether_a_bend_is_within_the_noise_of_seeds(tmp_path):
    run = tmp_path / "sweep/runs/one"
    a_run(run, smooth(1) + 0.3 * (STEPS >= 70), np.full(120, 1e-2), {})
    c = config.resolve(config_files.from_run(run / "config.json"))
    shape = {"parameters": outlook.gather(run)["run"]["params"], "steps": c.train.steps}
    made = {"version": sweep.VERSION, "same": {}, "shape": shape, "arms": [], "runs": []}
    made["noise"] = {"squares": 0.0, "df": 0}

    def says(scatter: float) -> str:
        text = json.dumps(made | {"result": {"scatters": [scatter]}})
        (tmp_path / "sweep" / sweep.FILE).write_text(text)
        ((_, words),) = why(run)
        return words

    assert says(0.2) == "no event of the run is there; within the noise of seeds, 0.200 (sweep)"
    assert says(0.05) == "no event of the run is there; beyond the noise of seeds, 0.050 (sweep)"
    assert list(bends._seeds(pathlib.Path("/run"), {}, 0.1)) == []  # a run at the root of the disk
    made["shape"]["steps"] = 7
    assert list(bends._seeds(run, {"parameters": 1, "steps": 120}, 0.1)) == []
