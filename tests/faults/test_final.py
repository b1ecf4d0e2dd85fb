"""A run with a final mixture: killed on both sides of the switch, changed, prolonged, branched."""

import pytest
from faults.harness import STEPS, steps

pytestmark = pytest.mark.faults
FINAL = {"data__final__share": 0.5, "data__final__weights__b": 30.0}  # a keeps its 3
SWITCH = STEPS // 2


def test_a_run_that_is_killed_before_and_after_the_switch_ends_as_one_that_was_not(place):
    said = place.run("final", **FINAL)
    assert f"mixture: a 0.75, b 0.25 to step {SWITCH}, then b 0.909, a 0.0909\n" in said
    place.stopped("killed", SWITCH - 2, **FINAL)
    place.stopped("killed", SWITCH + 5, **FINAL)
    place.run("killed", **FINAL)
    place.assert_exact("killed", of="final")
    with pytest.raises(AssertionError):
        place.assert_exact("final")  # the comparison can fail: the run without a final mixture is another one


def test_what_changes_the_batches_behind_a_run_is_refused_in_a_line(place):
    """The final mixture has begun: neither its keys nor its first batch may change, but the run may go on."""
    place.run("changed", **FINAL)
    last = steps(place.root / "changed")[-1]
    for changes, words in (
        ({"data__final__weights__b": 20.0}, "data.final.weights was a 1/11, b 10/11, is a 3/23, b 20/23"),
        ({"data__final__share": 0.25}, "data.final.share was 0.5, is 0.25"),
        ({"train__steps": 2 * STEPS}, f"it was to begin after batch {SWITCH}, now after batch {STEPS}"),
    ):
        assert words in place.run("changed", code=2, **FINAL | changes)
    assert steps(place.root / "changed")[-1] == last
    place.run("changed", **FINAL, train__steps=STEPS + 4, optim__schedule_steps=STEPS)
    assert steps(place.root / "changed")[-1] == STEPS + 4


def test_a_branch_takes_a_mixture_that_its_trunk_never_had(place):
    begin = steps(place.whole)[0]
    keys = {"origin": place.whole, "origin_checkpoint": begin, "origin_state": True}
    keys |= {"train__steps": begin + 8, "optim__schedule_steps": STEPS, "optim__decay_at_step": begin}
    keys |= {"data__final__weights__b": 30.0}
    assert f"mixture: a 0.75, b 0.25 to step {begin}, then b 0.909, a 0.0909\n" in place.run("branch", **keys)
    place.stopped("branch_killed", begin + 5, **keys)
    place.run("branch_killed", **keys)
    place.assert_exact("branch_killed", of="branch")
    early = keys | {"data__final__share": 0.5}  # after step 12, which the trunk has passed with its one mixture
    assert f"it was to begin never, now after batch {SWITCH}" in place.run("early", code=2, **early)
