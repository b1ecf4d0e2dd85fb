"""Losses that are not finite, and spikes: rolled back past the batches that spoiled them, to the bit, or stopped."""

import json

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from faults.harness import curve, digests, steps

pytestmark = pytest.mark.faults
NAN = {"train__max_nonfinite_steps": 2}
SPIKE = {"stability__spike_z": 4, "stability__spike_steps": 2, "optim__lr": 0.01, "optim__schedule": "constant"}


def book(place, name: str) -> dict:
    """A run's run.json."""
    return json.loads((place.root / name / "run.json").read_text())


def same(place, name: str, other: str) -> bool:
    """True if two runs have the same metrics and arrays."""
    one, two = place.root / name, place.root / other
    return curve(one) == curve(two) and digests(one) == digests(two)


def test_nan_once(place):
    """The step is skipped and said; the run is killed later, and goes on to the bit."""
    spoil = [[10, 10, "nan"]]
    said = place.run("once", inside={"spoil": spoil}, **NAN)
    assert "skipped 1" in said
    place.stopped("once killed", 14, inside={"spoil": spoil}, **NAN)
    assert "resuming at step 12" in place.run("once killed", inside={"spoil": spoil}, **NAN)
    assert same(place, "once killed", "once")


def finite(folder) -> bool:
    """True if all numbers of a checkpoint are finite."""
    items = [path.parent for path in folder.glob("*/_METADATA")]
    assert len(items) > 1
    arrays = [x for item in items for x in jax.tree.leaves(ocp.PyTreeCheckpointer().restore(item))]
    return all(np.isfinite(np.asarray(x)).all() for x in arrays)


@pytest.fixture(scope="module")
def passed_over(place) -> str:
    """A run that passes over batches 10 to 12 by hand, and never meets them.

    The host reads the metrics of a step while the next one runs: so step 12 is done before step 11 is known to be bad.
    """
    place.run("by hand", stability__skip="('10:12',)", **NAN)
    return "by hand"


def test_nan_for_a_while_rolls_back(place, passed_over):
    """As if the batches had never been there."""
    said = place.run("while", inside={"spoil": [[10, 11, "nan"]]}, **NAN)
    assert "going back to step 8, past batches 10 to 12" in said
    assert book(place, "while")["passed_over"] == [[10, 12]]
    assert same(place, "while", passed_over)


def test_kill_9_in_the_middle_of_a_rollback(place, passed_over):
    """After the spoiled steps were left, before the run stands at the next checkpoint; `trace` and resume know the window."""
    spoil = {"spoil": [[10, 11, "nan"]]}
    run = place.start("middle", inside=spoil | {"crash": 8}, **NAN)
    run.process.wait(120)  # at step 8, before the spoiled steps
    run = place.start("middle", inside=spoil, **NAN)
    run.wait_for_words("going back to step 8")
    run.kill()
    place.run("middle", inside=spoil, **NAN)
    assert same(place, "middle", passed_over)


def test_kill_9_after_a_rollback(place, passed_over):
    """The checkpoint's meta and run.json know the window."""
    spoil = {"spoil": [[10, 11, "nan"]]}
    place.stopped("after", 14, inside=spoil, **NAN)
    assert "resuming at step 12" in place.run("after", inside=spoil, **NAN)
    assert same(place, "after", passed_over)


def test_nan_for_good(place):
    """Other batches do not help: exit code 3, no state that is not finite on disk, and the last good checkpoint stays."""
    spoil = {"spoil": [[10, 10_000, "nan"]]}
    said = place.run("good", code=3, inside=spoil, **NAN)
    assert "other batches did not help" in said
    assert steps(place.root / "good")[-1] == 8
    again = place.run("good", code=3, inside=spoil, **NAN)
    assert "nothing has changed since" in again  # at once: it costs no step
    assert "step 9/24" not in again
    place.run("good", **NAN, stability__spike_z=9.0)  # something has
    assert steps(place.root / "good")[-1] == 24


def test_a_learning_rate_that_blows_up(place):
    """Exit code 3, never "done": nothing of what the run keeps is spoiled."""
    options = {"optim__lr": 1e30, "optim__clip_norm": 0, "train__max_nonfinite_steps": 3, "train__steps": 200}
    folder = place.stopped("blown", 10)
    said = place.run("blown", code=3, **options)
    assert "stopped at step" in said
    assert steps(folder)
    assert all(finite(folder / "checkpoints" / str(step)) for step in steps(folder))


def test_a_spike_rolls_back(place):
    """Two batches of words that the model has never seen: named by their documents, and passed over."""
    spoil = {"spoil": [[18, 19, "far"]]}
    said = place.run("spike", inside=spoil, **SPIKE)
    assert "is a spike" in said
    assert "going back to step 16, past batches 18 to 20" in said
    (line,) = map(json.loads, (place.root / "spike/spikes.jsonl").read_text().splitlines())
    assert (line["step"], line["batch"]) == (18, 18)
    assert all(".jsonl:" in document for document in line["documents"])
    place.run("no spike", stability__skip="('18:20',)", **SPIKE)
    assert same(place, "spike", "no spike")


def test_two_processes_roll_back_together(place, passed_over):
    spoil = {"spoil": [[10, 11, "nan"]]}
    for one in place.several("both", inside={0: spoil, 1: spoil}, **NAN):
        one.end(0)
    found, expected = curve(place.root / "both"), curve(place.root / passed_over)
    assert found.keys() == expected.keys()
    assert all(found[step]["train/loss"] == pytest.approx(expected[step]["train/loss"], rel=1e-5) for step in found)
    assert book(place, "both")["passed_over"] == [[10, 12]]
