"""The doctor's tiny checkpoint goes through the run's own code, and nothing of it stays."""

import jax
import pytest

from jaxlm.plan.doctor import machine
from jaxlm.plan.doctor.findings import FAIL, OK
from jaxlm.run.checkpoints import verify

MESH = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])


@pytest.mark.parametrize("there", [True, False])
def test_it_is_saved_restored_and_removed(tmp_path, there):
    folder = tmp_path / "runs" / "q [2]"
    if there:
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
    before = sorted(tmp_path.rglob("*"))
    found = machine.tiny_checkpoint(str(folder), MESH)
    assert (found.verdict, sorted(tmp_path.rglob("*"))) == (OK, before)
    assert f"restored and removed in {folder}" in found.text


def test_what_the_run_would_meet_is_what_it_meets(tmp_path, monkeypatch):
    monkeypatch.setattr(verify, "read_back", lambda *args: "params/a is not what was saved")
    found = machine.tiny_checkpoint(str(tmp_path), MESH)
    assert (found.verdict, list(tmp_path.glob("*"))) == (FAIL, [])
    assert "is not what was saved" in found.text
