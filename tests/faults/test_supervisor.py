"""Real training under the supervisor: children that are killed, frozen, or alone."""

import os
import pathlib
import signal
import time

import pytest
from faults import harness

UNDER = {"runs__supervise": "on", "runs__backoff_s": 0.1}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return harness.Place(tmp_path_factory.mktemp("place"))


@pytest.fixture(scope="module")
def whole_of_two(place):
    """The name of a run of two processes that nothing happened to."""
    for run in place.several("whole_of_two"):
        run.end(0)
    return "whole_of_two"


def child(started):
    """The process id of the training process, once it is there."""
    path = pathlib.Path(f"/proc/{started.process.pid}/task/{started.process.pid}/children")
    started.wait_for(lambda: bool(path.read_text()), "a child")
    return int(path.read_text().split()[0])


def gone(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.faults
def test_a_child_that_is_killed_twice_is_started_again(place):
    run = place.start("killed", **UNDER)
    for step in (6, 15):
        run.wait_for_step(step)
        os.kill(child(run), signal.SIGKILL)
        run.wait_for(lambda step=step: run.text().count("was ended by SIGKILL") == 1 + (step > 6), "a restart")
    run.end(0)
    place.assert_exact("killed")


@pytest.mark.faults
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_signals_pass_through_and_the_state_is_saved(place, number):
    name = f"signal{number}"
    run = place.start(name, **UNDER)
    run.wait_for_step(6)
    run.process.send_signal(number)
    said = run.end(4)
    assert said.count("stopping after this") == 1
    assert run.saved()
    place.run(name, **UNDER)
    place.assert_exact(name)


@pytest.mark.faults
def test_a_killed_supervisor_leaves_a_saved_state_and_the_lock(place):
    run = place.start("orphan", **UNDER)
    run.wait_for_step(6)
    pid = child(run)
    run.process.kill()
    run.process.wait()
    place.run("orphan", **UNDER)  # at once: it waits for the old one
    assert gone(pid)
    assert "interrupted, the state is saved" in run.text()
    place.assert_exact("orphan")


@pytest.mark.faults
def test_a_frozen_process_is_noticed_by_its_own_supervisor_and_all_meet_again(place, whole_of_two):
    """jax-ml/jax#38503: no timeout of JAX's fires. The heartbeat is left at 100 s."""
    runs = place.several("frozen", runs__hang_s=25, **UNDER)
    runs[0].wait_for_step(6)
    os.kill(child(runs[1]), signal.SIGSTOP)
    for run in runs:
        run.end(0)
    assert "no sign of life for" in runs[1].text()
    assert list(place.root.glob("frozen/hang-*.txt"))
    place.assert_exact("frozen", of=whole_of_two)


@pytest.mark.faults
def test_a_dead_process_is_replaced(place, whole_of_two):
    runs = place.several("dead", distributed__heartbeat_s=10, **UNDER)
    runs[0].wait_for_step(6)
    os.kill(child(runs[1]), signal.SIGKILL)
    for run in runs:
        run.end(0)
    place.assert_exact("dead", of=whole_of_two)


@pytest.mark.faults
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


@pytest.mark.faults
def test_a_save_that_hangs_is_ended_with_what_it_waits_for(place):
    """The rule goes when the supervisor has noticed: storage that comes back."""
    run = place.start("stuck", rules=(), runs__hang_s=20, train__steps=2000, checkpoint__every_steps=500, **UNDER)
    run.wait_for_step(6)
    run.fault("write hang checkpoints/")
    run.wait_for_words("no sign of life for")
    run.fault()
    run.wait_for_words("training hung after step", 60)
    run.process.send_signal(signal.SIGTERM)
    said = run.end(4)
    assert "it waits for a save" in said
    assert "in hang-1.txt" in said or "hang-1.txt" in said
