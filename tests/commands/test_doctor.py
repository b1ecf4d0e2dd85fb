"""`jaxlm doctor` as a whole: lines, JSON, exit codes."""

import json
import os
import pathlib
import subprocess
import sys
import time

import pytest

from jaxlm.cli import cli
from jaxlm.commands import doctor
from jaxlm.plan.doctor import storage
from jaxlm.plan.doctor.findings import FAIL, OK, WARN, Finding


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")


def run(*argv: str) -> int:
    return cli.main(["doctor", "quickstart", *argv])


def test_what_the_run_would_meet_is_exit_code_1(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(storage, "CAP_BYTES", 1000)
    (tmp_path / "run").write_text("a file")
    assert run(f"--config.workdir={tmp_path}/run", "--config.mesh.fsdp=3", "--config.mesh.data=1") == 1
    said = capsys.readouterr()
    lines = {line.split()[1]: line for line in said.out.splitlines()}
    assert lines["devices"].startswith("FAIL  devices     mesh data=1 x fsdp=3")
    assert lines["disk"].startswith("FAIL")
    assert said.err.startswith("2 failed, nothing to watch, in ")


def test_bad_config_is_exit_code_2(capsys):
    assert run("--config.train.stepz=3") == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("config", "verdict", "told"),
    [
        ("techdocs_35m", "FAIL", "no data in data/techdocs: make it with jaxlm prepare data/techdocs"),
        ("quickstart", "ok", "no data in runs/quickstart/data yet: the first start makes it"),
    ],
)
def test_absent_data_fails_where_training_would(tmp_path, capsys, monkeypatch, config, verdict, told):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(storage, "CAP_BYTES", 1000)
    cli.main(["doctor", config, "--config.mesh.fsdp=3", "--config.mesh.data=1"])  # so that no model is compiled
    lines = {line.split()[1]: line for line in capsys.readouterr().out.splitlines()}
    assert lines["data"].startswith(f"{verdict:<4}  data        {told}")
    assert " 0 B" not in lines["room"]


def test_each_finding_is_printed_at_once_and_counted(capsys):
    report = doctor.Report(as_json=False)
    report.who = "1: "
    report.check("a", lambda: [Finding("a", OK, "x"), Finding("b", WARN, "y")])
    report.check("c", lambda: 1 / 0)
    assert capsys.readouterr().out == (
        "ok    1: a        x\nwarn  1: b        y\nFAIL  1: c        ZeroDivisionError: division by zero\n"
    )
    assert [report.count(verdict) for verdict in (OK, WARN, FAIL)] == [1, 1, 1]


def doctor_process(*argv: str, timeout: float = 120) -> tuple[int, dict[str, dict], float]:
    """(exit code, name -> finding, seconds) of `jaxlm doctor quickstart` as users run it."""
    began = time.monotonic()
    command = [sys.executable, "-m", "jaxlm.cli.cli", "doctor", "quickstart", "--json", *argv]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    assert "Traceback" not in done.stderr
    found = {f["name"]: f for f in map(json.loads, done.stdout.splitlines())}
    return done.returncode, found, time.monotonic() - began


@pytest.mark.faults
def test_quickstart_takes_less_than_a_minute_and_leaves_nothing(tmp_path):
    code, found, seconds = doctor_process(f"--config.workdir={tmp_path}/run")
    assert (code, [f for f in found.values() if f["verdict"] == FAIL]) == (0, [])
    assert seconds < 60
    names = ["versions", "gpu", "devices", "memory", "host", "disk", "room", "data", "checkpoint", "config"]
    assert list(found) == [*names, "links", "forward", "speed", "clock"]
    assert found["forward"]["text"].startswith("the whole model")
    assert found["speed"]["figures"]["tokens_per_second"] > 0
    assert os.listdir(tmp_path) == ["home"]


@pytest.mark.faults
def test_data_that_hang_do_not_hang_the_doctor(tmp_path):
    os.mkfifo(tmp_path / "manifest.json")
    code, found, seconds = doctor_process(f"--config.workdir={tmp_path}/run", f"--config.data.dir={tmp_path}")
    assert (code, found["data"]["verdict"]) == (1, FAIL)
    assert "no answer in 30 s" in found["data"]["text"]
    assert seconds < 90
    assert "config" not in found


@pytest.mark.faults
def test_a_full_disk(tmp_path):
    """A real one where tests may mount (root), else skipped: a limit on files' size stands for it elsewhere."""
    folder = tmp_path / "full"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20m", "none", folder], capture_output=True).returncode:
        pytest.skip("no right to mount")
    try:
        code, found, _ = doctor_process(f"--config.workdir={folder}/run")
    finally:
        left = list(pathlib.Path(folder).iterdir())
        subprocess.run(["umount", folder], check=True)
    assert (code, found["disk"]["verdict"], found["room"]["verdict"]) == (1, FAIL, FAIL)
    assert "No space left on device" in found["disk"]["text"]
    assert left == []
