"""How often to save (Young's and Daly's interval), and when a save is due, by the first process's clock."""

import math

import pytest

from jaxlm.run.checkpoints import pace as interval


def test_a_save_is_due_when_its_time_has_come(monkeypatch):
    now = 0.0
    monkeypatch.setattr(interval.time, "monotonic", lambda: now)
    pace, said = interval.Pace(-1.0, 2.0), []
    due = []
    for step in range(1, 5000):
        now += 0.5
        if pace.due(step, lambda: False, 0.0):
            assert pace.due(step, lambda: False, 0.0)  # the same answer when it is asked again
            due.append(step)
            with pace.measured(step, said.append):
                now += 1.0
    assert due[0] == 1200  # ten minutes, before any save was measured
    apart = math.sqrt(2 * 43200) / 0.5
    assert due[2] - due[1] == pytest.approx(apart, abs=2)
    assert pace.left(4999, 4999 + round(apart)) == pytest.approx(1, abs=0.01)
    assert interval.Pace(-1.0, 2.0).left(1, 100) == 0  # nobody knows yet
    assert interval.Pace(0.0, 2.0).left(1, 100) == 0
    (line,) = said
    assert line.startswith("saving at least every 4.9 minutes (58")
    assert line.endswith("a save holds the loop for 1 s")


def test_none_by_time_but_what_is_wanted(monkeypatch):
    pace = interval.Pace(0.0, 2.0)
    assert pace.minutes == math.inf
    assert not pace.due(1, lambda: False, 0.0)
    assert pace.due(2, lambda: True, 0.0)


@pytest.mark.parametrize(
    ("stall", "verify", "failures", "expected"),
    [
        (2.0, 0, 2, math.sqrt(2 * 2.0 * 43200) / 60),
        (0.1, 0, 2, 1.549),
        (0.01, 0, 2, 1.0),  # never under a minute
        (1.0, 0, 0, 120.0),  # a machine that is never lost
        (30.0, 0, 100, 50.0),  # the stall stays under 1%
        (2.0, 30, 2, 25.0),  # verifying stays under 2%
    ],
)
def test_the_interval(stall, verify, failures, expected):
    assert interval.minutes(stall, verify, failures) == pytest.approx(expected, rel=1e-3)
