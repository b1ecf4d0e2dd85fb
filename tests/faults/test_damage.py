"""Files that are not as they were written: bit flips, emptied and missing files, swapped files, disks that garble.

Each damages the newest checkpoint of a run that was killed. The run goes on from the one before, or from this one where
the damage does not matter; either way it ends as if nothing had happened. `test_without_verification` shows that these
tests can fail: the same damage, in a process that compares nothing.
"""

import json
import pathlib
import shutil
import subprocess
import sys

import pytest
from faults.harness import Place, curve, digests, steps

pytestmark = pytest.mark.faults
STEP = 20  # of the newest checkpoint; the one before is of step 16


def flip(path: pathlib.Path, where: float = 0.5, bit: int = 2) -> None:
    """Flips a bit of a file, at a share of its length."""
    content = bytearray(path.read_bytes())
    content[int(len(content) * where)] ^= 1 << bit
    path.write_bytes(content)


def largest(folder: pathlib.Path) -> pathlib.Path:
    """The largest file under a folder."""
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def in_arrays(item: str, where: float):
    """Flips a bit of an item's arrays, which zstd does not notice (its checksums are off)."""
    return lambda folder: flip(largest(folder / item), where)


def in_meta(old: str, new: str):
    """Changes a word of what stands beside the arrays."""

    def change(folder: pathlib.Path) -> None:
        path = folder / "meta/metadata"
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new, 1))

    return change


def swapped(item: str):
    """An item of another step, whole in itself: as after a copy that mixed up two folders."""

    def swap(folder: pathlib.Path) -> None:
        shutil.rmtree(folder / item)
        shutil.copytree(folder.with_name("16") / item, folder / item)

    return swap


def emptied(name: str):
    """A file of no bytes, as a crash of the machine leaves it."""
    return lambda folder: (folder / name).write_bytes(b"")


def halved(folder: pathlib.Path) -> None:
    path = largest(folder / "params")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


DAMAGE = {
    "flip in params, early": in_arrays("params", 0.3),
    "flip in params": in_arrays("params", 0.5),
    "flip in params, late": in_arrays("params", 0.7),
    "flip in train, early": in_arrays("train", 0.3),
    "flip in train": in_arrays("train", 0.5),
    "flip in train, late": in_arrays("train", 0.7),
    "flip in meta's step": in_meta('"step": 20', '"step": 28'),
    "change of meta's batches": in_meta('"passed_over": []', '"passed_over": [[21, 22]]'),
    "flip in meta's config": in_meta('"seq_len": 64', '"seq_len": 65'),
    "params of another step": swapped("params"),
    "moments of another step": swapped("train"),
    "meta of another step": swapped("meta"),
    "half a file": halved,
    "an item is missing": lambda folder: shutil.rmtree(folder / "train"),
    "no checksums and a flip": lambda folder: (emptied("checksums.json")(folder), in_arrays("params", 0.5)(folder)),
}


@pytest.fixture(scope="module")
def killed(place) -> str:
    """A run that was killed after step 22."""
    place.stopped("killed", 22)
    return "killed"


# What else is in DAMAGE: test_without_verification, and for one file at a time tests/run/checkpoints/test_verify.py.
RESUMED = (
    "flip in params", "flip in train", "flip in meta's step", "params of another step", "half a file",
    "an item is missing", "no checksums and a flip",
)  # fmt: skip


@pytest.mark.parametrize("name", RESUMED)
def test_damage(place, killed, name):
    folder = place.copy(name.replace(" ", "_").replace("/", "_").replace("'", ""), killed)
    assert steps(folder)[-2:] == [16, 20]
    DAMAGE[name](folder / "checkpoints" / str(STEP))
    said = place.run(folder.name)
    assert f"checkpoint {STEP} is damaged: " in said
    assert "resuming at step 16" in said
    assert (folder / "damaged/20.0").is_dir()
    place.assert_exact(folder.name)


def test_a_damaged_config_json(place, killed):
    """Exit code 2, since it may be another run's: the line says that it may be deleted, and then the run goes on."""
    folder = place.copy("config", killed)
    path = folder / "config.json"
    path.write_bytes(path.read_bytes()[:-40])
    assert "delete or mend it" in place.run("config", code=2)
    path.unlink()
    assert "resuming at step 20" in place.run("config")
    place.assert_exact("config")


def test_all_checkpoints_damaged(place, killed):
    """Exit code 2, and nothing moved: a run never begins anew by accident. Put back, it goes on."""
    folder = place.copy("all", killed)
    shutil.rmtree(folder / "checkpoints/12", ignore_errors=True)
    good = {}
    for step in (16, 20):
        path = largest(folder / "checkpoints" / str(step) / "params")
        good[path] = path.read_bytes()
        flip(path)
    assert "none of the checkpoints [16, 20]" in place.run("all", code=2)
    assert steps(folder) == [16, 20]
    for path, content in good.items():
        path.write_bytes(content)
    assert "resuming at step 20" in place.run("all")
    place.assert_exact("all")


def test_a_disk_that_garbles_what_it_is_given(place):
    """Each save says all is well, and none is: the older whole ones stay, and the run says so at once, not at its end."""
    run = place.start("garbled", rules=(), inside={"hold": 10}, checkpoint__max_unprotected_minutes=0.05)
    run.wait_for_saved(8)
    run.fault("write garble train.orbax-checkpoint-tmp/ocdbt")
    run.go_on()
    said = run.end(1)
    assert "checkpoint 12 " in said
    assert "training goes on, step 8 stays" in said
    assert steps(run.folder) == [4, 8]
    assert "resuming at step 8" in place.run("garbled")
    place.assert_exact("garbled")


def test_without_verification(place, killed):
    """The test of the tests: with nothing compared, most of this damage is believed."""
    names = [
        name
        for name in DAMAGE
        if name.startswith(("flip", "change", "params of", "moments of", "meta of", "no checksums"))
    ]
    folders, jobs = {}, []
    for number, name in enumerate(names):
        folder = folders[name] = place.copy(f"believed-{number}", killed)
        DAMAGE[name](folder / "checkpoints" / str(STEP))
        jobs.append(place.command(folder.name)[3:])
    believed = survived(place, folders, jobs, {"unverified": True})
    assert len(names) - len(believed) >= 10, believed


def survived(place: Place, folders: dict[str, pathlib.Path], jobs: list[list[str]], inside: dict) -> list[str]:
    """The names of those runs that end as the whole one does, each resumed in one process after the other."""
    (place.root / "jobs.json").write_text(json.dumps(jobs))
    (place.root / "inside.json").write_text(json.dumps({"spoil": []} | inside))
    code = pathlib.Path(__file__).with_name("several_resumes.py")
    environment = place.environment() | {"INSIDE": str(place.root / "inside.json")}
    subprocess.run([sys.executable, code, place.root / "jobs.json"], env=environment, timeout=400, check=True)
    return [name for name, folder in folders.items() if ends_well(place, folder)]


def ends_well(place: Place, folder: pathlib.Path) -> bool:
    """True if a run has all metrics and arrays of the whole one."""
    try:
        return curve(folder) == curve(place.whole) and digests(folder) == digests(place.whole)
    except OSError:
        return False
