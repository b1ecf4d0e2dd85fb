"""Disks that fail below real processes, one or two: training goes on, one line says why, what is whole stays."""

import os
import pathlib
import shutil
import socket
import subprocess
import sys

import pytest

pytestmark = pytest.mark.faults
TESTS = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def shim(tmp_path_factory) -> pathlib.Path:
    """bad_disk.c, compiled."""
    compiler = shutil.which("cc")
    if not compiler:
        pytest.skip("no C compiler")
    made = tmp_path_factory.mktemp("shim") / "bad_disk.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", made, TESTS / "bad_disk.c", "-ldl"], check=True)
    return made


def run(folder, processes, steps, *when, shim=None, bad="", path="", victim=None, timeout=90):
    """(exit codes, outputs, errors) of processes that save; `victim` has the bad disk, None means that all have."""
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    started = []
    for process in range(processes):
        env = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1", "PYTHONPATH": str(TESTS.parent)}
        if shim and victim in (process, None):
            env |= {"LD_PRELOAD": str(shim), "BAD": bad, "BAD_PATH": path, "BAD_ON": str(folder / "bad")}
        argv = [sys.executable, TESTS / "savers.py", process, processes, port, folder, steps, *when]
        pipe = subprocess.PIPE
        started.append(subprocess.Popen([str(a) for a in argv], env=env, stdout=pipe, stderr=pipe, text=True))
    try:
        said = [p.communicate(timeout=timeout) for p in started]
    finally:
        for p in started:
            p.kill()
    return [p.returncode for p in started], [out for out, _ in said], [err for _, err in said]


def told(err: str) -> list[str]:
    """The lines about checkpoints on standard error; a traceback fails the test."""
    assert "Traceback" not in err, err
    return [line for line in err.splitlines() if line.startswith(("checkpoint ", "process ", "step "))]


# Each other error: tests/faults/test_disk.py.
@pytest.mark.parametrize(("bad", "words"), [("enospc", "No space left on device"), ("fsync", "Input/output error")])
def test_a_disk_that_fails_for_a_while_costs_one_line(tmp_path, shim, bad, words):
    codes, out, err = run(tmp_path, 1, 45, 18, 28, shim=shim, bad=bad, path="/checkpoints/")
    assert codes == [0]
    assert "there: [40, 45]" in out[0]
    (line,) = told(err[0])
    assert line.startswith("checkpoint 20 can't be saved: " + words + ": " + str(tmp_path / "checkpoints"))
    assert line.endswith("; training goes on, step 10 stays")


def test_a_meta_that_can_not_be_written(tmp_path, shim):
    codes, _, err = run(tmp_path, 1, 45, 18, 28, shim=shim, bad="enospc", path="/meta")
    assert codes == [0]
    assert "No space left on device" in told(err[0])[0]


def test_a_disk_that_garbles_for_good_costs_no_whole_checkpoint(tmp_path, shim):
    codes, out, err = run(tmp_path, 1, 65, 28, shim=shim, bad="garble", path="/checkpoints/")
    assert codes == [1]
    assert "there: [10, 20]" in out[0]
    assert "step 65 is not saved" in err[0]
    (tmp_path / "bad").unlink()
    codes, out, _ = run(tmp_path, 1, 30)
    assert (codes, out) == ([0], ["from 20, there: [20, 30]\n"])


@pytest.mark.parametrize("victim", [0, 1])
def test_a_full_disk_of_one_of_two_processes_hangs_neither(tmp_path, shim, victim):
    codes, out, err = run(
        tmp_path, 2, 45, 18, 28, shim=shim, bad="enospc", path=f"ocdbt.process_{victim}", victim=victim
    )
    assert codes == [0, 0]
    assert "there: [40, 45]" in out[0]
    line, *skipped = told(err[0])  # the process that wrote well learns it a little later
    assert all("is not saved now" in other for other in skipped)
    assert "No space left on device" in line
    assert f"ocdbt.process_{victim}" in line
    assert told(err[1]) == []


def test_for_good_both_end_with_exit_code_1(tmp_path, shim):
    codes, out, _ = run(tmp_path, 2, 35, 18, shim=shim, bad="eio", path="ocdbt.process_1", victim=1)
    assert codes == [1, 1]
    assert "there: [10]" in out[0]


def test_a_damaged_file_sends_both_back_to_the_step_before(tmp_path):
    run(tmp_path, 2, 25)
    name = max((tmp_path / "checkpoints/25/params/ocdbt.process_1/d").iterdir(), key=lambda p: p.stat().st_size)
    data = bytearray(name.read_bytes())
    data[len(data) // 2] ^= 4
    name.write_bytes(data)
    codes, out, err = run(tmp_path, 2, 30)
    assert codes == [0, 0]
    assert all("from 20, " in o for o in out)
    (line,) = told(err[0])
    assert line.startswith(f"checkpoint 25 is damaged: params/ocdbt.process_1/d/{name.name} differs")
