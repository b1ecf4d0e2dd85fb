"""Storage that is full, garbles, hangs or lies; data that are damaged. Nothing stays behind."""

import errno
import hashlib
import json
import os
import resource
import time

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

from jaxlm import config
from jaxlm.config import config_files
from jaxlm.host import child, files
from jaxlm.plan.doctor import findings, storage
from jaxlm.plan.doctor.findings import FAIL, OK, WARN

MB = 10**6


def settings(*overrides: str) -> config.CheckpointConfig:
    return config.resolve(config_files.load("base", ["data.path=x", *overrides])).checkpoint


class Garbling(MemoryFileSystem):
    """Says that a write was done, and keeps other bytes."""

    protocol = "garbling"
    store, pseudo_dirs = {}, [""]

    def _open(self, path, mode="rb", **kwargs):
        file = super()._open(path, mode, **kwargs)
        if mode == "rb":
            content = bytearray(file.getvalue())
            content[len(content) // 2] ^= 1
            return MemoryFile(data=bytes(content))
        return file


@pytest.fixture
def here(monkeypatch):
    """Trials in this process: faster."""
    monkeypatch.setattr(storage, "apart", lambda task, *args, seconds: getattr(storage, task)(*args))


def test_a_good_disk_is_measured_and_left_as_it_was(tmp_path):
    speed, room = storage.disk(str(tmp_path / "not/yet"), 3 * MB, settings(), kept=4)
    assert (speed.name, speed.verdict, room.name, room.verdict) == ("disk", OK, "room", OK)
    assert speed.figures["bytes"] == 3 * MB
    assert speed.figures["write"] > 0 < speed.figures["read"]
    assert room.figures["need_bytes"] == 4 * 3 * MB + 64 * MB
    assert f"{tmp_path} writes" in speed.text
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_full_is_found_by_writing(tmp_path, here):
    """The limit on files' size stands for a quota: statvfs does not know it, and the write fails part of the way."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20 * MB, hard))
    try:
        speed, room = storage.disk(str(tmp_path), 36 * MB, settings(), kept=4)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (speed.verdict, room.verdict) == (FAIL, OK)
    assert "File too large after 16.8 MB" in speed.text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("number", "words"), [(errno.ENOSPC, "free some room"), (errno.EIO, "take another config.workdir")]
)
def test_what_mends_a_disk_depends_on_what_fails(number, words, monkeypatch):
    found = {"folder": "/f", "problem": os.strerror(number), "errno": number, "bytes": 0, "free_bytes": 1e12}
    monkeypatch.setattr(storage, "apart", lambda *args, **kwargs: found | {"checkpoint_bytes": 0})
    speed, _ = storage.disk("/f", 10, settings(), kept=1)
    assert words in speed.text


def test_room_counts_what_is_there_already(tmp_path, monkeypatch, here):
    monkeypatch.setattr(storage, "CAP_BYTES", 1000)
    (tmp_path / "checkpoints/60/params").mkdir(parents=True)
    (tmp_path / "checkpoints/60/params/a").write_bytes(bytes(5 * MB))
    _, room = storage.disk(str(tmp_path), 10**15, settings(), kept=4)
    assert room.verdict == FAIL
    assert room.figures["there_bytes"] == 5 * MB
    assert "4 checkpoints of 1000 TB" in room.text
    free = room.figures["free_bytes"]
    _, room = storage.disk(str(tmp_path), int(free * 0.9 / 4), settings(), kept=4)
    assert room.verdict == WARN


def test_a_trial_that_was_killed_leaves_nothing_for_ever(tmp_path, here):
    (tmp_path / ".jaxlm-doctor-4194305").write_bytes(b"left")
    storage.disk(str(tmp_path), 1000, settings(), kept=1)
    assert list(tmp_path.iterdir()) == []


def test_storage_that_hangs_is_left_behind(tmp_path):
    """A pipe into which nobody writes hangs whoever opens it, as dead network storage does."""
    os.mkfifo(tmp_path / "manifest.json")
    began = time.monotonic()
    with pytest.raises(files.NoAnswer, match=f"no answer in 0.6 s from {tmp_path}; mount it anew"):
        storage.data(str(tmp_path), seconds=0.6)
    assert time.monotonic() - began < 5
    for check in (
        lambda: storage.disk(str(tmp_path), 1000, settings(), kept=1, seconds=0.01),
        lambda: storage.mirror(str(tmp_path), 1000, 3600, seconds=0.01),
    ):
        (found,) = findings.examine("storage", check)
        assert (found.verdict, found.hung) == (FAIL, True)


def test_garbled_writes_are_found(monkeypatch):
    fsspec.register_implementation("garbling", Garbling, clobber=True)
    found = storage.try_place("garbling://bucket/runs", 1 * MB, 10)
    assert (found["garbled"], found["chunks"], found["problem"]) == (1, 1, "")
    monkeypatch.setattr(storage, "apart", lambda *args, **kwargs: found)
    finding = storage.mirror("garbling://bucket/runs", 1 * MB, 3600)
    assert finding.verdict == FAIL
    assert "1 of 1 pieces read back differ from what was written" in finding.text
    assert Garbling.store == {}


def test_a_mirror_by_url_and_by_folder(tmp_path, here):
    for url in (f"file://{tmp_path}/copy", str(tmp_path / "copy")):
        found = storage.mirror(url, 2 * MB, 3600)
        assert (found.name, found.verdict) == ("mirror", OK), found.text
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


def test_a_mirror_that_is_too_slow_for_its_own_time(monkeypatch):
    found = {"folder": "s3://b", "problem": "", "garbled": 0, "write": 1 * MB, "read": 1 * MB, "bytes": 20 * MB}
    monkeypatch.setattr(storage, "apart", lambda *args, **kwargs: found)
    late = storage.mirror("s3://b/x", 12_500 * MB, 3600)
    assert late.verdict == FAIL
    assert "a copy takes about 6h56m" in late.text
    assert "raise checkpoint.mirror_timeout_s=3600" in late.text
    assert storage.mirror("s3://b/x", 1250 * MB, 3600).verdict == OK


def data(tmp_path, **changes: bytes) -> str:
    """A folder with a manifest of two files; `changes` are made after it was written."""
    contents = {"tokenizer.model": b"t" * 1000, "shard": b"s" * 70_000}
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    entries = [{"file": name, "size": len(contents[name]), "sha256": digest} for name, digest in hashes.items()]
    manifest = {"files": entries[:1], "sources": {"a": {"train": {"shards": entries[1:]}}}}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    for name, content in (contents | changes).items():
        (tmp_path / name).write_bytes(content)
    return str(tmp_path)


def test_good_data_are_read_and_compared(tmp_path, here):
    found = storage.data(data(tmp_path))
    assert found.verdict == OK
    assert "2 of 2 files compared" in found.text


def test_one_flipped_bit_in_the_data_is_found(tmp_path, here):
    found = storage.data(data(tmp_path, shard=b"s" * 69_999 + b"r"))
    assert found.verdict == FAIL
    assert f"{tmp_path}/shard is not what the manifest says (sha256): copy it again" in found.text


def test_data_that_are_not_there_or_not_readable(tmp_path):
    assert storage.read_data(str(tmp_path), 1e9, 5)["there"] is False
    folder = data(tmp_path)
    (tmp_path / "shard").unlink()
    assert storage.read_data(folder, 1e9, 5)["damaged"] == ("shard", "can't be read (No such file or directory)")
    (tmp_path / "manifest.json").write_text("{")
    assert storage.read_data(folder, 1e9, 5)["damaged"][0] == "manifest.json"
    (tmp_path / "manifest.json").unlink()
    (tmp_path / "manifest.json").mkdir()
    with pytest.raises(OSError, match="Is a directory"):
        storage.apart("read_data", folder, 1e9, 5)


def test_no_secret_stands_in_a_command_line(tmp_path, monkeypatch):
    lines, popen = [], child.subprocess.Popen

    def noted(command, **keys):
        lines.append(command)
        return popen(command, **keys)

    monkeypatch.setattr(child.subprocess, "Popen", noted)
    with pytest.raises(OSError, match="nowhere"):
        storage.apart("try_place", "nowhere://user:HIDE@host/a", 1e6, 5)
    assert lines
    assert "HIDE" not in str(lines)
