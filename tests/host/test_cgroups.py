"""What cgroups leave of the cores; of the memory: tests/plan/test_room.py."""

import os

import pytest

from jaxlm.host import files as files_lib


@pytest.mark.parametrize(
    ("groups", "files", "cores"),
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
def test_the_cores_of_a_container(tmp_path, monkeypatch, groups, files, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)), raising=False)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(groups)
    for name, value in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n")
    assert files_lib.cores(tmp_path) == cores


def test_a_process_that_is_bound_to_some_cores_has_those(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 5}, raising=False)
    assert files_lib.cores(tmp_path) == 2
    monkeypatch.delattr(os, "sched_getaffinity")
    assert files_lib.cores(tmp_path) == os.cpu_count()
