"""Files appear whole, a folder has one writer; what cgroups leave of the cores (of the memory: tests/plan/test_room.py)."""

import os
import pathlib

import pytest

from jaxlm.config import ConfigError, RunError
from jaxlm.host import files


def test_a_file_is_replaced_whole(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    files.write_atomically(path, b"old")
    with monkeypatch.context() as patched:
        patched.setattr(files.os, "replace", lambda *_: (_ for _ in ()).throw(OSError("no space")))
        with pytest.raises(OSError, match="no space"):
            files.write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    files.write_atomically(path, b"new")
    assert path.read_bytes() == b"new"
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_a_lock_is_held_by_with_and_by_the_returned_file(tmp_path):
    def refused():
        with pytest.raises(ConfigError) as error:
            files.lock(tmp_path, "trains in", "config.workdir")
        return str(error.value)

    message = f"another process trains in {tmp_path}: wait for it, or give another config.workdir"
    with files.lock(tmp_path, "is writing", "config.data.dir"):
        assert refused() == message
    held = files.lock(tmp_path, "is writing", "config.data.dir")
    assert refused() == message
    held.close()
    files.lock(tmp_path, "is writing", "config.data.dir").close()


def test_a_private_file_is_never_readable_by_others(tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(b"old")
    (tmp_path / "a.json.tmp").write_bytes(b"left by a crash")
    files.write_atomically(path, b"secret", private=True)
    assert path.stat().st_mode & 0o777 == 0o600
    files.write_atomically(path, b"none")
    assert path.read_bytes() == b"none"


def test_a_folder_may_be_called_as_a_home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    pathlib.Path("~x").mkdir()
    assert files.expanded("./~x") == pathlib.Path("~x")
    assert files.expanded("~no-such-user/x") == pathlib.Path("~no-such-user/x")
    assert files.expanded("~/x") == tmp_path / "home/x"


def test_what_stands_in_the_way_stays_there_and_what_fails_may_come_back():
    def behind(error):
        try:
            raise RunError("a line") from error
        except RunError as line:
            return files.of_system(line)

    assert behind(OSError(5, "I/O error"))
    assert behind(ValueError("Error reading x [OS error 5: EIO Input/output error]"))
    assert not behind(IsADirectoryError(21, "Is a directory"))
    assert not behind(ValueError("no"))


@pytest.mark.parametrize(
    ("groups", "limits", "cores"),
    [
        ("", {}, 64),
        ("0::/\n", {"cpu.max": "max 100000"}, 64),
        ("0::/\n", {"cpu.max": "400000 100000"}, 4),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000", "a/cpu.max": "250000 100000"}, 2),
        ("0::/\n", {"cpu.max": "50000 100000"}, 1),  # half a core
        ("4:memory:/x\n3:cpu,cpuacct:/x\n", {"cpu/cpu.cfs_quota_us": 300000, "cpu/cpu.cfs_period_us": 100000}, 3),
        ("3:cpu:/\n", {"cpu/cpu.cfs_quota_us": -1, "cpu/cpu.cfs_period_us": 100000}, 64),
        ("3:cpuset:/\n", {"cpu/cpu.cfs_quota_us": 100000, "cpu/cpu.cfs_period_us": 100000}, 64),
    ],
)
def test_the_cores_of_a_container(tmp_path, monkeypatch, groups, limits, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)), raising=False)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(groups)
    for name, value in limits.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n")
    assert files.cores(tmp_path) == cores


def test_a_process_that_is_bound_to_some_cores_has_those(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 5}, raising=False)
    assert files.cores(tmp_path) == 2
    monkeypatch.delattr(os, "sched_getaffinity")
    assert files.cores(tmp_path) == os.cpu_count()
