"""What is done when a run has ended for good: whom it tells, and that nothing stops paying while work is unmirrored."""

import dataclasses
import json

import pytest

from jaxlm import config, config_files
from jaxlm.train import farewell


@pytest.fixture
def told(monkeypatch):
    """What was told: (event, text)."""
    found = []
    monkeypatch.setattr(farewell.notify, "tell", lambda notify, event, text, *args: found.append((event, text)))
    return found


def make(tmp_path, *, ended=None, checkpoint=True, **keys):
    run = tmp_path / "run"
    run.mkdir()
    if checkpoint:
        (run / "checkpoints/4").mkdir(parents=True)
        (run / "checkpoints/4/data").write_text("x")
    (run / "run.json").write_text(json.dumps({"starts": [{"ended": ended} if ended else {}]}))
    overrides = [f"{key.replace('__', '.')}={value}" for key, value in keys.items()]
    overrides += ["data.path=x", f"workdir={run}", f"runs.on_exit.done=touch {tmp_path / 'paid'}"]
    return config.resolve(config_files.load("base", overrides))


@pytest.mark.parametrize(
    ("code", "cause", "event"),
    [(0, "", "end"), (3, "gate", "gate"), (3, "budget", "budget"), (4, "", "end"), (1, "disk", "crash")],
)
def test_each_ending_is_told_as_its_event(tmp_path, told, code, cause, event):
    c = make(tmp_path, ended={"code": code, "why": "because", "cause": cause, "step": 4}, runs__on_exit_unmirrored=True)
    farewell.say_farewell(c, code)
    assert [found for found, _ in told] == [event]
    assert "because" in told[0][1]
    assert (tmp_path / "paid").exists() == (code == 0)


def test_a_command_waits_for_the_mirror(tmp_path, told, capsys):
    mirror = tmp_path / "elsewhere" / "run"
    c = make(tmp_path, ended={"code": 0, "why": "done", "step": 4}, checkpoint__mirror=mirror)
    c = dataclasses.replace(c, checkpoint=dataclasses.replace(c.checkpoint, mirror_timeout_s=20.0))
    assert not farewell.is_mirrored(c, tmp_path / "run")  # checkpoint 4 has no checksums: nothing vouches for it
    farewell.say_farewell(c, 0)
    assert not (tmp_path / "paid").exists()
    assert "not in the mirror yet" in capsys.readouterr().err


def test_what_the_run_said_of_its_mirror_is_believed(tmp_path, told):
    c = make(
        tmp_path, ended={"code": 0, "why": "done", "mirrored": True}, checkpoint__mirror=tmp_path / "elsewhere/run"
    )
    farewell.say_farewell(c, 0)
    assert (tmp_path / "paid").exists()


def test_nothing_to_mirror_is_mirrored(tmp_path):
    c = make(tmp_path, checkpoint=False, checkpoint__mirror=tmp_path / "elsewhere/run")
    assert farewell.is_mirrored(c, tmp_path / "run")
