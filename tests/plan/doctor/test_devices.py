"""Memory that can be had against what the plan needs, on devices, host and in cgroups."""

import dataclasses
import functools
import types

import jax
import pytest

from jaxlm import config
from jaxlm.config import config_files, pip_install
from jaxlm.devices import sharding
from jaxlm.models import hardware
from jaxlm.plan.doctor import machine
from jaxlm.plan.doctor.findings import FAIL, OK, WARN

GB = 10**9


def plan(**changes) -> machine.Need:
    need = machine.Need(step=10 * GB, state=4 * GB, offloaded=0, checkpoint=3 * GB, microbatch=8, remat="none")
    return dataclasses.replace(need, **changes)


def resolved(*overrides: str) -> config.Config:
    return config.resolve(config_files.load("quickstart", list(overrides)))


def test_the_plan_of_quickstart():
    c = resolved("train.microbatch_size=-1", "model.remat=auto", "optim.name=adamw")
    object.__setattr__(c, "model", hardware.for_platform(c.model, "cpu"))
    mesh = sharding.make_mesh(c.mesh, jax.devices()[:1])
    need = machine.Machine(c, c, mesh).need
    parameters = 4 * 2_820_608
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
    assert machine.allocatable(10 * GB, card.allocate) == 10 * GB
    assert card.room == 20 * GB
    assert card.most <= 2**30


def test_a_card_with_less_than_it_says():
    card = Card(5 * GB)
    assert 5 * GB - (64 << 20) <= machine.allocatable(10 * GB, card.allocate) <= 5 * GB
    assert card.room == 5 * GB


def test_another_error_is_not_taken_for_lack_of_memory():
    def broken(count: int):
        raise RuntimeError("INTERNAL: illegal memory access")

    with pytest.raises(RuntimeError, match="illegal"):
        machine.allocatable(GB, broken)


def test_bytes_lie_on_the_device():
    device = jax.devices()[3]
    assert machine.zeros(device, 1000).devices() == {device}
    assert machine.allocatable(1000, functools.partial(machine.zeros, device)) == 1000


@pytest.mark.parametrize(
    ("free", "verdict"),
    [(30 * GB, OK), (10 * GB, OK), (9 * GB, WARN), (5 * GB, WARN), (4.9 * GB, FAIL), (3 * GB, FAIL)],
)
def test_the_memory_of_a_cpu(free, verdict):
    found = machine.cpu_memory(plan(), 1, int(free))
    assert found.verdict == verdict
    assert "a step needs 10.0 GB a device by the plan (microbatch 8, remat none)" in found.text
    assert ("train.microbatch_size=-1" in found.text) == (verdict != OK)


def test_a_cpu_in_float32_says_why_it_needs_more_than_the_plan():
    mesh = sharding.make_mesh(resolved().mesh, jax.devices()[:1])
    why = "in float32, as a CPU computes: jaxlm plan counts"
    for asked, told in (("auto", True), ("float32", False)):
        c = resolved(f"model.dtype={asked}")
        runs = dataclasses.replace(c, model=hardware.for_platform(c.model, "cpu"))
        need = machine.Machine(c, runs, mesh).need
        assert (why in machine.cpu_memory(need, 1, 30 * GB).text) == told


@pytest.mark.parametrize(("free", "verdict"), [(10 * GB, OK), (3.5 * GB, WARN), (2 * GB, FAIL)])
def test_a_save_needs_memory_of_the_host(free, verdict):
    found = machine.host_memory(plan(), int(free))
    assert found.verdict == verdict
    assert "a save holds 3 GB" in found.text


def test_a_state_that_is_offloaded_lives_on_the_host():
    found = machine.host_memory(plan(offloaded=2 * GB), 100 * GB)
    assert found.figures["need_bytes"] == 3 * GB + 2 * GB * jax.local_device_count()


def test_a_gpu_that_jax_does_not_see(monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    assert machine.present(gpu_present=False).verdict == OK
    found = machine.present(gpu_present=True)
    assert found.verdict == FAIL
    assert f"though there is an NVIDIA GPU: {pip_install('cuda12')}" in found.text
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert machine.present(gpu_present=True).verdict == OK
