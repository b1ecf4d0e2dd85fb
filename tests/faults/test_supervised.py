"""Under a supervisor (`runs.supervise=on`): crashes and hangs start training again; killing either of the two loses nothing."""

import signal
import time

import psutil
import pytest
from faults.harness import Started, curve, digests, steps

pytestmark = pytest.mark.faults
ON = {"runs__supervise": "on", "runs__backoff_s": 0.1}
HANG_S = 6.0


def child(run: Started) -> psutil.Process:
    """The training process under a supervisor."""
    return next(p for p in psutil.Process(run.process.pid).children() if "jaxlm.main" in " ".join(p.cmdline()))


def kill_child(run: Started) -> psutil.Process:
    """Kills the training process, and returns which."""
    killed = child(run)
    killed.kill()
    run.wait_for(lambda: not killed.is_running() or killed.status() == psutil.STATUS_ZOMBIE, "the end of the child")
    return killed


def test_the_child_is_killed(place):
    run = place.start("child", inside={"hold": 6}, **ON)
    run.wait_for_saved(4)
    kill_child(run)
    run.go_on()
    said = run.end(0)
    assert "was ended by SIGKILL" in said
    assert "starting again from the last checkpoint" in said
    assert "resuming at step 4" in said
    place.assert_exact("child")


def test_the_supervisor_is_killed(place):
    """Its child saves the state and ends: nothing trains unseen."""
    run = place.start("parent", inside={"hold": 6}, **ON)
    run.wait_for_saved(4)
    training = child(run)
    run.kill()
    run.go_on()
    training.wait(30)
    assert max(steps(run.folder)) >= 6
    place.run("parent", **ON)
    place.assert_exact("parent")


def test_both_are_killed(place):
    run = place.start("both", inside={"hold": 6}, **ON)
    run.wait_for_saved(4)
    training = child(run)
    run.process.send_signal(signal.SIGSTOP)
    training.kill()
    run.kill()
    assert "resuming at step 4" in place.run("both", **ON)
    place.assert_exact("both")


def test_a_crash_at_the_same_step_twice_is_the_last(place):
    """No start gets further: exit code 1 after two starts, with one line, in place of a bill without an end."""
    said = place.run("crash", code=1, inside={"crash": 6}, **ON)
    assert "as before, and no checkpoint was saved in between: not started again" in said
    assert said.count("resuming at step 4") == 1
    place.run("crash", **ON)
    place.assert_exact("crash")


def test_bad_input_is_not_tried_again(place):
    said = place.run("bad", code=2, data__path=place.root / "absent.jsonl", data__dir=place.root / "nothing", **ON)
    assert said.count("no such file or folder") == 1


def test_sigterm_and_a_notice_of_preemption(place):
    """The supervisor passes it on, and the exit code back."""
    run = place.start("term", inside={"hold": 6}, **ON)
    run.wait_for_saved(4)
    run.process.terminate()
    run.wait_for_words("stopping after this step")
    run.go_on()
    assert "interrupted, the state is saved" in run.end(4)
    place.run("term", **ON)
    place.assert_exact("term")


@pytest.mark.parametrize("where", ["step", "restore", "held-out"])
def test_a_hang(place, where):
    """No sign of life for `runs.hang_s`: it says what it waits for, shows the stacks, and starts training again."""
    options = ON | {"runs__hang_s": HANG_S}
    if where == "restore":
        place.stopped(where, 6)
        run = place.start(where, rules=("read hang checkpoints/4",), **options)
        waits = "the restored checkpoint"
    elif where == "step":
        run, waits = place.start(where, inside={"hold": 6}, **options), "a batch"
    else:
        run, waits = place.start(where, inside={"held_out": "hangs"}, **options), "an evaluation (held-out)"
    run.wait_for_words("no sign of life for")
    run.set(hold=None, held_out=None)
    if where == "restore":
        run.fault()
    said = run.end(0)
    assert f"it waits for {waits}" in said
    assert "where its main thread stands:" in said
    assert list(run.folder.glob("hang-*.txt"))
    place.assert_exact(where)


def test_no_false_alarm(place):
    """Steps, saves and evaluations that are slow, below the budget: one start."""
    run = place.start("busy", inside={"hold": 6}, **ON | {"runs__hang_s": HANG_S})
    for last in (7, 8, 9):
        time.sleep(HANG_S / 2)
        run.hold(last)
    run.go_on()
    assert "starting again" not in run.end(0)
    place.assert_exact("busy")


@pytest.mark.parametrize("how", ["dead", "frozen", "stuck"])
def test_one_of_two(place, how):
    """Each host's supervisor sees that its own child stands still, and acts alone.

    stuck: alive, with heartbeats, and waited for in a collective, for which nothing in JAX has a time limit.
    """
    assert place.two
    options = ON | {"runs__hang_s": 12.0, "distributed__heartbeat_s": 8.0, "runs__backoff_s": 1}
    started = place.several(how, inside={0: {"hold": 6}, 1: {"hold": 6}}, **options)
    started[0].wait_for_saved(4)
    if how != "stuck":
        child(started[1]).send_signal(signal.SIGKILL if how == "dead" else signal.SIGSTOP)
    started[0].go_on()
    if how == "stuck":
        started[0].wait_for_words("starting again")
    started[1].go_on()
    for one in started:
        one.end(0)
    assert "starting again from the last checkpoint" in started[0].text()
    assert curve(place.root / how) == curve(place.two)
    assert digests(place.root / how) == digests(place.two)
