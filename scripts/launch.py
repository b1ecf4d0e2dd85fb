"""Starts a training on several hosts: prints what it would run, and with --no-dry_run runs it. Needs nothing but Python.

    python scripts/launch.py slurm --nodes=2 --gpus=8 -- --config=domain_7b --config.workdir=/shared/run
    python scripts/launch.py skypilot --nodes=2 --accelerators=H100:8 --bucket=s3://mine -- --config=domain_7b ...
    python scripts/launch.py xpk --cluster=C --tpu_type=v5litepod-16 --docker_image=I -- --config=domain_7b ...
    python scripts/launch.py ssh --hosts=a,b --folder=jaxlm -- --config=domain_7b --config.workdir=/shared/run

What follows `--` goes to `python -m jaxlm.main`. The same command goes on where a run stopped: exit code 4 (the state is
saved) starts it again by itself under slurm, skypilot and xpk. `config.workdir` must be storage that all hosts see, and that
outlives them. One process a host, with all its devices.
"""

import argparse
import contextlib
import pathlib
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time

PREEMPTED = 4  # jaxlm's exit code for "stopped, the state is saved"
MAIN = ["-m", "jaxlm.main"]


class Parser(argparse.ArgumentParser):
    """Bad input is one line and exit code 2."""

    def error(self, message: str):
        print(f"launch.py: {message}; see python scripts/launch.py --help", file=sys.stderr)
        sys.exit(2)


def parser() -> Parser:
    top = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    verbs = top.add_subparsers(dest="verb", required=True, parser_class=Parser)

    def verb(name: str, text: str) -> Parser:
        sub = verbs.add_parser(name, help=text, description=text, allow_abbrev=False)
        sub.add_argument("--dry_run", action=argparse.BooleanOptionalAction, default=True, help="print, start nothing")
        sub.add_argument("--python", default="python", help="the interpreter there")
        sub.add_argument("--name", default="jaxlm", help="of the job")
        return sub

    slurm = verb("slurm", "an sbatch script: one task a node, requeued after preemption and at the end of its time")
    slurm.add_argument("--nodes", type=positive, default=1)
    slurm.add_argument("--gpus", type=positive, required=True, help="of each node")
    slurm.add_argument("--cpus", type=positive, help="of each node; without it, whole nodes")
    slurm.add_argument("--time", default="24:00:00", help="limit of each start, as sbatch takes it")
    slurm.add_argument("--grace", type=positive, default=300, help="seconds before that limit when the state is saved")
    slurm.add_argument("--sbatch", action="append", default=[], help="a further option, such as --sbatch=partition=gpu")
    slurm.add_argument("--setup", default="", help="shell line before the start, such as '. venv/bin/activate'")

    sky = verb("skypilot", "a SkyPilot task for `sky jobs launch`: found, started and restarted on any cloud")
    sky.add_argument("--nodes", type=positive, default=1)
    sky.add_argument("--accelerators", required=True, help="of each node, such as H100:8")
    sky.add_argument("--spot", action=argparse.BooleanOptionalAction, default=True)
    sky.add_argument("--bucket", default="", help="s3://, gs:// or r2:// URL to mount where the run is to live")
    sky.add_argument("--mount", default="/runs", help="where the bucket is mounted: give --config.workdir=/runs/NAME")
    sky.add_argument("--setup", default='pip install -e ".[cuda12]"', help="shell line, once on each machine")
    sky.add_argument("--port", type=positive, default=8476, help="of the first node, for the processes to meet")

    xpk = verb("xpk", "an `xpk workload create` line: GKE, TPUs or GPUs")
    xpk.add_argument("--cluster", required=True)
    device = xpk.add_mutually_exclusive_group(required=True)
    device.add_argument("--tpu_type", help="such as v5litepod-16")
    device.add_argument("--device_type", help="such as h100-80gb-8")
    xpk.add_argument("--nodes", type=positive, default=1, help="slices of TPUs, or nodes of GPUs")
    image = xpk.add_mutually_exclusive_group(required=True)
    image.add_argument("--docker_image", help="an image with jaxlm in it")
    image.add_argument("--base_docker_image", help="an image that xpk adds this folder to")
    xpk.add_argument("--project")
    xpk.add_argument("--zone")
    xpk.add_argument("--restarts", type=positive, default=100, help="at most, after preemptions")
    xpk.add_argument("--grace", type=positive, default=300, help="seconds from SIGTERM to the end")

    ssh = verb("ssh", "the same command on each host over ssh, outputs together; all stop when one fails")
    ssh.add_argument("--hosts", required=True, help="A,B,...; the others reach the first at --port")
    ssh.add_argument("--folder", default=".", help="where jaxlm is, on each host")
    ssh.add_argument("--setup", default="", help="shell line before the start, such as '. venv/bin/activate'")
    ssh.add_argument("--port", type=positive, default=8476)
    ssh.add_argument("--grace", type=positive, default=60, help="seconds that a host has to save and end")
    ssh.add_argument("--ssh", default="ssh -tt -o BatchMode=yes", help="how a host is reached")
    return top


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def main(argv: list[str]) -> int:
    split = argv.index("--") if "--" in argv else len(argv)
    top = parser()
    args, flags = top.parse_args(argv[:split]), argv[split + 1 :]
    if not any(flag == "--config" or flag.startswith("--config=") for flag in flags):
        top.error("after -- give jaxlm's own flags, at least --config=NAME")
    if any(flag.startswith("--config.distributed.") for flag in flags):
        top.error("config.distributed is set by the launcher: leave it out")
    if args.verb == "ssh" and not all(args.hosts.split(",")):
        top.error(f"--hosts={args.hosts} has an empty name: give A,B,...")
    return {"slurm": slurm, "skypilot": skypilot, "xpk": xpk, "ssh": ssh}[args.verb](args, flags)


def run(command: list[str], stdin: str | None = None) -> int:
    """Runs a tool here; its exit code."""
    try:
        return subprocess.run(command, input=stdin, text=True).returncode
    except FileNotFoundError:
        print(f"launch.py: {command[0]} is not installed here", file=sys.stderr)
        return 2


def slurm(args: argparse.Namespace, flags: list[str]) -> int:
    """jaxlm finds the other processes by Slurm's environment. srun passes SIGTERM on and ends with the highest code."""
    options = [
        f"job-name={args.name}",
        f"nodes={args.nodes}",
        "ntasks-per-node=1",
        f"gpus-per-node={args.gpus}",
        f"cpus-per-task={args.cpus}" if args.cpus else "exclusive",
        f"time={args.time}",
        f"signal=TERM@{args.grace}",
        "requeue",
        "open-mode=append",
        "output=%x-%j.log",
        *args.sbatch,
    ]
    srun = ["srun", "--kill-on-bad-exit=0", "--cpu-bind=none"] + ([f"--cpus-per-task={args.cpus}"] if args.cpus else [])
    command = shlex.join([*srun, args.python, *MAIN, *flags])
    lines = ["#!/bin/bash", *(f"#SBATCH --{option}" for option in options), "", *filter(None, [args.setup])]
    lines += [
        "code=0",
        f"{command} || code=$?",
        f'if [ "$code" -eq {PREEMPTED} ]; then',
        '    scontrol requeue "$SLURM_JOB_ID"',
        "fi",
        'exit "$code"',
    ]
    script = "\n".join(lines) + "\n"
    if args.dry_run:
        print(script, end="")
        return 0
    return run(["sbatch"], script)


def skypilot(args: argparse.Namespace, flags: list[str]) -> int:
    """Spot machines that go are replaced by SkyPilot; an exit with code 4 is tried again too."""
    command = shlex.join([args.python, *MAIN, *flags])
    start = [f"exec {command}"]
    if args.nodes > 1:
        start = [
            'coordinator=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)',
            f'exec {command} --config.distributed.coordinator="$coordinator:{args.port}" \\',
            '  --config.distributed.num_processes="$SKYPILOT_NUM_NODES" \\',
            '  --config.distributed.process_id="$SKYPILOT_NODE_RANK"',
        ]
    lines = [
        f"name: {_yaml(args.name)}",
        "workdir: .",
        f"num_nodes: {args.nodes}",
        "resources:",
        f"  accelerators: {_yaml(args.accelerators)}",
        f"  use_spot: {str(args.spot).lower()}",
        "  job_recovery:",
        f"    recover_on_exit_codes: [{PREEMPTED}]",
    ]
    if args.bucket:
        lines += ["file_mounts:", f"  {_yaml(args.mount)}:", f"    source: {_yaml(args.bucket)}", "    mode: MOUNT"]
    lines += ["setup: |", f"  {args.setup}", "run: |", *(f"  {line}" for line in start)]
    task = "\n".join(lines) + "\n"
    if args.dry_run:
        print(task, end="")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "task.yaml"
        path.write_text(task)
        return run(["sky", "jobs", "launch", str(path)])


def _yaml(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def xpk(args: argparse.Namespace, flags: list[str]) -> int:
    """On GKE, JAX finds the other processes by itself once it is told to look (`distributed.auto`)."""
    inner = shlex.join([args.python, *MAIN, *flags, "--config.distributed.auto=true"])
    command = ["xpk", "workload", "create", f"--cluster={args.cluster}", f"--workload={args.name}"]
    if args.tpu_type:
        command += [f"--tpu-type={args.tpu_type}", f"--num-slices={args.nodes}"]
    else:
        command += [f"--device-type={args.device_type}", f"--num-nodes={args.nodes}"]
    for key in ("docker_image", "base_docker_image", "project", "zone"):
        if value := getattr(args, key):
            command.append(f"--{key.replace('_', '-')}={value}")
    command += [f"--max-restarts={args.restarts}", f"--restart-on-exit-codes={PREEMPTED}"]
    command += [f"--termination-grace-period-seconds={args.grace}", f"--command={inner}"]
    if args.dry_run:
        print(shlex.join(command))
        return 0
    return run(command)


def ssh(args: argparse.Namespace, flags: list[str]) -> int:
    """Starts the command on every host; see Group."""
    hosts = args.hosts.split(",")
    meet = f"{hosts[0].rpartition('@')[2]}:{args.port}"
    commands = []
    for i, host in enumerate(hosts):
        words = [args.python, *MAIN, *flags]
        if len(hosts) > 1:
            where = {"coordinator": meet, "num_processes": len(hosts), "process_id": i}
            words += [f"--config.distributed.{key}={value}" for key, value in where.items()]
        parts = [f"cd {shlex.quote(args.folder)}", args.setup, f"exec {shlex.join(words)}"]
        commands.append([*shlex.split(args.ssh), host, " && ".join(filter(None, parts))])
    if args.dry_run:
        print("\n".join(map(shlex.join, commands)))
        return 0
    width = max(map(len, hosts))
    names = [f"{i} {host:{width}}" for i, host in enumerate(hosts)]
    return Group(dict(zip(names, commands, strict=True)), args.grace).wait()


class Group:
    """Processes that end together: their outputs line by line, each with its name; when one fails all are stopped.

    Stopping is ctrl-C, typed into each terminal: jaxlm then saves and ends with code 4. Who does not end in `grace`
    seconds is cut off, which ends it on its host too.
    """

    def __init__(self, commands: dict[str, list[str]], grace: float):
        self._grace, self._lock, self._asked = grace, threading.Lock(), threading.Event()
        self._processes = {}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        for name, command in commands.items():
            # In a session of its own, so that ctrl-C here reaches it through `stop` alone.
            process = subprocess.Popen(command, **pipes, text=True, errors="replace", start_new_session=True)
            self._processes[name] = process
        self._readers = [threading.Thread(target=self._copy, args=item) for item in self._processes.items()]
        for reader in self._readers:
            reader.start()

    def wait(self) -> int:
        """Until all have ended; 0, or the code of the first that failed."""
        signal.signal(signal.SIGINT, lambda *_: self._asked.set())
        signal.signal(signal.SIGTERM, lambda *_: self._asked.set())
        first, deadline, processes = 0, None, self._processes.values()
        while any(process.poll() is None for process in processes):
            first = first or next((code for p in processes if (code := p.poll())), 0)
            if deadline is None and (first or self._asked.is_set()):
                self._stop()
                deadline = time.monotonic() + self._grace
            if deadline is not None and time.monotonic() > deadline:
                for process in processes:
                    process.terminate()
            time.sleep(0.1)
        for reader in self._readers:
            reader.join()
        return first or next((code for p in processes if (code := p.returncode)), 0)

    def _stop(self) -> None:
        for process in self._processes.values():
            with contextlib.suppress(OSError):
                process.stdin.write("\x03")
                process.stdin.flush()

    def _copy(self, name: str, process: subprocess.Popen) -> None:
        for line in process.stdout:
            with self._lock:
                print(f"[{name}] {line.rstrip()}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
