"""What is done when a run has ended for good: whom it tells, and that nothing stops paying while work is unmirrored."""

import dataclasses
import datetime
import json
import os
import pathlib
import pty
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import tiny_mirror

from jaxlm import config
from jaxlm.config import config_files
from jaxlm.host import files
from jaxlm.run.survive import farewell, supervisor

ROOT = pathlib.Path(__file__).resolve().parents[3]
START = farewell.Start(7, 0.0)


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
    start = {"time": datetime.datetime.now(datetime.UTC).isoformat(), "pid": 7} | ({"ended": ended} if ended else {})
    (run / "run.json").write_text(json.dumps({"starts": [start]}))
    overrides = [f"{key.replace('__', '.')}={value}" for key, value in keys.items()]
    overrides += ["data.path=x", f"workdir={run}", f"runs.on_exit.done=touch {tmp_path / 'paid'}"]
    return config.resolve(config_files.load("base", overrides))


@pytest.mark.parametrize(
    ("code", "cause", "event"),
    [(0, "", "end"), (3, "gate", "gate"), (3, "budget", "budget"), (4, "", "end"), (1, "disk", "crash")],
)
def test_each_ending_is_told_as_its_event(tmp_path, told, code, cause, event):
    c = make(tmp_path, ended={"code": code, "why": "because", "cause": cause, "step": 4}, runs__on_exit_unmirrored=True)
    farewell.say_farewell(c, code, START)
    assert [found for found, _ in told] == [event]
    assert "because" in told[0][1]
    assert (tmp_path / "paid").exists() == (code == 0)


def test_a_command_waits_for_the_mirror(tmp_path, told, capsys):
    mirror = tmp_path / "elsewhere" / "run"
    c = make(tmp_path, ended={"code": 0, "why": "done", "step": 4}, checkpoint__mirror=mirror)
    c = dataclasses.replace(c, checkpoint=dataclasses.replace(c.checkpoint, mirror_timeout_s=20.0))
    assert not farewell.is_mirrored(c, tmp_path / "run", START)  # checkpoint 4 has no checksums: nothing vouches for it
    farewell.say_farewell(c, 0, START)
    assert not (tmp_path / "paid").exists()
    assert "not in the mirror yet" in capsys.readouterr().err


def test_what_the_run_said_of_its_mirror_is_believed(tmp_path, told):
    c = make(
        tmp_path, ended={"code": 0, "why": "done", "mirrored": True}, checkpoint__mirror=tmp_path / "elsewhere/run"
    )
    farewell.say_farewell(c, 0, START)
    assert (tmp_path / "paid").exists()


def test_nothing_to_mirror_is_mirrored(tmp_path):
    c = make(tmp_path, checkpoint=False, checkpoint__mirror=tmp_path / "elsewhere/run")
    assert farewell.is_mirrored(c, tmp_path / "run", START)


@pytest.mark.parametrize("start", [farewell.Start(8, 0.0), farewell.Start(7, 4e9)])
def test_a_start_that_died_before_it_was_recorded_has_not_the_reason_of_the_one_before(tmp_path, told, start):
    c = make(
        tmp_path,
        ended={"code": 3, "why": "the gate", "cause": "budget", "mirrored": True},
        checkpoint__mirror=tmp_path / "elsewhere/run",
    )
    farewell.say_farewell(c, 1, start)
    assert told == [("crash", "run ended with exit code 1: exit code 1")]
    assert not farewell.is_mirrored(c, tmp_path / "run", start)


def test_milestones_and_the_best_stay_in_the_mirror_after_a_crash(tmp_path):
    run, url = tiny_mirror.make_run(tmp_path / "run", 10, 20, 30, 40), str(tmp_path / "mirror")
    keys = ["data.path=x", f"workdir={run}", f"checkpoint.mirror={url}", "checkpoint.mirror_keep_last=1"]
    keys += ["checkpoint.keep_best=1", "phases.plan.pilot.steps=10", "phases.plan.pilot.tokens=0"]
    c = config.resolve(config_files.load("gpuburnout_1b", keys))
    losses = {10: 4.0, 20: 2.0, 30: 3.0}
    (run / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": s, "val/loss": loss}) + "\n" for s, loss in losses.items())
    )
    mirror = farewell.open_mirror(c, run, farewell.Scores(c.checkpoint))
    for step in losses:
        mirror.begin(step)
        assert mirror.wait(60)
    mirror.close(60)
    (run / "checkpoints/40/checksums.json").write_text("{}")  # verified, and then the run crashed
    assert farewell.is_mirrored(c, run, START)
    assert sorted(int(name) for name in os.listdir(f"{url}/checkpoints")) == [10, 20, 40]


def spoil(path, how):
    """From now on to read this file gives EIO, as /proc/self/mem does, or never ends, as of a pipe that nobody writes to.

    A folder can't be listed: its path is a link to itself.
    """
    if path.exists():
        path.rename(path.with_name(f"{path.name}.whole"))
    if path.name == "checkpoints":
        path.symlink_to(path)
    elif how == "EIO":
        path.symlink_to("/proc/self/mem")
    else:
        os.mkfifo(path)


@pytest.mark.parametrize(
    ("name", "how", "mirror"),
    [
        ("run.json", "EIO", False),
        ("run.json", "hangs", True),
        ("metrics.jsonl", "EIO", True),
        (".run_id", "hangs", True),
        ("checkpoints", "EIO", True),
        ("checkpoints", "EIO", False),
    ],
)
def test_a_disk_that_fails_holds_no_farewell_up(tmp_path, told, monkeypatch, capsys, name, how, mirror):
    """What can't be read counts as not mirrored if there is a mirror, and does not matter if there is none."""
    monkeypatch.setattr(farewell, "READ_S", 0.1)
    monkeypatch.setattr(farewell, "_AROUND_COPY_S", 0.1)
    keys = {"checkpoint__mirror": tmp_path / "elsewhere/run", "checkpoint__mirror_timeout_s": 0.1} if mirror else {}
    c = make(tmp_path, ended={"code": 0, "why": "done", "step": 4}, runs__on_exit_unmirrored=not mirror, **keys)
    c = dataclasses.replace(c, runs=dataclasses.replace(c.runs, on_exit_unmirrored=False))
    spoil(tmp_path / "run" / name, how)
    began = time.monotonic()
    farewell.say_farewell(c, 0, START)
    assert time.monotonic() - began < 10
    assert [event for event, _ in told] == ["end"]
    assert (tmp_path / "paid").exists() != mirror
    assert ("not in the mirror yet" in capsys.readouterr().err) == mirror


def test_a_folder_that_another_start_may_hold_delays_no_farewell(tmp_path, told, monkeypatch):
    """A start that was refused asks whether another one trains there; the storage does not answer."""
    monkeypatch.setattr(farewell, "READ_S", 0.1)
    monkeypatch.setattr(files, "ENDING_S", 0.0)
    c = make(tmp_path, runs__on_exit_unmirrored=True)
    c = dataclasses.replace(c, runs=dataclasses.replace(c.runs, supervise="off"))

    def refused():
        (tmp_path / "run/.lock").unlink()
        os.mkfifo(tmp_path / "run/.lock")
        raise config.ConfigError("refused")

    with pytest.raises(config.ConfigError):
        supervisor.run(c, refused)
    assert told == [("crash", "run ended with exit code 2: exit code 2")]


def test_a_command_runs_in_a_folder_that_is_gone(tmp_path, monkeypatch):
    c = make(tmp_path, runs__on_exit_unmirrored=True)
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    farewell.notify.at_exit(c.runs, 0, "done", True, "run")
    assert (tmp_path / "paid").exists()


PROGRAM = """
import contextlib, os, pathlib, signal, sys, time
from jaxlm.cli import cli; from jaxlm import config; from jaxlm.config import config_files; from jaxlm.host import files
from jaxlm.run import ledger, supervised; from jaxlm.run.survive import supervisor
files.ENDING_S = 0.3
folder = pathlib.Path(sys.argv[1])
command = f"echo $JAXLM_CODE $JAXLM_WHY > {folder.parent}/CAUSE"
keys = ["data.path=x", f"workdir={folder}", "runs.supervise=off", "runs.on_exit_unmirrored=True"]
keys += [f"runs.on_exit.{cause}=" + command.replace("CAUSE", cause) for cause in ("done", "failed", "stopped")]
c = config.resolve(config_files.load("base", keys))
def ready():
    (folder / "ready").touch()
    time.sleep(60)
def program():
    supervised.stop_at_once_until_training()  # as the command line does, once all is imported
    with ledger.lock(folder):
        PROGRAM
try:
    code = supervisor.run(c, program)
except config.ConfigError:
    code = 2
except KeyboardInterrupt:
    code = 4
sys.exit(code)
"""
STEPS = """
        from jaxlm.run.signals import StopSignal
        with StopSignal() as stop:
            (folder / "ready").touch()
            while not stop.requested(1):
                time.sleep(0.01)
        return 4
"""


def begin(tmp_path, program, terminal=None):
    """Starts training without a supervisor, at the terminal if one is given, with what `program` does in its place."""
    (tmp_path / "run").mkdir(exist_ok=True)
    code = PROGRAM.replace("PROGRAM", textwrap.indent(textwrap.dedent(program), " " * 8).strip())
    command = [sys.executable, "-c", code, tmp_path / "run"]
    return subprocess.Popen(command, cwd=ROOT, stdin=terminal or subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def ended(tmp_path):
    """What the commands of on_exit were told: cause -> words."""
    causes = ("done", "failed", "stopped")
    return {cause: (tmp_path / cause).read_text().strip() for cause in causes if (tmp_path / cause).exists()}


def test_a_start_that_is_refused_leaves_the_run_of_the_other_one_alone(tmp_path, monkeypatch):
    process = begin(tmp_path, "sys.exit('it must not get here')")
    with files.lock(tmp_path / "run", "trains in", "config.workdir"):
        assert process.wait(60) == 2
    assert ended(tmp_path) == {}


@pytest.mark.parametrize(("program", "code"), [("return 0", 1), ("raise config.ConfigError('no')", 2)])
def test_a_folder_that_can_not_be_locked_or_a_wrong_config_is_a_failure(tmp_path, program, code):
    if code == 1:
        (tmp_path / "run/.lock").mkdir(parents=True)
    assert begin(tmp_path, program).wait(60) == code
    assert ended(tmp_path) == {"failed": f"{code} exit code {code}"}


@pytest.mark.parametrize(("program", "number"), [("ready()", signal.SIGTERM), (STEPS, signal.SIGINT)])
def test_at_a_terminal_ctrl_c_alone_leaves_the_machine(tmp_path, program, number):
    """Before the first step, and after it: SIGTERM comes from the machine, even if a terminal is there."""
    ours, its = pty.openpty()
    process = begin(tmp_path, program, terminal=its)
    os.close(its)
    while not (tmp_path / "run/ready").exists():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)
    process.send_signal(number)
    assert process.wait(60) == 4
    os.close(ours)
    assert ended(tmp_path) == ({} if number == signal.SIGINT else {"stopped": "4 exit code 4"})
    assert ("ctrl-C at a terminal" in process.stderr.read()) == (number == signal.SIGINT)
