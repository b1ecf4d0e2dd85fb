"""What is said while a model learns to answer: that it forgets, that its answers do not end."""

import json

import pytest

from jaxlm.train import hooks

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
