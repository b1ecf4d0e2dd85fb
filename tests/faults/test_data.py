"""Shards that are damaged, missing, added, slow or not to be read."""

import pathlib
import shutil

import pytest
from faults.harness import steps

pytestmark = pytest.mark.faults
HELD = {"hold": 6, "few": True}  # so that the steps behind it are still to be read


def other_data(place, name: str) -> pathlib.Path:
    """A copy of the data, which a test may damage."""
    assert place.whole
    return pathlib.Path(shutil.copytree(place.root / "data", place.root / name))


def shards(data: pathlib.Path, split: str = "train") -> list[pathlib.Path]:
    return sorted((data / split).rglob("*.array_record"))


def test_a_read_of_a_shard_hangs(place):
    """Exit code 1 after `data.timeout_s`, with the state saved, and the shard named."""
    run = place.start("hang", rules=(), inside=HELD, data__timeout_s=2)
    run.wait_for_saved(4)
    run.fault("read hang data/train")
    run.go_on()
    said = run.end(1)
    assert "no batch within 2 s (data.timeout_s): " in said
    assert ".array_record, for " in said
    assert max(steps(run.folder)) >= 6
    place.run("hang")
    place.assert_exact("hang")


def test_eio_of_a_shard(place):
    """A read that fails for good, and not once or twice, ends the run with the state saved."""
    run = place.start("eio", rules=(), inside=HELD)
    run.wait_for_saved(4)
    run.fault("read EIO data/train 100")
    run.go_on()
    assert "Input/output error" in run.end(1)
    assert max(steps(run.folder)) >= 6
    place.run("eio")
    place.assert_exact("eio")


@pytest.fixture(scope="module")
def stopped(place) -> str:
    """A run that was killed after step 6."""
    place.stopped("stopped", 6)
    return "stopped"


def damaged(data: pathlib.Path, what: str) -> None:
    """Damages the data."""
    path = shards(data)[0]
    if what == "flipped shard":
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 4
        path.write_bytes(content)
    elif what == "missing shard":
        path.unlink()
    elif what == "exchanged shards":
        last = shards(data)[-1]
        content = path.read_bytes()
        path.write_bytes(last.read_bytes())
        last.write_bytes(content)
    else:
        path = data / what
        content = bytearray(path.read_bytes())
        content[-9] ^= 1
        path.write_bytes(content)


@pytest.mark.parametrize("what", ["flipped shard", "missing shard", "exchanged shards", "tokenizer.model"])
def test_damaged_data(place, stopped, what):
    """Exit code 2: no start will do better, and the line says how to mend it. Mended, the run goes on."""
    name = what.replace(" ", "_")
    data = other_data(place, f"data_{name}")
    place.copy(name, stopped)
    damaged(data, what)
    said = place.run(name, code=2, data__dir=data)
    assert str(data) in said
    shutil.rmtree(data)
    shutil.copytree(place.root / "data", data)
    place.run(name, data__dir=data)
    place.assert_exact(name)


def test_an_added_shard(place):
    """A file that the manifest does not name is no part of the data."""
    data = other_data(place, "data_added")
    place.stopped("added", 6, data__dir=data)
    (data / "train" / "a" / "stray.array_record").write_bytes(shards(data)[0].read_bytes())
    assert "resuming at step 4" in place.run("added", data__dir=data)
    place.assert_exact("added")


def test_reading_a_checkpoint_fails_for_a_while(place):
    """EIO at the restore: exit code 1, nothing moved away; the same command goes on from that very step."""
    place.stopped("restore", 10)
    said = place.run("restore", code=1, rules=("read EIO checkpoints/8",))
    assert "nothing was changed" in said
    assert steps(place.root / "restore") == [4, 8]
    assert "resuming at step 8" in place.run("restore")
    place.assert_exact("restore")
