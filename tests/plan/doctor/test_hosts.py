"""The clock, and sums over devices."""

import jax
import pytest

from jaxlm.config import MeshConfig
from jaxlm.devices import sharding
from jaxlm.plan.doctor import machine
from jaxlm.plan.doctor.findings import FAIL, OK, WARN

NOVEMBER = 1_795_000_000.0  # 2026


def clock(wall_s: float = 40.0, began: float = NOVEMBER, at_hosts: list[float] | None = None):
    """The finding where the wall clock went on by `wall_s` seconds in 40."""
    return machine.clock((began, 100.0), (began + wall_s, 140.0), at_hosts)


def test_a_good_clock():
    found = clock()
    assert (found.verdict, found.figures["year"], found.figures["seconds"]) == (OK, 2026, 40.0)
    assert "one process: no other clock to compare with" in found.text
    assert clock(at_hosts=[NOVEMBER, NOVEMBER + 0.4]).verdict == OK


@pytest.mark.parametrize("began", [0.0, 1_500_000_000.0, 5e9])
def test_a_clock_that_was_never_set(began):
    assert clock(began=began).verdict == FAIL


@pytest.mark.parametrize("wall_s", [38.0, 43.0, -3600.0])
def test_a_clock_that_is_moved(wall_s):
    found = clock(wall_s)
    assert found.verdict == WARN
    assert f"{wall_s - 40:+.1f} s" in found.text


def test_hosts_that_disagree():
    found = clock(at_hosts=[NOVEMBER, NOVEMBER + 1, NOVEMBER - 90])
    assert found.verdict == WARN
    assert "91.0 s apart" in found.text


def test_one_process_has_one_clock():
    assert machine.clocks() is None


def test_a_sum_over_all_devices():
    mesh = sharding.make_mesh(MeshConfig(data=-1, fsdp=2, tensor=1, context=1))
    found = machine.links(mesh)
    assert (found.verdict, found.figures["wrong"], found.figures["devices"]) == (OK, 0, 8)
    assert found.figures["bytes_per_second"] > 0


def test_one_device_has_no_links():
    mesh = sharding.make_mesh(MeshConfig(data=1, fsdp=1, tensor=1, context=1), jax.devices()[:1])
    assert machine.links(mesh).text == "one device: nothing to check"
