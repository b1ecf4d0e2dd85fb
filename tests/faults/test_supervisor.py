"""Real training under the supervisor: crashes and hangs start it again, and killing either of the two loses nothing."""

import os
import pathlib
import shutil
import signal
import time

import pytest
from faults.harness import Started, curve, digests, steps

from jaxlm.run import ledger

pytestmark = pytest.mark.faults
UNDER = {"runs__supervise": "on", "runs__backoff_s": 0.1}
HANG_S = 6.0


def child(run: Started) -> int:
    """The process id of the training process, once it is there."""
    path = pathlib.Path(f"/proc/{run.process.pid}/task/{run.process.pid}/children")
    run.wait_for(lambda: bool(path.read_text()), "a child")
    return int(path.read_text().split()[0])


def gone(pid: int) -> bool:
    """True if a process has ended."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_a_child_that_is_killed_twice_is_started_again(place):
    run = place.start("killed", inside={"hold": 6}, **UNDER)
    for times, step in enumerate((6, 15), 1):
        run.wait_for_saved(step // 4 * 4)
        os.kill(child(run), signal.SIGKILL)
        run.hold(15)
        run.wait_for(lambda times=times: run.text().count("was ended by SIGKILL") == times, "a restart")
    run.go_on()
    said = run.end(0)
    assert "resuming at step 4" in said
    assert "resuming at step 12" in said
    place.assert_exact("killed")


@pytest.mark.parametrize(("how", "supervised"), [("moved", True), ("deleted", False), ("another in its place", True)])
def test_a_folder_that_is_moved_or_deleted_ends_the_run(place, how, supervised):
    """One line, exit code 1, no further start, and nothing at the old path; where it is now, the run goes on."""
    name = f"{how} {supervised}".replace(" ", "-")
    run = place.start(name, inside={"hold": 6}, **UNDER if supervised else {})
    run.wait_for_saved(4)
    elsewhere = run.folder.with_name(f"{name}-new")
    run.folder.rename(elsewhere)
    if how == "deleted":
        shutil.rmtree(elsewhere)
    elif how == "another in its place":
        run.folder.mkdir()
    run.go_on()
    said = run.end(1)
    assert said.count("was moved or deleted") == 1
    assert "done" not in said
    assert "starting again" not in said
    assert [path.name for path in run.folder.rglob("*")] == [] if run.folder.exists() else how != "another in its place"
    if how == "moved":
        assert "resuming at step 4" in place.run(elsewhere.name)
        place.assert_exact(elsewhere.name)


def test_a_signal_passes_through_and_the_state_is_saved(place):
    """SIGINT; TERM and HUP: test_two_signals_that_mean_one_request."""
    run = place.start("signal", inside={"hold": 6}, **UNDER)
    run.wait_for_saved(4)
    run.process.send_signal(signal.SIGINT)
    run.wait_for_words("stopping after this ")
    run.go_on()
    said = run.end(4)
    assert said.count("stopping after this") == 1
    assert steps(run.folder)
    place.run("signal", **UNDER)
    place.assert_exact("signal")


def test_a_killed_supervisor_leaves_a_saved_state_and_the_lock(place):
    run = place.start("orphan", inside={"hold": 6}, **UNDER)
    run.wait_for_saved(4)
    pid = child(run)
    run.kill()
    run.go_on()
    place.run("orphan", **UNDER)  # at once: it waits for the old one
    assert gone(pid)
    assert "interrupted, the state is saved" in run.text()
    assert ledger.read(run.folder)["starts"][0]["ended"]["why"] == "the supervisor was gone"
    place.assert_exact("orphan")


def test_both_are_killed(place):
    run = place.start("both", inside={"hold": 6}, **UNDER)
    run.wait_for_saved(4)
    run.process.send_signal(signal.SIGSTOP)
    os.kill(child(run), signal.SIGKILL)
    run.kill()
    assert "resuming at step 4" in place.run("both", **UNDER)
    place.assert_exact("both")


def test_a_crash_at_the_same_step_twice_is_the_last(place):
    """No start gets further: exit code 1 with one line, in place of a bill without an end."""
    said = place.run("crash", code=1, inside={"crash": 6}, **UNDER)
    assert "as before, and no checkpoint was saved in between: not started again" in said
    assert said.count("starting again") <= 2
    place.run("crash", **UNDER)
    place.assert_exact("crash")


def test_bad_input_is_not_tried_again(place):
    keys = {"data__path": place.root / "absent.jsonl", "data__dir": place.root / "nothing"}
    assert place.run("bad", code=2, **keys, **UNDER).count("no such file or folder") == 1


@pytest.mark.parametrize("where", ["restore", "held-out"])
def test_a_hang(place, where):
    """No sign of life for `runs.hang_s`: it says what it waits for, shows the stacks, and starts training again."""
    keys = UNDER | {"runs__hang_s": HANG_S}
    if where == "restore":
        place.stopped(where, 6)
        run, waits = place.start(where, rules=("read hang checkpoints/4",), **keys), "the restore"
    else:
        run, waits = place.start(where, inside={"held_out": "hangs"}, **keys), "the evaluation (held-out)"
    run.wait_for_words("no sign of life for")
    run.set(hold=None, held_out=None)
    if where == "restore":
        run.fault()
    said = run.end(None)
    assert f"it waits for {waits}" in said
    assert "where its main thread stands:" in said
    assert list(run.folder.glob("hang-*.txt"))
    if run.process.returncode != 0:
        place.run(where, **UNDER)
    place.assert_exact(where)


def test_a_save_that_hangs_is_ended_with_what_it_waits_for(place):
    """The rule goes when the supervisor has noticed: storage that comes back."""
    run = place.start(
        "stuck save", rules=(), inside={"hold": 6}, runs__hang_s=HANG_S, checkpoint__every_steps=5, **UNDER
    )
    run.wait_for_saved(5)
    run.fault("write hang checkpoints/")
    run.go_on()
    run.wait_for_words("no sign of life for")
    run.fault()
    said = run.end(0)
    assert "it waits for the save" in said
    assert list(run.folder.glob("hang-*.txt"))
    place.assert_exact("stuck save")


def test_no_false_alarm(place):
    """Steps that are slow, below the budget: one start."""
    run = place.start("busy", inside={"hold": 6}, **UNDER | {"runs__hang_s": 2 * HANG_S})
    run.wait_for_saved(4)
    for last in (7, 8, 9):
        time.sleep(HANG_S / 2)
        run.hold(last)
    run.go_on()
    assert "starting again" not in run.end(0)
    place.assert_exact("busy")


@pytest.mark.parametrize("how", ["dead", "stuck"])
def test_one_of_two(place, how):
    """Each host's supervisor sees that its own child stands still, acts alone, and all meet again.

    stuck: alive, with heartbeats, and waited for in a collective, for which nothing in JAX has a time limit
    (jax-ml/jax#38503); it moves again as the other one is ended.
    """
    assert place.two
    keys = {"distributed__heartbeat_s": 10} if how == "dead" else {"runs__hang_s": 20}
    runs = place.several(how, inside={0: {"hold": 6}, 1: {"hold": 6}}, **keys, **UNDER)
    runs[0].wait_for_saved(4)
    if how == "dead":
        os.kill(child(runs[1]), signal.SIGKILL)
    runs[0].go_on()
    if how == "stuck":
        runs[0].wait_for_words("no sign of life for")
    runs[1].go_on()
    for run in runs:
        run.end(0)
    assert how == "dead" or "no sign of life for" in runs[0].text()
    assert all("starting again from the last checkpoint" in run.text() for run in runs)
    assert how == "dead" or list(place.root.glob(f"{how}/hang-*.txt"))
    assert curve(place.root / how) == curve(place.two)
    assert digests(place.root / how) == digests(place.two)


@pytest.mark.parametrize("process", [0, 1])
def test_an_absent_process_is_one_line(place, process):
    keys = {"distributed__coordinator": "localhost:47113", "distributed__num_processes": 2}
    began = time.monotonic()
    run = place.start(
        f"absent{process}", distributed__process_id=process, distributed__start_timeout_s=3, **keys, **UNDER
    )
    said = run.end(1)
    assert f"process {process} of 2 waits for the others at localhost:47113, in vain for 3 s" in said
    assert "not started again" in said
    assert "***" not in said
    assert "@     0x" not in said
    assert time.monotonic() - began < 60


def test_storage_that_fails_at_the_start_for_a_while(place):
    """Two starts can't read the checkpoint, and the third goes on from it."""
    place.stopped("away", 6)
    run = place.start("away", rules=("read EIO checkpoints/4",), **UNDER)
    run.wait_for(lambda: run.text().count("starting again") == 2, "two starts", 300)
    run.fault()
    run.end(0)
    place.assert_exact("away")
