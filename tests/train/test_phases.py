"""Phases: the bill, gates, budgets, and what a later start makes of them."""

import dataclasses
import pathlib
import types

import pytest

from jaxlm import config
from jaxlm.config import ConfigError, RunError, config_files, milestones
from jaxlm.train import hooks, loop, phases

TOKENS = 131_072


def plan(**gates) -> tuple[milestones.Phase, ...]:
    """The story's four phases, with gates for some: plan(pilot={"max_val_loss": 3.0})."""
    return tuple(
        dataclasses.replace(phase, config=dataclasses.replace(phase.config, **gates.get(phase.name, {})))
        for phase in planned("gpuburnout_1b")
    )


def planned(name: str, *overrides: str) -> tuple[milestones.Phase, ...]:
    c = config.resolve(config_files.load(name, ["workdir=w", *overrides]))
    return milestones.planned(c.phases, c.train)


class Run:
    """A run whose loss and dollars the test sets, and its run.json."""

    def __init__(self, rows=()):
        self.rows, self.records, self.usd = list(rows), {}, 0.0

    def evaluated(self, step, loss, usd, **more):
        self.usd = usd
        self.records[step] = {"step": step, "val/loss": loss, "cost_usd": usd, "wall_s": usd * 2250.0} | more

    def hook(self, plan, accept="", every_steps=10, **stop):
        c = config.resolve(config_files.load("gpuburnout_1b", ["workdir=w", f"log.every_steps={every_steps}"]))
        phased = dataclasses.replace(c.phases, plan={phase.name: phase.config for phase in plan}, accept=accept)
        limits = config.StopConfig(**{"usd": 0.0, "hours": 0.0, "usd_per_centinat": 0.0} | stop)
        c, book = dataclasses.replace(c, phases=phased, stop=limits), self

        class Phases(phases.Phases):
            def rows(self):
                return list(book.rows)

            def append(self, entry):
                book.rows.append(entry)

            def records(self):
                return book.records

        return Phases(c, pathlib.Path("runs/1b"), lambda: (self.usd * 2250.0, self.usd))


def after(hook: phases.Phases, step: int, shown: list | None = None) -> loop.Ending | None:
    """What the loop would get from the hook after `step`."""
    say = [].append if shown is None else shown.append
    return hook(types.SimpleNamespace(step=step, say=say)) if hook.due(step, 90_000) else None


def test_the_storys_bill():
    run, shown = Run(), []
    hook = run.hook(plan(smoke={"usd": 0.0}))
    for step, loss, usd in ((200, 6.41, 2.0), (10_000, 2.907, 24.0), (60_000, 2.573, 118.0), (90_000, 2.494, 162.0)):
        run.evaluated(step, loss, usd)
        assert after(hook, step, shown) is None
    assert [row["phase"] for row in run.rows] == ["smoke", "pilot", "main", "finish"]
    assert [f"{row['usd_per_point']:.3g}" for row in run.rows[1:]] == ["6.28", "281", "557"]
    assert [row["usd"] for row in run.rows] == [2.0, 22.0, 94.0, 44.0]
    assert [row["tokens"] for row in run.rows] == [steps * TOKENS for steps in (200, 9_800, 50_000, 30_000)]
    assert run.rows[2]["loss_begin"] - run.rows[2]["loss_end"] == pytest.approx(0.334)
    assert run.rows[3]["hours"] == pytest.approx(44 / 1.6)
    last = shown[-1].splitlines()
    assert len(last) == 6
    assert last[3].split() == ["main", "60,000", "6.55B", "2.907", "to", "2.573", "0.334", "58.8", "$94.00", "$281.44"]
    assert last[-1].split() == ["all", "101", "$162.00"]


def test_the_training_loss_stands_in_where_no_text_was_evaluated():
    run = Run()
    hook = run.hook(plan())
    run.records = {step: {"train/loss": 10.0 - step / 100, "cost_usd": 0.0} for step in range(10, 201, 10)}
    assert after(hook, 200) is None
    (row,) = run.rows
    assert (row["loss"], row["loss_begin"]) == ("train", 9.9)
    assert row["loss_end"] == pytest.approx(8.0 + 0.45)  # the mean of the last ten
    assert row["usd_per_point"] == 0.0
    run.records |= {step: {"train/loss": 9.0} for step in range(210, 10_001, 10)}
    after(hook, 10_000)
    assert run.rows[1]["usd_per_point"] is None  # the loss rose


def test_the_ends_of_phases_by_tokens_are_milestones():
    found = planned("gpuburnout_1b", "phases.plan.pilot.steps=0", "phases.plan.pilot.tokens=1_000_000_000")
    assert Run().hook(found).milestones == {200, 7_630, 60_000, 90_000}


@pytest.mark.parametrize(
    ("gate", "record", "words"),
    [
        (
            {"max_val_loss": 2.9},
            {},
            "a held-out loss of 2.9070; its gate is at most 2.9 (phases.plan.pilot.max_val_loss)",
        ),
        ({"max_val_loss": 2.9}, {"val/loss": None}, "no finite held-out loss"),
        ({"max_nonfinite_steps": 1}, {"train/skipped": 2.0}, "2 non-finite steps; its gate is at most 1"),
        ({"min_tokens_per_second": 30e3}, {"tokens_per_second": 28.4e3}, "28.4k tokens/s; its gate is at least 30k"),
    ],
)
def test_a_failed_gate_stops_says_why_and_stops_again_until_it_is_accepted(gate, record, words):
    gated = plan(pilot=gate)
    run = Run()
    run.evaluated(200, 6.41, 2.0)
    hook = run.hook(gated)
    assert after(hook, 200) is None
    run.evaluated(10_000, 2.907, 24.0, **record)
    ending = after(hook, 10_000)
    assert (ending.code, ending.cause, ending.keep) == (loop.STOPPED, "gate", True)
    assert ending.why.startswith("phase pilot ended at step 10,000 with ")
    assert words in ending.why
    assert "--config.phases.accept=pilot" in ending.why
    assert "jaxlm train runs/1b --branch=decay --steps=N" in ending.why
    assert run.hook(gated).begin() == ending  # the next start, at once
    assert run.hook(gated, accept="smoke").begin() == ending
    assert len(run.rows) == 2
    hook = run.hook(gated, accept="pilot")
    assert hook.begin() is None
    assert hook.done(10_000)
    assert run.rows[-1]["accepted"] == "gate"
    assert run.hook(gated).begin() is None  # accepted once is accepted
    assert run.hook(plan()).begin() is None


def test_a_gate_that_holds_or_was_accepted_beforehand_does_not_stop():
    gated = plan(pilot={"max_val_loss": 2.9})
    for accept, loss in (("", 2.9), ("pilot", 3.1)):
        run = Run()
        run.evaluated(10_000, loss, 24.0)
        assert after(run.hook(gated, accept), 10_000) is None
        assert run.rows[-1]["accepted"] == ("gate" if accept else "")
        assert run.hook(gated).begin() is None


def test_a_phase_whose_evaluation_failed_is_not_closed():
    run = Run()
    run.records[10_000] = {"train/loss": 2.9}
    with pytest.raises(RunError, match="no held-out loss of step 10000"):
        after(run.hook(plan(pilot={"max_val_loss": 2.9})), 10_000)
    assert not run.rows


def test_a_gate_on_held_out_text_needs_some():
    with pytest.raises(ConfigError, match=r"phases\.plan\.pilot\.max_val_loss is a gate on held-out text"):
        Run().hook(plan(pilot={"max_val_loss": 2.9})).checked(None)
    assert Run().hook(plan(pilot={"max_val_loss": 2.9})).checked(len) is len
    assert Run().hook(plan()).checked(None) is None


def test_a_budget_is_the_phases_own_and_stops_at_the_first_step_beyond_it():
    run = Run()
    hook = run.hook(plan())
    run.evaluated(200, 6.41, 4.9)
    assert after(hook, 200) is None
    for step in range(201, 300):
        run.usd = 4.9 + 0.5 * (step - 200)  # the budget of 25 is spent after 50 steps
        if ending := after(hook, step):
            break
    assert step == 250
    assert (ending.code, ending.cause, ending.keep) == (loop.STOPPED, "budget", True)
    assert ending.why.startswith(
        "phase pilot has spent $25.00 of its $25.00 at step 250 of 10,000 (phases.plan.pilot.usd)"
    )
    assert run.rows[-1]["ended"] is False
    assert "not at its end" in phases.table(run.rows)
    assert run.hook(plan()).begin() == ending
    assert run.hook(plan(pilot={"usd": 30.0})).begin() is None  # a larger budget goes on too
    hook = run.hook(plan(), accept="pilot")
    assert hook.begin() is None
    run.usd = 1000.0
    assert after(hook, 300) is None
    run.evaluated(10_000, 2.9, 1000.0)
    assert after(hook, 10_000) is None  # overspent, but at its end
    assert run.rows[-1]["usd"] == pytest.approx(995.1)
    run.usd = 1109.0
    assert after(hook, 10_001) is None
    run.usd = 1110.0
    assert after(hook, 10_002).cause == "budget"  # of the next phase
    assert [line.split()[0] for line in phases.table(run.rows).splitlines()[1:]] == ["smoke", "pilot", "main", "all"]


def test_an_accepted_budget_leaves_the_gate_of_its_phase():
    run, gated = Run(), plan(pilot={"usd": 25.0, "max_val_loss": 2.9})
    run.evaluated(200, 6.41, 2.0)
    after(run.hook(gated), 200)
    run.usd = 27.0
    assert after(run.hook(gated), 5_000).cause == "budget"
    hook = run.hook(gated, accept="pilot")
    assert hook.begin() is None
    assert run.rows[-1]["accepted"] == "budget"
    run.evaluated(10_000, 3.1, 50.0)
    assert not hook.due(9_999, 90_000)
    ending = after(hook, 10_000)
    assert (ending.code, ending.cause) == (loop.STOPPED, "gate")
    assert run.hook(gated).begin() == ending
    assert run.hook(gated, accept="pilot").begin() is None
    assert run.hook(gated).begin() is None


def test_several_processes_look_at_the_budget_at_logged_steps(monkeypatch):
    run = Run()
    hook = run.hook(plan(), every_steps=10)
    run.usd = 6.0
    assert hook.due(5, 90_000)
    monkeypatch.setattr(phases.jax, "process_count", lambda: 2)
    monkeypatch.setattr(phases, "from_first", lambda make: make())
    assert [step for step in range(1, 40) if hook.due(step, 90_000)] == [10, 20, 30]


def test_the_first_phase_pays_for_the_start():
    run = Run()
    run.records[0] = {"step": 0, "wall_s": 600.0, "cost_usd": 0.3}
    run.evaluated(200, 6.41, 2.0)
    assert after(run.hook(plan()), 200) is None
    assert run.rows[0]["usd"] == 2.0


def test_a_resumed_phase_goes_on_with_its_dollars():
    run = Run()
    run.evaluated(200, 6.41, 4.9)
    after(run.hook(plan()), 200)
    run.usd = 29.0
    assert not run.hook(plan()).due(5_000, 90_000)
    run.usd = 29.91
    assert run.hook(plan()).due(5_000, 90_000)
    run.rows.clear()  # run.json was damaged: metrics.jsonl knows it too
    assert run.hook(plan()).due(5_000, 90_000)
    run.usd = 29.0
    assert not run.hook(plan()).due(5_000, 90_000)


@pytest.mark.parametrize(
    "change", [{"phase": 3}, {"usd": "much"}, {"usd": True}, {"ended": None}, {"val_loss": []}, {"accepted": "x"}]
)
def test_rows_that_somebody_mangled_are_left_out(change):
    run = Run()
    run.evaluated(200, 6.41, 4.9)
    after(run.hook(plan()), 200)
    (row,) = run.rows
    assert phases.sound([row]) == [row]
    assert phases.sound([row | change, {}, 3, {**row, "hours": float("nan")}]) == []
    assert run.hook(plan()).begin() is None


@pytest.mark.parametrize(
    ("limit", "larger", "words"),
    [
        ({"usd": 20.0}, {"usd": 30.0}, "20 of config.stop.usd=20"),
        ({"hours": 12.5}, {"hours": 20}, "12.5 of config.stop.hours=12.5"),
        ({"steps": 230}, {"steps": 300}, "230 of config.stop.steps=230"),
    ],
)
@pytest.mark.parametrize("phased", [True, False])
def test_what_the_whole_run_may_take_stops_it_at_the_first_step_beyond_and_is_raised_to_go_on(
    limit, larger, words, phased
):
    run, shown, phased = Run(), [], plan() if phased else ()
    run.evaluated(200, 6.41, 4.9)
    hook = run.hook(phased, **limit)
    assert hook.begin() is None
    assert after(hook, 200, shown) is None
    for step in range(201, 300):
        run.usd = 5 + 0.5 * (step - 200)
        if ending := after(hook, step, shown):
            break
    assert (step, ending.code, ending.cause, ending.keep) == (230, loop.STOPPED, "budget", True)
    assert ending.why.startswith(f"the run has taken {words} at step 230 of 90,000: raise it to go on, ")
    assert "--branch=decay" in ending.why
    assert len(shown) == len(run.rows) == 2 * bool(phased)  # the bill has the phase that was stopped
    assert run.hook(phased, **limit).due(231, 90_000)
    run.records[230] = {"step": 230}
    assert run.hook(phased, **limit).begin() == ending  # the next start, at once
    run.usd += 1  # a pause that was paid for
    assert run.hook(phased, **limit).begin().cause == "budget"
    assert run.hook(phased, **larger).begin() is None
    assert not run.hook(phased, **larger).due(231, 90_000)
    run.records[90_000] = {"step": 90_000}
    assert run.hook(phased, **limit).begin() is None  # all its steps are done
    assert bool(after(run.hook(phased, **limit), 90_000)) is False


def test_no_phase_no_work():
    hook = Run().hook(())
    assert not any(hook.due(step, 90_000) for step in range(100))
    assert hook.begin() is None


def test_a_phases_end_is_saved_evaluated_and_sampled(tmp_path):
    c = config.resolve(config_files.load("gpuburnout_1b", ["workdir=w", "checkpoint.every_steps=0"]))
    ends = Run().hook(plan()).milestones
    assert ends == {200, 10_000, 60_000, 90_000}
    saver = types.SimpleNamespace(wants_save=lambda: False, verify_s=0.0)
    three = [
        hooks.Save(saver, c.checkpoint, 2.0, {}, ends),
        hooks.HeldOut(lambda variables: {}, loop.Every(0, ends), {}),
        hooks.Sample(lambda variables, step: [], loop.Every(c.sample.every_steps, ends), tmp_path / "samples"),
    ]
    for hook in three:
        assert [step for step in (1, 199, 200, 201, 10_000, 60_000, 90_000) if hook.due(step, 90_001)] == sorted(ends)
