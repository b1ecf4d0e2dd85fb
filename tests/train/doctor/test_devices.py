"""Memory that can be had against what the plan needs, on devices, host and in cgroups."""

import functools
import os
import types

import jax
import pytest

from jaxlm import config, config_files, sharding
from jaxlm.models import hardware
from jaxlm.train.doctor import devices
from jaxlm.train.doctor.findings import FAIL, OK, WARN

GB = 10**9


def plan(**changes) -> devices.Need:
    return devices.Need(
        **(
            {"step": 10 * GB, "state": 4 * GB, "offloaded": 0, "checkpoint": 3 * GB, "microbatch": 8, "remat": "none"}
            | changes
        )
    )


def test_the_plan_of_quickstart():
    c = config.resolve(config_files.load("quickstart", ["train.microbatch_size=-1", "model.remat=auto"]))
    object.__setattr__(c, "model", hardware.for_platform(c.model, "cpu"))
    mesh = sharding.make_mesh(c.mesh, jax.devices()[:1])
    need = devices.need(c, mesh)
    parameters = 4 * 3_259_648
    assert need.checkpoint == pytest.approx(3 * parameters, rel=0.01)  # parameters and AdamW's two moments
    assert need.step > need.state > 3 * parameters
    assert (need.microbatch, need.remat, need.offloaded) == (1, "full", 0)


class Card:
    """A device with room for so many bytes."""

    def __init__(self, room: int):
        self.room, self.most = room, 0

    def allocate(self, count: int) -> types.SimpleNamespace:
        if count > self.room:
            raise RuntimeError(f"RESOURCE_EXHAUSTED: Out of memory while trying to allocate {count} bytes")
        self.room -= count
        self.most = max(self.most, count)

        def delete():
            self.room += count

        return types.SimpleNamespace(delete=delete)


def test_memory_is_allocated_and_freed():
    card = Card(20 * GB)
    assert devices.allocatable(10 * GB, card.allocate) == 10 * GB
    assert card.room == 20 * GB
    assert card.most <= 2**30


def test_a_card_with_less_than_it_says():
    card = Card(5 * GB)
    assert 5 * GB - (64 << 20) <= devices.allocatable(10 * GB, card.allocate) <= 5 * GB
    assert card.room == 5 * GB


def test_another_error_is_not_taken_for_lack_of_memory():
    def broken(count: int):
        raise RuntimeError("INTERNAL: illegal memory access")

    with pytest.raises(RuntimeError, match="illegal"):
        devices.allocatable(GB, broken)


def test_bytes_lie_on_the_device():
    device = jax.devices()[3]
    assert devices.zeros(device, 1000).devices() == {device}
    assert devices.allocatable(1000, functools.partial(devices.zeros, device)) == 1000


@pytest.mark.parametrize(
    ("free", "verdict"),
    [(30 * GB, OK), (10 * GB, OK), (9 * GB, WARN), (5 * GB, WARN), (4.9 * GB, FAIL), (3 * GB, FAIL)],
)
def test_the_memory_of_a_cpu(free, verdict):
    found = devices.cpu_memory(plan(), 1, int(free))
    assert found.verdict == verdict
    assert "a step needs 10.0 GB a device by the plan (microbatch 8, remat none)" in found.text
    assert ("train.microbatch_size=-1" in found.text) == (verdict != OK)


@pytest.mark.parametrize(("free", "verdict"), [(10 * GB, OK), (3.5 * GB, WARN), (2 * GB, FAIL)])
def test_a_save_needs_memory_of_the_host(free, verdict):
    found = devices.host_memory(plan(), int(free))
    assert found.verdict == verdict
    assert "a save holds 3 GB" in found.text


def test_a_state_that_is_offloaded_lives_on_the_host():
    found = devices.host_memory(plan(offloaded=2 * GB), 100 * GB)
    assert found.figures["need_bytes"] == 3 * GB + 2 * GB * jax.local_device_count()


def test_a_gpu_that_jax_does_not_see(monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    assert devices.present(gpu_present=False).verdict == OK
    found = devices.present(gpu_present=True)
    assert found.verdict == FAIL
    assert 'though there is an NVIDIA GPU: pip install "jaxlm[cuda12]"' in found.text
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert devices.present(gpu_present=True).verdict == OK


def machine(root, cgroup: str, **files: int | str) -> int:
    """What is free by a made-up /proc and /sys with 64 GiB of memory; `files` by their path below /sys/fs/cgroup."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable: {64 << 20} kB\n")
    (root / "proc/self/cgroup").write_text(cgroup)
    for name, value in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n")
    return devices.available_bytes(root)


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
    assert 0 < devices.available_bytes() < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
