"""The launchers: what they print is what the tools take, and ssh starts, labels and stops real processes."""

import json
import pathlib
import shlex
import signal
import subprocess
import sys
import time

import pytest
import yaml

ROOT = pathlib.Path(__file__).resolve().parents[1]
FLAGS = ["--config=domain_7b", "--config.workdir=/shared/my run's"]


def launch(*argv: str, code: int = 0, env: dict | None = None) -> str:
    command = [sys.executable, str(ROOT / "scripts/launch.py"), *argv]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)
    assert done.returncode == code, done.stderr
    if code == 2:
        assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr if code == 2 else done.stdout


def argv_seen(script: str, folder: pathlib.Path, environment: dict[str, str], *tools: str) -> list[list[str]]:
    """Runs a script with stubs for the tools that it calls; what each call was given."""
    for tool in tools:
        path = folder / tool
        body = f"import json, os, sys; print(json.dumps([{tool!r}, *sys.argv[1:]])); sys.exit(int(os.environ.get('CODE', 0)))"
        path.write_text(f"#!{sys.executable}\n{body}\n")
        path.chmod(0o755)
    environment = {"PATH": f"{folder}:/usr/bin:/bin"} | environment
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=60)
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(("code", "requeued"), [("0", False), ("3", False), ("4", True)])
def test_slurm_runs_one_task_a_node_and_goes_on_after_code_4(tmp_path, code, requeued):
    script = launch("slurm", "--nodes=2", "--gpus=8", "--sbatch=partition=gpu", "--setup=export A=1", "--", *FLAGS)
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
    options = dict(
        line.removeprefix("#SBATCH --").partition("=")[::2] for line in script.splitlines() if "#SBATCH" in line
    )
    expected = {"nodes": "2", "ntasks-per-node": "1", "gpus-per-node": "8", "partition": "gpu", "signal": "TERM@300"}
    assert expected.items() <= options.items()
    assert {"requeue", "exclusive"} <= set(options)
    calls = argv_seen(script, tmp_path, {"SLURM_JOB_ID": "7", "CODE": code}, "srun", "scontrol")
    assert calls[0][-4:] == ["-m", "jaxlm.main", *FLAGS]
    assert calls[1:] == ([["scontrol", "requeue", "7"]] if requeued else [])


def test_slurm_with_cpus_leaves_the_rest_of_the_node_to_others():
    script = launch("slurm", "--gpus=1", "--cpus=12", "--", *FLAGS)
    assert "exclusive" not in script
    assert script.count("--cpus-per-task=12") == 2  # srun does not inherit it


@pytest.mark.parametrize("nodes", [1, 2])
def test_skypilot_task_meets_at_the_first_node_and_recovers_from_code_4(tmp_path, nodes):
    text = launch(
        "skypilot", f"--nodes={nodes}", "--accelerators=H100:8", "--bucket=s3://mine", "--setup=a: 'b'", "--", *FLAGS
    )
    task = yaml.safe_load(text)
    assert task["num_nodes"] == nodes
    resources = {"accelerators": "H100:8", "use_spot": True, "job_recovery": {"recover_on_exit_codes": [4]}}
    assert task["resources"] == resources
    assert task["file_mounts"] == {"/runs": {"source": "s3://mine", "mode": "MOUNT"}}
    assert task["setup"] == "a: 'b'\n"
    node = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1"}
    (call,) = argv_seen(task["run"], tmp_path, node, "python")
    meet = ["coordinator=10.0.0.1:8476", "num_processes=2", "process_id=1"] if nodes == 2 else []
    assert call == ["python", "-m", "jaxlm.main", *FLAGS, *(f"--config.distributed.{key}" for key in meet)]


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("--tpu_type=v5litepod-16", ["--tpu-type=v5litepod-16", "--num-slices=2"]),
        ("--device_type=h100-80gb-8", ["--device-type=h100-80gb-8", "--num-nodes=2"]),
    ],
)
def test_xpk_line(device, expected):
    line = launch("xpk", "--cluster=c", device, "--nodes=2", "--docker_image=i", "--zone=z", "--", *FLAGS)
    words = shlex.split(line)
    assert words[:3] == ["xpk", "workload", "create"]
    assert {*expected, "--zone=z", "--docker-image=i", "--restart-on-exit-codes=4", "--max-restarts=100"} <= set(words)
    inner = shlex.split(words[-1].removeprefix("--command="))
    assert inner == ["python", "-m", "jaxlm.main", *FLAGS, "--config.distributed.auto=true"]


# As ssh -tt does: ctrl-C on its input reaches the command as a signal, and cutting the line off ends it.
SSH = """
import signal, subprocess, sys, threading
child = subprocess.Popen(["sh", "-c", sys.argv[2]], stdin=subprocess.DEVNULL)
def cut(*_):
    child.kill()
signal.signal(signal.SIGTERM, cut)
def keys():
    while key := sys.stdin.read(1):
        if key == "\\x03":
            child.send_signal(signal.SIGINT)
threading.Thread(target=keys, daemon=True).start()
sys.exit(child.wait() % 256)
"""

# In the place of Python there: says its arguments, then does what its number tells it to.
PROGRAM = """
import pathlib, signal, sys, time
process = sys.argv[-1].rpartition("=")[2]
def saved(*_):
    print("saved", flush=True)
    sys.exit(4)
if {deaf}:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
else:
    signal.signal(signal.SIGINT, saved)
print("here", *sys.argv[-3:], flush=True)
(pathlib.Path({folder!r}) / process).touch()
if process in {ends}:
    while len(list(pathlib.Path({folder!r}).glob("[01]"))) < 2:
        time.sleep(0.02)
    sys.exit({ends}[process])
time.sleep(60)
"""


def ssh_argv(tmp_path: pathlib.Path, ends: dict[str, int], deaf: bool = False) -> list[str]:
    program, ssh = tmp_path / "python", tmp_path / "ssh"
    program.write_text(f"#!{sys.executable}\n" + PROGRAM.format(folder=str(tmp_path), ends=ends, deaf=deaf))
    ssh.write_text(f"#!{sys.executable}\n{SSH}")
    for path in (program, ssh):
        path.chmod(0o755)
    paths = [f"--ssh={ssh}", f"--python={program}", f"--folder={tmp_path}"]
    return ["ssh", "--hosts=me@one,two", *paths, "--grace=1", "--no-dry_run", "--", *FLAGS]


def test_ssh_starts_all_and_labels_their_lines(tmp_path):
    out = launch(*ssh_argv(tmp_path, {"0": 0, "1": 0}))
    expected = {
        f"[{i} {host}] here --config.distributed.{meet} --config.distributed.num_processes=2 "
        f"--config.distributed.process_id={i}"
        for i, (host, meet) in enumerate([("me@one", "coordinator=one:8476"), ("two   ", "coordinator=one:8476")])
    }
    assert set(out.splitlines()) == expected


def test_ssh_lets_the_others_save_when_one_fails(tmp_path):
    out = launch(*ssh_argv(tmp_path, {"1": 3}), code=3)
    assert "[0 me@one] saved" in out


def test_ssh_cuts_off_who_does_not_end(tmp_path):
    start = time.monotonic()
    launch(*ssh_argv(tmp_path, {"1": 3}, deaf=True), code=3)
    assert time.monotonic() - start < 30


def test_ctrl_c_reaches_all_hosts(tmp_path):
    command = [sys.executable, str(ROOT / "scripts/launch.py"), *ssh_argv(tmp_path, {})]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        while not all((tmp_path / i).exists() for i in "01"):
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        out = process.communicate(timeout=30)[0]
    assert process.returncode == 4
    assert out.count("saved") == 2


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["slurm", "--gpus=8", "--"], "at least --config=NAME"),
        (["slurm", "--gpus=no", "--", *FLAGS], "'no' is not a positive whole number"),
        (["slurm", "--", *FLAGS], "required: --gpus"),
        (["ssh", "--hosts=a,,b", "--", *FLAGS], "--hosts=a,,b has an empty name"),
        (["ssh", "--hosts=a", "--", *FLAGS, "--config.distributed.process_id=1"], "set by the launcher"),
        (["xpk", "--cluster=c", "--docker_image=i", "--", *FLAGS], "--tpu_type --device_type is required"),
        (["moon"], "invalid choice: 'moon'"),
        (["slurm", "--gpus=8", "--no-dry_run", "--", *FLAGS], "sbatch is not installed here"),
    ],
)
def test_bad_input_is_one_line(argv, message):
    assert message in launch(*argv, code=2, env={"PATH": "/nowhere"})
