"""Runs of two processes: whatever happens to one of them, none waits for ever, and all go on from the same step."""

import signal
import time

import pytest
from faults.harness import STEPS, curve, digests, steps, verified
from faults.test_damage import flip, largest

from jaxlm.run import ledger, receipt

pytestmark = pytest.mark.faults
SILENT_S = {"distributed__heartbeat_s": 10.0}


def finish(place, name: str, **options) -> list[str]:
    """Both processes run to the end, and the run ends as one that nothing happened to."""
    said = [one.end(0) for one in place.several(name, **options)]
    assert curve(place.root / name) == curve(place.two)
    assert digests(place.root / name) == digests(place.two)
    return said


def close(one: dict, other: dict) -> None:
    """Two curves of the same batches on different meshes: sums in another order."""
    assert one.keys() == other.keys()
    for step, record in one.items():
        for key in record.keys() & {"train/loss", "train/grad_norm", "val/loss"}:
            assert record[key] == pytest.approx(other[step][key], rel=1e-5), (step, key)


@pytest.fixture(scope="module")
def killed(place) -> str:
    """A run of two processes that were both killed after step 10."""
    started = place.several("killed2", inside={0: {"hold": 10}, 1: {"hold": 10}})
    started[0].wait_for_saved(8)
    for one in started:
        one.kill()
    return "killed2"


def test_kill_9_of_both_and_on_with_two(place, killed):
    place.copy("both", killed)
    said = finish(place, "both")
    assert "resuming at step 8" in said[0]
    book = ledger.read(place.root / "both")
    linked = {
        link["step"] for link in book["receipt"]
    }  # by what both hashed; the kill may have come before the link of 8
    assert {*range(4, STEPS + 1, 4)} - linked <= {8}
    checkpoints = place.root / "both/checkpoints"
    assert len(steps(place.root / "both")) == 2
    for step in steps(place.root / "both"):
        assert receipt.of_checkpoint(checkpoints / str(step), receipt.valid(book)[step]) == ""


def test_two_processes_become_one(place, killed):
    place.copy("one", killed)
    assert "resuming at step 8" in place.run("one")
    close(curve(place.root / "one"), curve(place.whole))


def test_a_damaged_checkpoint_sends_both_back(place, killed):
    folder = place.copy("flip2", killed)
    flip(largest(folder / "checkpoints/8/params"))
    said = finish(place, "flip2")
    assert "resuming at step 4" in said[0]
    assert (folder / "damaged/8.0").is_dir()


def test_a_file_that_one_process_can_not_read_sends_both_back(place, killed):
    place.copy("unreadable", killed)
    said = finish(place, "unreadable", rules={1: ("read EIO checkpoints/8/",)})
    assert "resuming at step 4" in said[0]


def test_sigterm_to_one_of_two(place):
    """Both save the same step, and end with exit code 4."""
    started = place.several("term", inside={0: {"hold": 6}, 1: {"hold": 6}})
    started[0].wait_for_saved(4)
    started[1].process.terminate()
    time.sleep(0.2)
    for one in started:
        one.go_on()
    said = [one.end(4) for one in started]
    assert "interrupted, the state is saved" in said[0]
    assert max(steps(place.root / "term")) >= 6
    finish(place, "term")


@pytest.mark.parametrize("process", [0, 1])
def test_a_full_disk_of_one_of_two(place, process):
    """The save fails on both, with a line, training goes on, and the next save works."""
    name = f"full{process}"
    started = place.several(name, rules={process: ()}, inside={0: {"hold": 7}, 1: {"hold": 7}})
    started[0].wait_for_saved(4)
    started[process].fault("write ENOSPC checkpoints/")
    for one in started:
        one.hold(11)
    started[0].wait_for_words("training goes on, step 4 stays")
    started[process].fault()
    for one in started:
        one.go_on()
    assert "No space left on device" in started[0].end(0)
    started[1].end(0)
    assert verified(place.root / name, STEPS)
    assert curve(place.root / name) == curve(place.two)
    assert digests(place.root / name) == digests(place.two)


def test_the_data_of_one_of_two_can_not_be_read(place):
    """Both stop at the same step with the state saved, and exit code 1 on both."""
    held = {"hold": 6, "few": True}
    started = place.several("eio2", rules={1: ()}, inside={0: held, 1: held})
    started[0].wait_for_saved(4)
    started[1].fault("read EIO data/train")
    for one in started:
        one.go_on()
    for one in started:
        one.end(1)
    assert "process 1: no batch at step" in started[0].text()
    assert max(steps(place.root / "eio2")) >= 6
    finish(place, "eio2")


def test_a_peer_is_frozen(place):
    """The other one ends within the heartbeat's time, and nothing is lost but what came after the last checkpoint."""
    started = place.several("frozen", inside={0: {"hold": 6}, 1: {"hold": 6}}, **SILENT_S)
    started[0].wait_for_saved(4)
    started[1].process.send_signal(signal.SIGSTOP)
    started[0].go_on()
    began = time.monotonic()
    started[0].end(None, 60)  # a line of ours, or an abort of JAX's with a stack of C++
    assert started[0].process.returncode not in (0, 2, 3, 4)
    assert time.monotonic() - began < 60
    started[1].kill()
    assert "resuming at step 4" in finish(place, "frozen")[0]


def test_a_peer_is_absent(place):
    """Exit code 1 with a line that says who waits for whom, after `distributed.start_timeout_s`."""
    first, second = place.several("absent", distributed__start_timeout_s=4)
    second.kill()
    assert "process 0 of 2 waits for the others" in first.end(1)
    finish(place, "absent")


def test_what_one_process_refuses_ends_both_at_once(place):
    options = {"data__path": place.root / "absent.jsonl", "data__dir": place.root / "nothing"}
    for one in place.several("refused", **options):
        assert "no such file or folder" in one.end(2, 60)


def test_mesh_2x4_becomes_8x1(place):
    """One process of eight devices, then two of four."""
    mesh = {"devices": 8, "mesh__data": 2, "mesh__fsdp": 4}
    place.stopped("mesh", 10, **mesh)
    for one in place.several("mesh", devices=4, mesh__data=8, mesh__fsdp=1):
        one.end(0)
    close(curve(place.root / "mesh"), curve(place.whole))
