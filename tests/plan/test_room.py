"""The memory that there is: of a host with and without cgroups, of a device."""

import os

import jax
import pytest

from jaxlm.config import ConfigError
from jaxlm.plan import lower


def machine(root, cgroup: str, **files: int | str) -> int:
    """What is free by a made-up /proc and /sys with 64 GiB of memory; `files` by their path below /sys/fs/cgroup."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable: {64 << 20} kB\n")
    (root / "proc/self/cgroup").write_text(cgroup)
    for name, value in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n")
    return lower.available_bytes(root)


def test_without_a_cgroup(tmp_path):
    assert machine(tmp_path, "") == 64 << 30


def test_a_containers_limit(tmp_path):
    files = {"memory.max": 8 << 30, "memory.current": 6 << 30, "memory.stat": f"anon 5\ninactive_file {1 << 30}"}
    assert machine(tmp_path, "0::/\n", **files) == 3 << 30


def test_a_limit_further_up_holds_too(tmp_path):
    files = {"a/b/memory.max": "max", "a/b/memory.current": 5, "a/b/memory.stat": "anon 5"}
    files |= {"a/memory.max": 4 << 30, "a/memory.current": 1 << 30, "a/memory.stat": "anon 5"}
    assert machine(tmp_path, "0::/a/b\n", **files) == 3 << 30


def test_an_older_cgroup(tmp_path):
    files = {"memory/memory.limit_in_bytes": 8 << 30, "memory/memory.usage_in_bytes": 6 << 30}
    files |= {"memory/memory.stat": "total_inactive_file 0"}
    assert machine(tmp_path, "12:cpu:/docker/x\n5:memory:/docker/x\n", **files) == 2 << 30


def test_this_machine():
    assert 0 < lower.available_bytes() < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_a_cpus_devices_share_what_is_free(monkeypatch):
    monkeypatch.setattr(lower, "available_bytes", lambda: 16e9)
    assert lower.of_devices(0.0) == lower.Room(16e9 / jax.local_device_count(), "free for each device")
    assert lower.of_devices(2.0) == lower.Room(2e9, "by config.tune.memory_gb")


def test_a_machine_that_does_not_say(monkeypatch, tmp_path):
    with pytest.raises(FileNotFoundError):
        lower.available_bytes(tmp_path)
    real = lower.available_bytes
    monkeypatch.setattr(lower, "available_bytes", lambda: real(tmp_path))
    assert lower.of_devices(0.0) is None


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_a_device_has_the_same_memory_the_next_time(platform):
    assert type(lower.refusal("too much", platform, 0.0, begun=True)) is ConfigError
    assert str(lower.refusal("too much", platform, 0.0, begun=True)) == "too much"
