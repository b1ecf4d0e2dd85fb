"""The checks of this machine that need JAX's devices, for one config."""

import contextlib
import dataclasses
import datetime
import functools
import pathlib
import shutil
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxlm.config import Config
from jaxlm.data.batches.open import open_order
from jaxlm.data.shards.shards import MANIFEST
from jaxlm.devices import processes
from jaxlm.devices.processes import together
from jaxlm.host import files
from jaxlm.host.console import size
from jaxlm.plan import accelerators, lower, settle
from jaxlm.plan.doctor import devices
from jaxlm.plan.doctor.findings import FAIL, OK, WARN, Finding
from jaxlm.plan.flops import count_params
from jaxlm.plan.tune import bench, tune
from jaxlm.run import workdir
from jaxlm.run.checkpoints.store import Checkpointer
from jaxlm.step import state as states


def start(config: Config) -> "Machine":
    """Starts JAX as training does. Raises ConfigError if this machine can't have the config's mesh, flags or model."""
    mesh = processes.start(config.hardware, config.distributed, config.mesh, config.model.dtype)
    settled = settle.on_platform(settle.sized(config, processes.say), jax.devices()[0].platform)
    return Machine(settled.asked, settled.runs, mesh)


class Machine:
    """The checks of one config (`asked`, and `config` with dtype and attention chosen) on this machine's devices."""

    def __init__(self, asked: Config, config: Config, mesh: Mesh):
        self._asked, self._config, self._mesh = asked, config, mesh
        self._fitted: Config | None = None  # with the values that are chosen at a start

    @functools.cached_property
    def _need(self) -> devices.Need:
        return devices.need(self._config, self._mesh, self._asked.model.dtype)

    @property
    def who(self) -> str:
        return f"{jax.process_index()}: " if jax.process_count() > 1 else ""

    @property
    def checkpoint_bytes(self) -> int:
        return self._need.checkpoint

    def present(self, has_gpu: bool) -> Finding:
        return devices.present(has_gpu)

    def fits_the_run(self) -> Finding:
        """Returns a finding if training accepts the config. Raises if batch, mesh, offload, data or another model forbid it."""
        c = self._config
        with contextlib.ExitStack() as stack:
            folder = pathlib.Path(c.workdir or stack.enter_context(tempfile.TemporaryDirectory()))
            there = folder.exists()
            workdir.check(dataclasses.replace(c, workdir=str(folder)), self._mesh)
            accelerators.check_price(c, self._mesh.devices.flat[0].device_kind, self._mesh.size)
            if not there:
                folder.rmdir()
            elif (folder / ".lock").exists():
                files.lock(folder, "trains in", "config.workdir").close()
        if c.program == "pretrain" and c.data.dir and (pathlib.Path(c.data.dir) / MANIFEST).exists():
            open_order(c)
        chosen: list[str] = []
        self._fitted = tune.fit(c, self._mesh, chosen.append)
        shape = " x ".join(f"{axis} {size}" for axis, size in self._mesh.shape.items())
        m = self._fitted.model
        text = f"mesh {shape}; attention {m.attention}, {m.dtype}, remat {m.remat}"
        return Finding("config", OK, "; ".join([text, *chosen]), {"mesh": dict(self._mesh.shape)})

    def memory(self) -> list[Finding]:
        free = lower.available_bytes()
        return [devices.device_memory(self._need, free), devices.host_memory(self._need, free)]

    def checkpoint(self) -> Finding:
        return tiny_checkpoint(self._config.workdir, self._mesh)

    def links(self) -> list[Finding]:
        return [links(self._mesh), *shared_memory()]

    def forward(self) -> Finding:
        free = lower.available_bytes() if jax.default_backend() == "cpu" else self._need.step
        return devices.twice(self._config, self._mesh, free)

    def speed(self) -> Finding:
        """Returns a finding on the step's speed; on a matrix product's speed alone if a step would take minutes."""
        if self._fitted is None:
            return Finding("speed", OK, "not timed: the config does not fit this machine")
        product = bench.product(self._config.model.dtype)
        if jax.default_backend() == "cpu" and count_params(self._config.model) > devices.CPU_PARAMS:
            text = f"a matrix product makes {product / 1e12:.3g} TFLOP/s; a step of this model takes minutes on a CPU: "
            return Finding("speed", OK, text + "not timed", {"product_flops": product})
        return devices.speed(self._fitted, self._mesh, product)

    def clock(self, began: tuple[float, float]) -> Finding:
        return clock(began, now(), clocks())


_FOLDER = ".doctor-checkpoint"


def tiny_checkpoint(workdir: str, mesh: Mesh) -> Finding:
    """Saves, verifies, restores and removes a checkpoint in the run's folder, on all processes. Returns a finding."""
    folder = pathlib.Path(workdir).absolute() / _FOLDER
    made = [path for path in folder.parents if not path.exists()]
    state = states.init({"params": {"a": jnp.arange(1024.0)}}, optax.adam(1e-3))
    state = jax.device_put(dataclasses.replace(state, step=jnp.int32(1)), NamedSharding(mesh, PartitionSpec()))
    began = time.monotonic()

    def remove() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # not empty
            for path in made:
                path.rmdir()

    try:
        together(lambda: shutil.rmtree(folder, ignore_errors=True), first_only=True)  # left by a killed doctor
        checkpoints = Checkpointer(folder / "checkpoints")
        why = checkpoints.save_last(1, state, {})
        checkpoints.close()
        if why:
            return Finding("checkpoint", FAIL, f"{why}; take another config.workdir")
        checkpoints.restore(1, state, jax.tree.map(lambda x: x.sharding, state))
    finally:
        together(remove, first_only=True)
    seconds = time.monotonic() - began
    text = f"a tiny checkpoint was saved, read back, restored and removed in {folder.parent} in {seconds:.1f} s"
    return Finding("checkpoint", OK, text, {"seconds": seconds})


MOST_DRIFT_S = 0.5  # of the wall clock against the monotonic one, while the doctor runs
MOST_SKEW_S = 2.0  # between two hosts
SHM_BYTES = 1e9  # of /dev/shm, by which NCCL connects the GPUs of one host
_CPU_BYTES, _BYTES = 8 << 20, 256 << 20  # of each device, to sum over all of them


def now() -> tuple[float, float]:
    return time.time(), time.monotonic()


def clock(began: tuple[float, float], ended: tuple[float, float], at_hosts: list[float] | None = None) -> Finding:
    """Returns a finding on the wall clock: its drift between two moments, and its skew across all processes."""
    seconds = ended[1] - began[1]
    drift, skew = ended[0] - began[0] - seconds, max(at_hosts) - min(at_hosts) if at_hosts else 0.0
    year = datetime.datetime.fromtimestamp(ended[0], datetime.UTC).year
    mend, verdict = "set it by NTP (timedatectl set-ntp true)", WARN
    if not 2025 <= year <= 2100:
        verdict, text = FAIL, f"it is {year} by the clock: certificates will be refused; {mend}"
    elif abs(drift) > MOST_DRIFT_S:
        text = f"the clock was moved by {drift:+.1f} s while the doctor ran: times and dollars will be off; {mend}"
    elif skew > MOST_SKEW_S:
        text = f"the hosts' clocks are {skew:.1f} s apart; {mend}"
    else:
        alone = "one process: no other clock to compare with"
        agree = f"{len(at_hosts)} processes agree to {skew:.2f} s" if at_hosts else alone
        verdict, text = OK, f"{year}, drift {drift:+.3f} s; {agree}"
    return Finding("clock", verdict, text, {"year": year, "drift_s": drift, "skew_s": skew, "seconds": seconds})


def clocks() -> list[float] | None:
    """Returns the wall clocks of all processes at about one moment; None if there is one process."""
    if jax.process_count() == 1:
        return None
    multihost_utils.sync_global_devices("doctor's clock")
    # As two numbers: JAX would round Unix seconds in float64 to float32, an error of minutes.
    whole, part = divmod(time.time(), 1)
    rows = multihost_utils.process_allgather(np.array([int(whole), int(part * 1e6)], np.int32))
    return [float(row[0]) + float(row[1]) / 1e6 for row in rows]


def links(mesh: Mesh) -> Finding:
    """Returns a finding on the correctness and speed of a sum over all devices."""
    n = mesh.size
    if n == 1:
        return Finding("links", OK, "one device: nothing to check")
    bytes_each = _CPU_BYTES if jax.default_backend() == "cpu" else _BYTES
    split, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((mesh.axis_names,), ()))
    numbers_N = jax.make_array_from_callback((n,), split, lambda at: np.arange(1, n + 1, dtype=np.float32)[at])
    fill = jax.jit(lambda x_N: jnp.broadcast_to(x_N[:, None], (n, bytes_each // 4)), out_shardings=split)
    add = jax.jit(lambda x_NxC: x_NxC.sum(0), out_shardings=whole)
    x_NxC = fill(numbers_N)
    jax.block_until_ready(add(x_NxC))
    began = time.perf_counter()
    for _ in range(3):
        sum_C = jax.block_until_ready(add(x_NxC))
    seconds = (time.perf_counter() - began) / 3
    wrong = int((sum_C != n * (n + 1) / 2).sum())
    speed = 2 * (n - 1) / n * bytes_each / seconds  # what a ring moves through each link
    figures = {"devices": n, "bytes": bytes_each, "seconds": seconds, "bytes_per_second": speed, "wrong": wrong}
    text = f"a sum of {size(bytes_each)} over {n} devices, {jax.process_count()} processes: {size(speed)}/s each"
    if wrong:
        text = f"a sum over {n} devices is wrong in {wrong} places: take another machine"
    return Finding("links", FAIL if wrong else OK, text, figures)


def shared_memory(folder: pathlib.Path = pathlib.Path("/dev/shm")) -> list[Finding]:
    """Returns a list of one finding if /dev/shm is too small for the GPUs of this host to reach each other; else []."""
    alone = jax.default_backend() != "gpu" or jax.local_device_count() == 1
    if alone or (total := shutil.disk_usage(folder).total) >= SHM_BYTES:
        return []
    text = f"{folder} has {size(total)}: NCCL may fail; start the container with --ipc=host or --shm-size=8g"
    return [Finding("links", WARN, text, {"shm_bytes": total})]
