"""Disks that fail: training goes on, the older checkpoints stay, one line names the path, and saving resumes.

The shim makes the system calls of the run itself fail, for Python as for TensorStore.
"""

import pytest
from faults.harness import EVERY, STEPS, curve, steps, verified

pytestmark = pytest.mark.faults
WORDS = {
    "ENOSPC": "No space left on device",
    "EDQUOT": "Disk quota exceeded",
    "EIO": "Input/output error",
    "EROFS": "Read-only file system",
    "ESTALE": "Stale file handle",
}
# What fails at one save after the other, from the one of step 8 on: the rules, {step} for the step's number.
FOR_A_WHILE = {
    "writing": [
        ("write ENOSPC checkpoints/{step}.orbax",),
        ("write EDQUOT params.orbax-checkpoint-tmp/ocdbt",),
        ("write ESTALE train.orbax-checkpoint-tmp/ocdbt",),
        ("write ENOSPC meta.orbax",),
    ],
    "afterwards": [
        ("sync EIO checkpoints/{step}/params",),
        ("close EIO params.orbax-checkpoint-tmp/ocdbt",),
        ("write EDQUOT checksums.json",),
        ("read EIO checkpoints/{step}/params",),
    ],
    "all": [("open EROFS checkpoints/", "write EROFS checkpoints/"), ("write EIO params.orbax-checkpoint-tmp/ocdbt",)],
}


@pytest.mark.parametrize("name", FOR_A_WHILE)
def test_for_a_while(place, name):
    """Saves fail, each for another reason. The one after them works, and nothing is missing at the end."""
    run = place.start(name, rules=(), inside={"hold": 7})
    run.wait_for_saved(4)
    failures = dict(enumerate(FOR_A_WHILE[name], 2))
    for number, rules in failures.items():
        run.fault(*(rule.format(step=EVERY * number) for rule in rules))
        run.hold(EVERY * (number + 1) - 1)
        run.wait_for_words(f"checkpoint {EVERY * number} can't be ", 60)
        assert not verified(run.folder, EVERY * number)
    run.fault()
    run.go_on()
    lines = [line for line in run.end(0).splitlines() if "training goes on" in line]
    for line, (number, rules) in zip(lines, failures.items(), strict=True):
        assert line.startswith(f"checkpoint {EVERY * number} can't be ")
        assert f": {WORDS[rules[0].split()[1]]}: {run.folder}/checkpoints" in line
    assert verified(run.folder, STEPS)
    assert not list(run.folder.glob("checkpoints/*orbax*"))
    place.assert_exact(name)


def test_short_writes(place):
    """Each write takes half of what it is given, as the interface allows: all is written all the same."""
    run = place.start("short", rules=("write short checkpoints/", "write short metrics.jsonl", "write short .json"))
    run.end(0)
    assert all(verified(run.folder, step) for step in steps(run.folder))
    place.assert_exact("short")


def test_full_to_the_end(place):
    """The last state is not on disk: exit code 1, and no supervisor trains the rest again, as it would not fit either.

    With room, the same command goes on from the last whole checkpoint.
    """
    keys = {"checkpoint__max_unprotected_minutes": 0.05, "runs__supervise": "on", "runs__backoff_s": 0.1}
    run = place.start("full", rules=(), inside={"hold": 10}, **keys)
    run.wait_for_saved(8)
    run.fault("write ENOSPC checkpoints/", "write ENOSPC metrics.jsonl", "write ENOSPC samples", "write ENOSPC .json")
    run.go_on()
    said = run.end(1)
    assert "No space left on device" in said
    assert f"step {STEPS} is not saved" in said
    assert f"and another checkpoint does not fit in {run.folder}: free some room" in said
    assert "resuming" not in said
    assert steps(run.folder) == [4, 8]
    assert "resuming at step 8" in place.run("full")
    place.assert_exact("full")


def test_the_books_can_not_be_read_at_the_end(place):
    """The run is done: exit code 0, and the command that stops paying runs."""
    paid = place.root / "paid"
    keys = {"runs__supervise": "on", "runs__on_exit__done": f"touch {paid}", "runs__on_exit_unmirrored": True}
    run = place.start("books", rules=(), inside={"hold": STEPS - 2}, **keys)
    run.wait_for_saved(STEPS - EVERY)
    run.fault("read EIO /run.json", "read EIO metrics.jsonl")
    run.go_on()
    assert "done: " in run.end(0)
    assert paid.exists()


def test_a_finished_run_holds_its_state_until_there_is_room(place):
    run = place.start("held", rules=(), inside={"hold": 10})
    run.wait_for_saved(8)
    run.fault("write ENOSPC checkpoints/")
    run.go_on()
    run.wait_for_words(
        f"step {STEPS}, the last, is tried again for up to 120 minutes (checkpoint.max_unprotected_minutes)"
    )
    run.fault()
    assert "done" in run.end(0)
    assert verified(run.folder, STEPS)
    place.assert_exact("held")


def test_full_at_sigterm(place):
    """A state that can't be saved is never said to be: exit code 1 in place of 4."""
    run = place.start("full4", rules=(), inside={"hold": 6})
    run.wait_for_saved(4)
    run.fault("write ENOSPC checkpoints/")
    run.process.terminate()
    run.wait_for_words("stopping after this ")
    run.go_on()
    said = run.end(1)
    assert "interrupted, the state is saved" not in said
    assert "resuming at step 4" in place.run("full4")
    place.assert_exact("full4")


def test_full_from_the_start(place):
    """No checkpoint can be written at first; there is room later."""
    run = place.start("room", rules=("write ENOSPC checkpoints/",), inside={"hold": 7})
    run.wait_for_words("no checkpoint is whole yet")
    run.fault()
    run.go_on()
    run.end(0)
    assert verified(run.folder, STEPS)
    place.assert_exact("room")


def test_a_save_that_hangs(place):
    """Training goes on and says at each save that is due why it is skipped; when the storage is back, so are the saves."""
    run = place.start("hang", rules=(), inside={"hold": 7})
    run.wait_for_saved(4)
    run.fault("write hang params.orbax-checkpoint-tmp/ocdbt")
    run.hold(14)
    run.wait_for_words("step 12 is not saved now: the save of step 8 has taken")
    run.fault()
    run.go_on()
    run.end(0)
    assert verified(run.folder, STEPS)
    place.assert_exact("hang")


def test_a_sync_that_hangs_and_sigterm(place):
    """SIGTERM is obeyed once the storage is back."""
    run = place.start("hangsync", rules=(), inside={"hold": 7})
    run.wait_for_saved(4)
    run.fault("sync hang checkpoints/")
    run.hold(9)
    run.wait_for_step(7)
    run.process.terminate()
    run.wait_for_words("stopping after this ")
    run.go_on()
    run.fault()
    run.end(4)
    place.run("hangsync")
    place.assert_exact("hangsync")


def test_a_held_out_loss_that_can_not_be_read(place):
    """EIO at the last evaluation: the state is there already, exit code 1, and the next start makes up for the loss."""
    run = place.start("heldout", inside={"held_out": "EIO"})
    said = run.end(1)
    assert "held-out failed after step 24" in said
    assert verified(run.folder, STEPS)
    place.run("heldout")
    assert curve(run.folder) == curve(place.whole)
    place.assert_exact("heldout")
