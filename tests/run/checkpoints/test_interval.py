"""How often to save: Young's and Daly's interval."""

import math

import pytest

from jaxlm.run.checkpoints import pace


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
    assert pace.minutes(stall, verify, failures) == pytest.approx(expected, rel=1e-3)
