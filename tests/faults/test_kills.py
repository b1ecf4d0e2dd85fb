"""Runs that are killed, or asked to stop, at any moment: the same command goes on, and ends as if nothing had happened."""

import signal
import time

import pytest
from faults.harness import curve, steps, verified

pytestmark = pytest.mark.faults


def goes_on(place, name: str, step: int, **options) -> str:
    """The run goes on from this step, and ends as one that nothing happened to."""
    said = place.run(name, **options)
    assert (f"resuming at step {step}" in said) == bool(step), said
    place.assert_exact(name)
    return said


def test_kill_9_between_two_saves(place):
    place.stopped("between", 10)
    goes_on(place, "between", 8)


def test_kill_9_during_a_save(place):
    """While a file of the checkpoint is being written: what is there of it counts for nothing."""
    run = place.start("during", rules=(), inside={"hold": 7})
    run.wait_for_saved(4)
    run.fault("write hang params.orbax")
    run.hold(10)
    run.wait_for(lambda: any(run.folder.glob("checkpoints/8.orbax*")), "the save of step 8")
    run.wait_for_step(8)
    run.kill()
    assert steps(run.folder) == [4]
    goes_on(place, "during", 4)
    assert not list(run.folder.glob("checkpoints/*orbax*"))


def test_kill_9_right_after_a_save_before_it_is_read_back(place):
    """Such a checkpoint has no checksums; each array is compared with its digest when it is restored."""
    run = place.start("unsealed", rules=("write hang checksums.json",), settle=False)
    run.wait_for(lambda: steps(run.folder), "a save")
    run.kill()
    (step,) = steps(run.folder)
    assert not verified(run.folder, step)
    goes_on(place, "unsealed", step)


def test_kill_9_while_an_old_checkpoint_is_deleted(place):
    """What it leaves behind, the next start goes on from."""
    place.stopped("again", 14)
    (place.root / "again/checkpoints/8").rename(place.root / "again/checkpoints/8.deleting")
    goes_on(place, "again", 12)
    assert steps(place.root / "again") == [20, 24]


def test_kill_9_after_the_last_step(place):
    """While the last held-out loss is measured: the state was saved before that, and the loss is made up for."""
    run = place.start("last", inside={"held_out": "hangs"})
    run.wait_for_saved(24)
    run.kill()
    assert "held-out: " not in run.text()
    assert "held-out: " in goes_on(place, "last", 0)


def test_a_request_to_stop_saves_the_state(place):
    run = place.start("asked", inside={"hold": 6})
    run.wait_for_saved(4)
    run.process.terminate()
    run.wait_for_words("stopping after this ")
    run.go_on()
    said = run.end(4)
    assert "interrupted, the state is saved" in said
    assert "the same command goes on" in said
    goes_on(place, "asked", max(steps(run.folder)))
    assert max(steps(run.folder)) >= 6


@pytest.mark.parametrize(
    ("first", "second", "apart"),
    [(signal.SIGTERM, signal.SIGTERM, 0.3), (signal.SIGHUP, signal.SIGTERM, 1.5), (signal.SIGINT, signal.SIGTERM, 1.5)],
)
def test_two_signals_that_mean_one_request(place, first, second, apart):
    """Under a supervisor, while the storage is slow: the save takes longer than the signals are apart."""
    name = f"{first.name}-{second.name}"
    run = place.start(name, rules=(), inside={"hold": 6}, runs__supervise="on")
    run.wait_for_saved(4)
    run.fault("write slow checkpoints/", "sync slow checkpoints/")
    run.process.send_signal(first)
    run.go_on()
    time.sleep(apart)
    run.process.send_signal(second)
    assert "interrupted, the state is saved" in run.end(4)
    assert max(steps(run.folder)) == max(curve(run.folder)) >= 5


def test_sigterm_twice_stops_at_once(place):
    """As the storage hangs, and the user wants no more of it: exit code 1, since what came last is not saved."""
    run = place.start("twice", rules=(), inside={"hold": 6})
    run.wait_for_saved(4)
    run.fault("write hang checkpoints/")
    run.process.terminate()
    run.wait_for_words("stopping after this ")
    run.go_on()
    time.sleep(1.5)  # at once would be the same request
    run.process.terminate()
    assert "what came after the last checkpoint is not saved" in run.end(1)
    goes_on(place, "twice", 4)


def test_sigterm_before_the_first_step(place):
    """During the start of a run that resumes: nothing is lost, and nothing of it is harmed."""
    place.stopped("early", 6)
    run = place.start("early", rules=("read hang checkpoints/4",))
    run.wait_for_words("is complete")
    time.sleep(2)  # now it waits for the checkpoint
    run.process.terminate()
    run.process.wait(30)
    goes_on(place, "early", 4)


def test_another_process_in_the_same_folder_is_refused(place):
    run = place.start("shared", inside={"hold": 6})
    run.wait_for_saved(4)
    assert "another process trains in" in place.run("shared", code=2)
    run.go_on()
    run.end(0)
    place.assert_exact("shared")
