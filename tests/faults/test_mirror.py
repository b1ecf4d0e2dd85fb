"""A run whose folder is lost comes back from its mirror; a mirror that fails costs no step."""

import pathlib
import shutil

import psutil
import pytest
from faults.harness import STEPS, Started
from faults.test_damage import flip, largest

pytestmark = pytest.mark.faults


def held(mirror: pathlib.Path) -> list[int]:
    """The steps whose copies were read back."""
    return sorted(int(path.parent.name) for path in mirror.glob("checkpoints/*/verified.json"))


def mirrored(place, name: str, step: int, **options) -> tuple[Started, pathlib.Path]:
    """A run that is held after `step`, with the checkpoint before in its mirror, and the mirror.

    The loop looks at each second step whether a save is done.
    """
    mirror = place.root / f"mirror-{name}"
    run = place.start(name, inside={"hold": step}, checkpoint__mirror=mirror, **options)
    run.wait_for(lambda: step // 4 * 4 in held(mirror), "the mirror's copy")
    return run, mirror


def test_the_folder_is_deleted_and_the_newest_copy_is_damaged(place):
    run, mirror = mirrored(place, "flip", 11)
    run.kill()
    shutil.rmtree(run.folder)
    flip(largest(mirror / "checkpoints/8/params"))
    said = place.run("flip", checkpoint__mirror=mirror)
    assert "the mirror's copy of checkpoint 8 is damaged: " in said
    assert "resuming at step 4" in said
    place.assert_exact("flip")


def test_a_mirror_that_can_not_be_written_for_a_while(place):
    """One line each time; nothing is kept from training and from the checkpoints beside it; later steps are copied again."""
    run, mirror = mirrored(place, "while", 7, rules=())
    rules = ("write ENOSPC", "write EDQUOT", "open EROFS", "write EIO")
    for number, rule in enumerate(rules, 1):
        run.fault(f"{rule} mirror-while")
        run.hold(7 + 4 * number)
        run.wait_for(lambda number=number: run.text().count("the next checkpoint tries again") == number, rule)
    run.fault()
    run.go_on()
    assert "it takes copies again" in run.end(0)
    assert STEPS in held(mirror)
    place.assert_exact("while")


def test_a_mirror_that_garbles_what_it_is_given(place):
    """Nothing of it is ever called whole, and the run says so."""
    run, mirror = mirrored(place, "garbled", 7, rules=())
    run.fault("write garble mirror-garbled/checkpoints")
    run.go_on()
    assert "mirror" in run.end(0)
    assert held(mirror) == [4]
    place.assert_exact("garbled")
    shutil.rmtree(run.folder)
    assert "resuming at step 4" in place.run("garbled", checkpoint__mirror=mirror)
    place.assert_exact("garbled")


def test_a_mirror_that_hangs_is_abandoned(place):
    """After `checkpoint.mirror_timeout_s`, and begun again."""
    run, mirror = mirrored(place, "hang", 7, rules=(), checkpoint__mirror_timeout_s=3)
    run.fault("write hang mirror-hang")
    run.hold(11)
    run.wait_for_words("no end after 3 s")
    run.fault()
    run.go_on()
    run.end(0)
    assert STEPS in held(mirror)
    place.assert_exact("hang")


def test_the_process_that_copies_is_killed(place):
    run, mirror = mirrored(place, "worker", 7)
    for process in psutil.Process(run.process.pid).children(recursive=True):
        if "mirror_worker" in " ".join(process.cmdline()):
            process.kill()
    run.go_on()
    run.end(0)
    assert STEPS in held(mirror)
    place.assert_exact("worker")


def test_two_processes_come_back_from_the_mirror(place):
    """The first process mirrors; both go on from what came back, with metrics, ledger and config."""
    mirror = place.root / "mirror-two"
    keys = {"checkpoint__mirror": mirror}
    started = place.several("back", inside={0: {"hold": 11}, 1: {"hold": 11}}, **keys)
    started[0].wait_for(lambda: 8 in held(mirror), "the mirror's copy")
    for one in started:
        one.kill()
    shutil.rmtree(place.root / "back")
    again = place.several("back", **keys)
    for one in again:
        one.end(0)
    assert "checkpoint 8 and the logs came back from the mirror" in again[0].text()
    assert "resuming at step 8" in again[0].text()
    assert STEPS in held(mirror)
    assert place.two
    place.assert_exact("back", of="two")
