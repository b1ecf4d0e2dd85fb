"""Where the phases of a run end."""

import pytest

from jaxlm import config
from jaxlm.config import ConfigError, config_files, milestones


def planned(name: str, *overrides: str) -> tuple[milestones.Phase, ...]:
    c = config.resolve(config_files.load(name, ["workdir=w", *overrides]))
    return milestones.planned(c.phases, c.train)


def test_phases_by_tokens_end_at_the_step_that_reaches_them():
    found = planned("gpuburnout_1b", "phases.plan.pilot.steps=0", "phases.plan.pilot.tokens=1_000_000_000")
    assert [(p.first, p.last) for p in found] == [(1, 200), (201, 7_630), (7_631, 60_000), (60_001, 90_000)]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("phases.plan.pilot.steps=0", "phases.plan.pilot ends after steps=0 or tokens=0: give one of them"),
        ("phases.plan.pilot.tokens=5", "steps=10000 or tokens=5"),
        ("phases.accept=plot", "there are finish, main, pilot, smoke"),
        ("phases.plan.pilot.steps=200", "pilot and smoke both end at step 200"),
    ],
)
def test_a_plan_that_can_not_be_is_one_line(override, message):
    with pytest.raises(ConfigError) as error:
        planned("gpuburnout_1b", override)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
