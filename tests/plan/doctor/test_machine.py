"""What training would refuse at its start, the clock, sums over devices, and a tiny checkpoint."""

import dataclasses

import jax
import pytest
import tiny_data

from jaxlm import config
from jaxlm.config import ConfigError, MeshConfig, config_files
from jaxlm.devices import sharding
from jaxlm.models import hardware
from jaxlm.plan.doctor import machine
from jaxlm.plan.doctor.findings import FAIL, OK, WARN
from jaxlm.run.checkpoints import verify


def made(folder, *overrides: str) -> machine.Machine:
    keys = ["train.batch_size=2", "train.seq_len=16", "model.vocab_size=300", f"data.dir={folder}", *overrides]
    asked = config.resolve(config_files.load("base", keys))
    settled = dataclasses.replace(asked, model=hardware.for_platform(asked.model, "cpu"))
    return machine.Machine(asked, settled, sharding.make_mesh(asked.mesh, jax.devices()[:1]))


def test_data_of_another_vocabulary(tmp_path):
    tiny_data.make(tmp_path / "d", {"a": 1.0})
    with pytest.raises(ConfigError, match=r"--config\.model\.vocab_size=300"):
        made(tmp_path / "d", "model.vocab_size=400").fits_the_run()
    assert made(tmp_path / "d", "train.microbatch_size=2").fits_the_run().verdict == "ok"


def test_data_that_are_still_to_be_made_are_no_fault(tmp_path):
    assert made(tmp_path / "none").fits_the_run().verdict == "ok"


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
    (found,) = machine.Machine(None, None, mesh).links()
    assert (found.verdict, found.figures["wrong"], found.figures["devices"]) == (OK, 0, 8)
    assert found.figures["bytes_per_second"] > 0


def test_one_device_has_no_links():
    mesh = sharding.make_mesh(MeshConfig(data=1, fsdp=1, tensor=1, context=1), jax.devices()[:1])
    (found,) = machine.Machine(None, None, mesh).links()
    assert found.text == "one device: nothing to check"


def checkpoint(folder):
    c = made("", f"workdir={folder}").config
    return machine.Machine(c, c, jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])).checkpoint()


@pytest.mark.parametrize("there", [True, False])
def test_it_is_saved_restored_and_removed(tmp_path, there):
    folder = tmp_path / "runs" / "q [2]"
    if there:
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
    before = sorted(tmp_path.rglob("*"))
    found = checkpoint(folder)
    assert (found.verdict, sorted(tmp_path.rglob("*"))) == (OK, before)
    assert f"restored and removed in {folder}" in found.text


def test_what_the_run_would_meet_is_what_it_meets(tmp_path, monkeypatch):
    monkeypatch.setattr(verify, "read_back", lambda *args: "params/a is not what was saved")
    found = checkpoint(tmp_path)
    assert (found.verdict, list(tmp_path.glob("*"))) == (FAIL, [])
    assert "is not what was saved" in found.text
