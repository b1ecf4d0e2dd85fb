"""The loader's processes, and shards that are damaged, missing, added, slow or not to be read."""

import json
import pathlib
import shutil
import signal

import psutil
import pytest
from faults.harness import Started, steps

pytestmark = pytest.mark.faults
FEW = {"data__num_threads": 1, "data__prefetch": 1}


def workers(run: Started) -> list[psutil.Process]:
    """The loader's processes of a run."""
    found = psutil.Process(run.process.pid).children(recursive=True)
    return [process for process in found if "ahead" in " ".join(process.cmdline())]


def other_data(place, name: str) -> pathlib.Path:
    """A copy of the data, which a test may damage."""
    assert place.whole
    return pathlib.Path(shutil.copytree(place.root / "data", place.root / name))


def shards(data: pathlib.Path, split: str = "train") -> list[pathlib.Path]:
    return sorted((data / split).rglob("*.array_record"))


def test_a_run_with_workers_ends(place):
    """And its workers with it: the batches are those of a run without."""
    place.run("workers", data__num_workers=2)
    place.assert_exact("workers")


def test_a_worker_is_killed(place):
    """Exit code 1, with the state saved; the same command goes on."""
    run = place.start("killed", inside={"hold": 6}, data__num_workers=2, data__prefetch=1)
    run.wait_for_saved(4)
    workers(run)[0].kill()
    run.go_on()
    assert "was ended by SIGKILL" in run.end(1)
    assert max(steps(run.folder)) >= 6
    place.run("killed", data__num_workers=2)
    place.assert_exact("killed")


def test_workers_that_die_at_import(place):
    """Exit code 1 with a line, not a wait for ever."""
    said = place.run("import", code=1, inside={"workers": "die"}, data__num_workers=2)
    assert "ended with exit code 7 before its first batch" in said
    place.run("import", data__num_workers=2)
    place.assert_exact("import")


def test_the_run_is_killed_and_its_workers_end(place):
    """Kill -9 leaves no process behind."""
    run = place.start("orphans", inside={"hold": 6}, data__num_workers=2)
    run.wait_for_saved(4)
    left = workers(run)
    run.kill()
    assert len(left) == 2
    assert not psutil.wait_procs(left, timeout=5)[1]
    place.run("orphans", data__num_workers=1)
    place.assert_exact("orphans")


def test_a_worker_hangs_in_a_read(place):
    """`data.timeout_s` passes: exit code 1, the state saved, and the line names the file. Stopped, as by a dead disk."""
    run = place.start("stuck", inside={"hold": 6}, data__num_workers=2, data__prefetch=1, data__timeout_s=2)
    run.wait_for_saved(4)
    workers(run)[0].send_signal(signal.SIGSTOP)
    run.go_on()
    assert "no batch within 2 s (data.timeout_s): worker process 1 of 2" in run.end(1)
    assert max(steps(run.folder)) >= 6
    place.run("stuck")
    place.assert_exact("stuck")


def test_a_read_of_a_shard_hangs(place):
    """Exit code 1 after `data.timeout_s`, with the state saved, and the shard named."""
    run = place.start("hang", rules=(), inside={"hold": 6}, data__timeout_s=2, **FEW)
    run.wait_for_saved(4)
    run.fault("read hang data/train")
    run.go_on()
    said = run.end(1)
    assert "no batch within 2 s (data.timeout_s): " in said
    assert ".array_record, for " in said
    assert max(steps(run.folder)) >= 6
    place.run("hang")
    place.assert_exact("hang")


@pytest.mark.parametrize("times", [2, 100])
def test_eio_of_a_shard(place, times):
    """A read that fails twice is tried again, and nothing more; one that fails for good ends the run with the state saved."""
    run = place.start(f"eio-{times}", rules=(), inside={"hold": 6}, **FEW)
    run.wait_for_saved(4)
    run.fault(f"read EIO data/train {times}")
    run.go_on()
    if times == 2:
        run.end(0)
    else:
        assert "Input/output error" in run.end(1)
        assert max(steps(run.folder)) >= 6
        place.run(run.folder.name)
    place.assert_exact(run.folder.name)


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
    elif what == "half a shard":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
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


@pytest.mark.parametrize(
    "what", ["flipped shard", "half a shard", "missing shard", "exchanged shards", "tokenizer.model", "token_bytes.npy"]
)
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


def test_a_manifest_without_a_key(place):
    data = other_data(place, "data_manifest")
    text = (data / "manifest.json").read_text()
    manifest = json.loads(text)
    del manifest["block_tokens"]
    (data / "manifest.json").write_text(json.dumps(manifest))
    assert "manifest.json" in place.run("manifest", code=2, data__dir=data)
    (data / "manifest.json").write_text(text)
    place.run("manifest", data__dir=data)
    place.assert_exact("manifest")


def test_reading_a_checkpoint_fails_for_a_while(place):
    """EIO at the restore: exit code 1, nothing moved away; the same command goes on from that very step."""
    place.stopped("restore", 10)
    said = place.run("restore", code=1, rules=("read EIO checkpoints/8",))
    assert "nothing was changed" in said
    assert steps(place.root / "restore") == [4, 8]
    assert "resuming at step 8" in place.run("restore")
    place.assert_exact("restore")
