"""Finds how fast a machine trains a config: from earlier measurements, else by a short measurement of this machine.

~/.cache/jaxlm/machines.json keeps them: {"NVIDIA H200 x 1": {KEY: [{"tokens_per_second", "by", "time", "host"}, ...]}}
("cpu x 1, 2 cores" of a CPU), and for `jaxlm plan` {"plans": {HOST: {KEY: {...}}}}. It is a cache: a file that can't be read
or written is never an error.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import itertools
import json
import math
import os
import pathlib
import platform
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping

import jax

from jaxlm.config import Config, ConfigError, RunError, config_files, with_keys
from jaxlm.devices import processes, sharding
from jaxlm.host import console, files
from jaxlm.host.child import Child, Died
from jaxlm.plan import cost, flops, lower, settle
from jaxlm.plan.tune import tune

MOST = 20  # measurements of one setting that are kept
MOST_PLANS = 100  # entries of "plans" that are kept for a host
_PLANS = "plans"
_ROW = {"tokens_per_second": files.NUMBER, "time": files.NUMBER, "by": files.TEXT}
# An entry of "plans", as `row` reads it.
_PLAN = dict.fromkeys(("kind", "setting", "by", "what"), files.TEXT) | {"count": files.whole(1)}
_PLAN |= dict.fromkeys(("microbatch", "memory", "time", "load"), files.NUMBER)
_PLAN |= dict.fromkeys(("needed", "tokens_per_second"), files.NUMBER_OR_NONE)


def path() -> pathlib.Path:
    return pathlib.Path("~/.cache/jaxlm/machines.json").expanduser()


def key(config: Config, mesh: Mapping[str, int]) -> str:
    """Returns a hash of the settings that determine a step's speed, without the device and the versions of packages."""
    t = config.train
    parts = {
        "model": dataclasses.asdict(config.model),
        "train": [t.batch_size, t.seq_len, t.microbatch_size],
        "loss": config.loss.tile_tokens,
        "optim": [config.optim.name, config.optim.mu_dtype, config.optim.offload],
        "mesh": dict(mesh),
        "xla_flags": config.hardware.xla_flags,
    }
    if config.program != "pretrain":
        parts |= {"program": config.program, "adapter": dataclasses.asdict(config.adapter), "dpo": config.dpo.loss}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def known(kind: str, count: int, setting: str) -> dict | None:
    """Returns the last measurement of `count` devices of a kind with a setting (`key`); None if there is none.

    Its `tokens_per_second` are the median of all `measurements`, and those of all devices together.
    """
    rows = _rows(files.json_there(path()), kind, count, setting)
    rows = [row for row in rows if row["by"] != "plan"] or rows  # plan times few steps: only if there is nothing better
    if not rows:
        return None
    speed = statistics.median(row["tokens_per_second"] for row in rows)
    return rows[-1] | {"tokens_per_second": speed, "measurements": len(rows)}


def record(kind: str, count: int, setting: str, tokens_per_second: float, by: str) -> None:
    """Adds a measurement by "train", "tune", "doctor" or "plan"; keeps the newest MOST, and of "plan" one. Never raises."""
    if not (math.isfinite(tokens_per_second) and tokens_per_second > 0):
        return
    row = {"tokens_per_second": tokens_per_second, "by": by, "time": time.time(), "host": platform.node()}

    def add(content: dict) -> None:
        before = [r for r in _rows(content, kind, count, setting) if by != "plan" or r["by"] != "plan"]
        _part(content, _machine(kind, count))[setting] = [*before, row][-MOST:]

    _change(add)


def planned(setting: str) -> dict | None:
    """Returns the dict that `remember` stored for this host under this key; None if it is missing or incomplete."""
    plan = _part(_part(_part(files.json_there(path()), _PLANS), platform.node()), setting)
    return None if files.problem(plan, {"why": files.TEXT} if "why" in plan else _PLAN) else plan


def remember(setting: str, machine: dict) -> None:
    """Stores a measurement of this host by `jaxlm plan` (see `measure`) under the key `setting`. Never raises."""

    def add(content: dict) -> None:
        host = _part(_part(content, _PLANS), platform.node())
        host.pop(setting, None)
        host[setting] = machine
        for old in list(host)[:-MOST_PLANS]:
            del host[old]

    _change(add)


def _change(edit: Callable[[dict], None]) -> None:
    """Reads the file, edits its content and writes it, while no other process does. Never raises."""
    with contextlib.suppress(OSError):  # a home that is read-only or full
        file = path()
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(file.with_name(".machines.lock"), "w") as lock:  # two runs on one host may end together
            with contextlib.suppress(OSError):  # some network file systems have no locks
                fcntl.flock(lock, fcntl.LOCK_EX)
            content = files.json_there(path())
            edit(content)
            files.write_atomically(file, (json.dumps(content, indent=1) + "\n").encode())


def _part(content: dict, name: str) -> dict:
    """Returns the dict under `name`, which it creates if it is missing."""
    if not isinstance(content.get(name), dict):
        content[name] = {}
    return content[name]


def _machine(kind: str, count: int) -> str:
    return f"{kind} x {count}" + (f", {files.cores()} cores" if kind == "cpu" else "")


def _rows(content: dict, kind: str, count: int, setting: str) -> list[dict]:
    """Returns the measurements of a setting, oldest first, without incomplete ones."""
    rows = _part(content, _machine(kind, count)).get(setting)
    return [row for row in rows if not files.problem(row, _ROW)] if isinstance(rows, list) else []


STEP_S = 4.0  # a step that is timed takes about this at most
STEPS, TIMED_S = 3, 6.0  # of timing at most, but two steps at least
LIMIT_S = 90.0  # for the process that measures; a busy machine compiles slowly
SHARE = 0.5  # of the memory that is free on a CPU, for the measurement: others use this machine too
TOKENS = 256  # of the shortest rows
REACHED = 0.4  # of the speed of a matrix product: a guess, to choose what to time


def row(config: Config) -> dict:
    """Returns this machine as a row of the plan, or {"why": the reason that there is none}, "" if no row was asked for."""
    mode, setting = config.plan.measure, _key(config)
    if mode == "never" or (mode == "auto" and config.plan.accelerator):  # planned for another accelerator
        return {"why": ""}
    if processes.several(config.distributed):
        return {"why": "it runs as several processes, which only train and tune measure"}
    machine = planned(setting) if mode == "auto" else None
    if machine is None:
        if pids := _computing():
            return {"why": f"its GPU is in use (process {pids[0]})"}
        load = os.getloadavg()[0] / (os.cpu_count() or 1)
        console.say(
            f"measuring this machine: a few steps, {LIMIT_S:.0f} s at most, on a CPU in at most half of its free memory "
            "(--config.plan.measure=never leaves it out)"
        )
        with console.working("measuring this machine"):
            machine = _in_child(config) | {"load": load}
        remember(setting, machine)
    if "why" in machine:
        return {"why": f"{machine['why']} (plan.measure=again tries again)"}
    before = known(machine["kind"], machine["count"], machine["setting"]) if mode == "auto" else None
    if before:
        machine |= {key: before[key] for key in ("tokens_per_second", "by", "time")} | {"what": ""}
        machine["load"] = machine["load"] if before["by"] == "plan" else 0.0
    return _finished(config, machine | {"memory": _memory(config, machine)})


def _memory(config: Config, machine: dict) -> float:
    """Returns the bytes that a step may take on a device: on a CPU by the memory that is free now, not when it was measured."""
    if config.tune.memory_gb:
        return config.tune.memory_gb * 1e9
    if machine["kind"] == "cpu":
        with contextlib.suppress(OSError):
            return tune.HEADROOM * lower.available_bytes() / machine["count"]
    return machine["memory"]


def _finished(config: Config, machine: dict) -> dict:
    """Returns the machine with its hours, dollars and MFU for the config, and whether its step fits (None: unknown)."""
    speed, peak = machine["tokens_per_second"], config.hardware.peak_tflops or flops.peak_tflops(machine["kind"])
    hours = cost.tokens(config) / speed / 3600 if speed else None
    # The price is that of the GPU that the config is meant for.
    price = config.hardware.usd_per_hour if machine["kind"] != "cpu" else 0.0
    ran = True if machine["by"] != "plan" else None
    return machine | {
        "fits": machine["needed"] <= machine["memory"] if machine["needed"] else ran,
        "hours": hours,
        "usd": hours * price if hours and price else None,
        "mfu": speed * flops.of(config).palm / (1e12 * peak * machine["count"]) if speed and peak else None,
    }


def _key(config: Config) -> str:
    """Returns a measurement's key on this host: the hash of the config, with auto values as they are, and the devices seen."""
    seen = [os.environ.get(name, "") for name in ("JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES")]
    return " ".join(filter(None, [key(config, dataclasses.asdict(config.mesh)), *seen]))


def _computing() -> list[str]:
    """Returns the ids of processes that compute on this machine's NVIDIA GPUs; [] if there are none, or if it is unknown."""
    if not (program := shutil.which("nvidia-smi")):
        return []
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = [program, "--query-compute-apps=pid", "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.split()
    return []


def _in_child(config: Config) -> dict:
    """Runs `work` in a new process, which has this machine's devices. Returns its last message, or {"why": ...}."""
    machine, end = {}, time.monotonic() + LIMIT_S
    measuring = Child("jaxlm.plan.tune.machines:work")
    try:
        measuring.send(config, LIMIT_S)
        while True:
            machine = measuring.receive(max(0.0, end - time.monotonic()))
    except TimeoutError:
        return machine or {"why": f"measuring took over {LIMIT_S:.0f} seconds"}
    except Died as death:
        return machine or {"why": f"measuring ended with code {death.code}: {death.said[:100] or 'no word'}"}
    finally:
        measuring.end()


def work(configs: Iterator[Config], tell: Callable[[dict], None]) -> None:
    """Sends each result that `measure` yields for a config."""
    try:
        for machine in measure(next(configs)):
            tell(machine)
    except (ConfigError, RunError, OSError, RuntimeError) as error:
        tell({"why": config_files.first_line(error)[:100]})


def measure(config: Config) -> Iterator[dict]:
    """Yields a config's measurement on this process's devices: first with the speed, then with the memory too; or {"why": ...}.

    `setting` is the `key` of training, `memory` the bytes of a device that a step may take without `tune.memory_gb`, `needed`
    the bytes that this step takes (None: not known yet), `what` the part that was timed ("" for the step itself).
    """
    mesh = processes.start(config.hardware, config.distributed, config.mesh, config.model.dtype)
    device = jax.devices()[0]
    ways = sharding.batch_ways(mesh)
    config = settle.assuming(settle.on_platform(config, device.platform).runs, remat="full", rows=ways)
    sharding.check_batch(mesh, "train.microbatch_size", config.train.microbatch_size)
    limit, own = tune.memory_limit(config.tune.memory_gb), lower.of_devices(0.0)
    machine = {
        "kind": device.device_kind,
        "count": mesh.size,
        "setting": key(config, mesh.shape),
        "microbatch": config.train.microbatch_size,
        "memory": tune.HEADROOM * own.bytes if own else limit,  # tune.memory_gb is of one plan; this is reused
        "needed": None,
        "tokens_per_second": None,
        "by": "plan",
        "what": "",
        "time": time.time(),
    }
    if config.plan.measure == "auto" and known(machine["kind"], mesh.size, machine["setting"]):
        yield machine  # it ran, so it fits
        return
    small = affordable(config, ways, STEP_S * REACHED * mesh.size * tune.product(config.model.dtype))
    if own and device.platform == "cpu":
        limit = min(limit, SHARE * own.bytes)
    trial, exact = _timed(small, mesh, limit), small == config
    if trial.tokens_per_second:
        machine["tokens_per_second"] = trial.tokens_per_second * _flops(small) / _flops(config)
        machine["what"] = "" if exact else described(small, config)
        if exact:
            record(machine["kind"], mesh.size, machine["setting"], trial.tokens_per_second, "plan")
    elif trial.note != "does not fit":
        yield {"why": trial.note}
        return
    yield machine
    machine["needed"] = trial.predicted_bytes if exact else needed(config, mesh)
    yield machine


def affordable(config: Config, ways: int, most_flops: float) -> Config:
    """Returns a config of at most `most_flops` a step, if possible: with fewer rows, then fewer layers, then shorter rows."""
    while _flops(config) * config.train.batch_size * config.train.seq_len > most_flops:
        m, t = config.model, config.train
        if t.batch_size > ways:
            rows = max(ways, t.batch_size // 2 // ways * ways)
            micro = t.microbatch_size if rows % t.microbatch_size == 0 else rows
            config = with_keys(config, train={"batch_size": rows, "microbatch_size": micro})
        elif m.n_layers > 2:
            config = with_keys(config, model={"n_layers": m.n_layers // 2})
        elif t.seq_len >= 2 * TOKENS and t.seq_len % 2 == 0:
            config = with_keys(config, train={"seq_len": t.seq_len // 2})
        else:
            break
    return config


def described(small: Config, config: Config) -> str:
    """Returns words for the smaller step that is timed in place of the config's: its layers, rows and tokens."""
    few, all_, t = small.model.n_layers, config.model.n_layers, small.train
    layers = f"{few} of {all_} layers, " * (few < all_)
    return f"{layers}{console.count(t.batch_size)} x {console.count(t.seq_len)} tokens"


def needed(config: Config, mesh: jax.sharding.Mesh) -> int:
    """Returns the bytes of a device that the config's step takes, from the programs of one and of two layers."""
    options = lower.QUICK if jax.default_backend() == "cpu" else None
    sizes = []
    for n_layers in (1, 2)[: config.model.n_layers]:
        shallow = with_keys(config, model={"n_layers": n_layers})
        sizes.append(lower.memory_of(lower.parts_of(shallow, mesh).lower().compile(compiler_options=options)))
    return sizes[0] + (config.model.n_layers - 1) * (sizes[-1] - sizes[0])


def _timed(config: Config, mesh: jax.sharding.Mesh, limit: float) -> tune.Trial:
    """Returns the trial of the config's own settings on random tokens."""
    config = with_keys(config, tune={"steps": STEPS})
    own = tune.own(config, config.train.microbatch_size, config.model.remat)
    batches = itertools.repeat(tune.random_batch(lower.parts_of(config, mesh)))
    return tune.Bench(config, mesh, limit, batches, lambda text: None, TIMED_S).trial(own)


def _flops(config: Config) -> float:
    return flops.of(config).causal
