"""How often hooks are still due, which the time left of a run counts; what is said while a model learns to answer."""

import dataclasses
import json
import types

import pytest

from jaxlm.run import clock
from jaxlm.train import hooks, loop


def make(fields: type, **values):
    """A section of the config with these values; the others do not matter here."""
    return fields(**{f.name: values.get(f.name) for f in dataclasses.fields(fields)})


def held_out(every: int, evaluate=dict, milestones: frozenset[int] = frozenset()) -> hooks.HeldOut:
    return hooks.HeldOut(evaluate, loop.Every(every, milestones | {0}), {})


@pytest.mark.parametrize("milestones", [frozenset(), frozenset({7}), frozenset({10, 25})])
@pytest.mark.parametrize("every", [0, 1, 10, 25])
def test_what_is_left_is_what_will_be_due(every, milestones):
    hook = held_out(every, milestones=milestones)
    for step in range(1, 26):
        assert hook.left(step, 25) == sum(hook.due(s, 25) for s in range(step, 26)), step


def test_without_held_out_text_nothing_is_due():
    hook = held_out(5, None)
    assert hook.left(1, 25) == 0
    assert not any(hook.due(step, 25) for step in range(26))


def test_samples_are_counted_at_their_own_steps(tmp_path):
    hook = hooks.Sample(lambda *_: [], loop.Every(10, {3, 20}), tmp_path)
    for step in range(1, 26):
        assert hook.left(step, 25) == sum(hook.due(s, 25) for s in range(step, 26)), step


def test_a_run_counts_what_its_hooks_usually_take(monkeypatch):
    spent = clock.Clock()
    monkeypatch.setattr(spent, "usual_s", {"held-out": 4.0}.get)
    assert loop.between_s([held_out(10)], spent, 11, 30) == 8.0
    assert loop.between_s([held_out(10)], spent, 30, 30) == 4.0


@pytest.mark.parametrize("milestones", [frozenset(), frozenset({7})])
@pytest.mark.parametrize("every", [0, 10])
def test_benchmarks_are_due_at_their_steps_and_at_the_end(every, milestones):
    hook = hooks.Benchmarks(lambda variables, step: {}, loop.Every(every, milestones))
    for step in range(1, 26):
        assert hook.left(step, 25) == sum(hook.due(s, 25) for s in range(step, 26)), step
    assert hook.due(25, 25)
    assert hooks.Benchmarks(None, loop.Every(10)).left(1, 25) == 0
    assert not hooks.Benchmarks(None, loop.Every(10)).due(25, 25)


def test_benchmarks_that_an_earlier_start_answered_are_done():
    measured = {10}
    hook = hooks.Benchmarks(lambda variables, step: {"eval/piqa/acc": step / 100}, loop.Every(10), measured)
    assert hook.done(10)
    assert not hook.done(20)
    moment = loop.Moment(20, types.SimpleNamespace(params={"params": {}}), {}, print)
    assert hook(moment) == {"eval/piqa/acc": 0.2}
    assert hook.done(20)


BITS, CHANGE = "val/base/bits_per_byte", "val/base/change"


def test_the_change_since_the_first_step_is_told_and_too_much_of_it_mended():
    remark = hooks.Remarks(None, 0.05)
    assert remark(0, {BITS: 2.0, "val/loss": 3.0}) == ({}, [])
    more, (line,) = remark(10, {BITS: 2.03})
    assert more == {CHANGE: pytest.approx(0.015)}
    assert line == "the base's own text: 2.0300 bits per byte, +1.5% since the first step"
    more, (line,) = remark(20, {BITS: 2.05})
    assert more == {CHANGE: pytest.approx(0.025)}
    assert "it forgets what it knew: more replay (replay.share=0.05 now), a lower optim.lr" in line
    assert "replay (replay.share=0.05)" in hooks.Remarks(1.0, 0.0)(1, {BITS: 1.1})[1][0]


def test_without_the_text_or_its_beginning_nothing_is_said():
    assert hooks.Remarks(None, 0.0)(10, {BITS: 2.0}) == ({}, [])
    assert hooks.Remarks(2.0, 0.0)(10, {"val/loss": 2.0}) == ({}, [])


def test_answers_that_do_not_end():
    remark = hooks.Remarks(None, 0.0)
    assert remark(0, {"samples/ended": 0.0})[1] == []  # nobody has told the base to end
    assert remark(10, {"samples/ended": 0.5})[1] == []
    (line,) = remark(10, {"samples/ended": 0.25})[1]
    assert line.startswith("75% of the answers do not end within sample.max_new_tokens")


def test_a_resumed_run_finds_its_beginning(tmp_path):
    assert hooks.base_before(tmp_path) is None
    rows = [{"step": 0, "samples/ended": 0.0}, {"step": 0, BITS: 1.5}, {"step": 5, BITS: 1.7}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert hooks.base_before(tmp_path) == 1.5
