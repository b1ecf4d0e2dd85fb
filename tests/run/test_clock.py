"""What the time left and the live line need of the clock: how long things usually take, and what goes on."""

import time

import pytest

from jaxlm.run import clock


@pytest.fixture
def counted(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    found = clock.Clock()

    def spend(activity: str, detail: str, seconds: float) -> str:
        with found.spend(activity, detail):
            now[0] += seconds
            return found.doing()

    return found, spend


def test_the_first_of_several_does_not_count_since_it_compiled(counted):
    found, spend = counted
    assert found.usual_s("held-out") == 0
    spend(clock.EVALUATE, "held-out", 30.0)
    assert found.usual_s("held-out") == 30
    spend(clock.EVALUATE, "held-out", 3.0)
    spend(clock.EVALUATE, "held-out", 5.0)
    assert found.usual_s("held-out") == 4
    assert found.usual_s("samples") == 0


def test_it_says_what_goes_on(counted):
    found, spend = counted
    assert found.doing() == "starting"
    found.begin(clock.STEP)
    assert found.doing() == ""
    assert spend(clock.EVALUATE, "held-out", 1.0) == "evaluating"
    assert spend(clock.EVALUATE, "samples", 1.0) == "sampling"
    assert spend(clock.SAVE, "checkpoint", 1.0) == "saving"
    assert found.doing() == ""
