"""The checks of this machine that need JAX's devices, for one config: its memory, speed, links, clocks, correctness."""

import contextlib
import dataclasses
import datetime
import functools
import os
import pathlib
import shutil
import tempfile
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxlm import models
from jaxlm.config import Config, MeshConfig, pip_install
from jaxlm.data.batches.open import open_order
from jaxlm.data.shards.shards import MANIFEST
from jaxlm.devices import processes, sharding
from jaxlm.devices.processes import together
from jaxlm.host import files
from jaxlm.host.console import count, gigabytes, human, size
from jaxlm.plan import accelerators, fit, flops, lower, memory, settle
from jaxlm.plan.doctor.findings import FAIL, OK, WARN, Finding
from jaxlm.plan.tune import machines, tune
from jaxlm.run import workdir
from jaxlm.run.checkpoints.store import Checkpointer
from jaxlm.step import parts
from jaxlm.step import state as states
from jaxlm.step.objectives import base, lm


def start(config: Config) -> "Machine":
    """Starts JAX as training does. Raises ConfigError if this machine can't have the config's mesh, flags or model."""
    mesh = processes.start(config.hardware, config.distributed, config.mesh, config.model.dtype)
    settled = settle.on_platform(settle.sized(config, processes.say), jax.devices()[0].platform)
    return Machine(settled.asked, settled.runs, mesh)


@dataclasses.dataclass(eq=False)
class Machine:
    """The checks of one config (`asked`, and `config` with dtype and attention chosen) on this machine's devices."""

    asked: Config
    config: Config
    mesh: Mesh
    fitted: Config | None = None  # with the values that are chosen at a start

    @property
    def who(self) -> str:
        return f"{jax.process_index()}: " if jax.process_count() > 1 else ""

    @functools.cached_property
    def need(self) -> "Need":
        """The bytes that the run needs by the plan."""
        microbatch = fit.own_microbatch(self.config, MeshConfig(**self.mesh.shape))
        config = settle.assuming(self.config, remat="full", rows=-1)
        config = fit.with_changes(config, microbatch=microbatch)
        made, planned = lower.parts_of(config, self.mesh), memory.estimate(config, self.mesh)
        averaged = made.abstract.params if config.checkpoint.average else {}
        checkpoint = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((made.abstract, averaged)))
        _, offloaded = memory.device_bytes(made.abstract, made.shardings)
        offloaded += planned.parameters if averaged and config.optim.offload else 0
        state = planned.parameters + planned.optimizer + planned.gradients + planned.average
        wider = self.asked.model.dtype == "auto" and config.model.dtype == "float32"
        return Need(planned.total, state, offloaded, checkpoint, microbatch, config.model.remat, wider)

    def memory(self) -> list[Finding]:
        free = lower.available_bytes()
        return [device_memory(self.need, free), host_memory(self.need, free)]

    def fits_the_run(self) -> Finding:
        """Returns a finding if training accepts the config. Raises if batch, mesh, offload, data or another model forbid it."""
        c = self.config
        with contextlib.ExitStack() as stack:
            folder = pathlib.Path(c.workdir or stack.enter_context(tempfile.TemporaryDirectory()))
            there = folder.exists()
            workdir.check(dataclasses.replace(c, workdir=str(folder)), self.mesh)
            accelerators.check_price(c, self.mesh.devices.flat[0].device_kind, self.mesh.size)
            if not there:
                folder.rmdir()
            elif (folder / ".lock").exists():
                files.lock(folder, "trains in", "config.workdir").close()
        if c.program == "pretrain" and c.data.dir and (pathlib.Path(c.data.dir) / MANIFEST).exists():
            open_order(c)
        chosen: list[str] = []
        self.fitted = tune.fit(c, self.mesh, chosen.append)
        shape = " x ".join(f"{axis} {size}" for axis, size in self.mesh.shape.items())
        m = self.fitted.model
        text = f"mesh {shape}; attention {m.attention}, {m.dtype}, remat {m.remat}"
        return Finding("config", OK, "; ".join([text, *chosen]), {"mesh": dict(self.mesh.shape)})

    def checkpoint(self) -> Finding:
        """Saves, verifies, restores and removes a checkpoint in the run's folder, on all processes. Returns a finding."""
        folder = pathlib.Path(self.config.workdir).absolute() / _FOLDER
        made = [path for path in folder.parents if not path.exists()]
        state = states.init({"params": {"a": jnp.arange(1024.0)}}, optax.adam(1e-3))
        state = jax.device_put(dataclasses.replace(state, step=jnp.int32(1)), sharding.replicated(self.mesh))
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

    def links(self) -> list[Finding]:
        """Returns findings on a sum over all devices, its correctness and speed, and on /dev/shm."""
        mesh, n = self.mesh, self.mesh.size
        if n == 1:
            return [Finding("links", OK, "one device: nothing to check")]
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
        return [Finding("links", FAIL if wrong else OK, text, figures), *shared_memory()]

    def forward(self) -> Finding:
        """Returns a finding on a forward pass, computed three times: a differing bit is an error of hardware or kernel."""
        free = lower.available_bytes() if jax.default_backend() == "cpu" else self.need.step
        small, what = shrunk(self.config, self.mesh, free)
        made = parts.make(small, self.mesh, lm.make)
        batch = tune.random_batch(made)
        began = time.monotonic()
        with jax.set_mesh(self.mesh):
            key, shardings = jax.random.key(small.seed), made.shardings.params["params"]
            variables = {"params": models.create_params(made.model, key, shardings)}
            forward = jax.jit(lambda variables, batch: base.hidden(made.model, variables, batch, None))
            first, compare = forward(variables, batch), jax.jit(differences)
            counts = [compare(first, forward(variables, batch)) for _ in range(2)]
        differing, nonfinite = max(int(n) for n, _ in counts), int(counts[0][1])
        seconds = time.monotonic() - began
        figures = {"what": what, "differing": differing, "nonfinite": nonfinite, "seconds": seconds}
        if not (differing or nonfinite):
            return Finding("forward", OK, f"{what}: equal to the last bit, three times", figures)
        wrong = f"{count(differing)} of {count(first.size)} numbers differ"
        wrong = wrong if differing else f"{count(nonfinite)} numbers are not finite"
        text = f"{what}: {wrong} between equal forward passes: this device computes wrongly; take another machine"
        return Finding("forward", FAIL, text, figures)

    def speed(self) -> Finding:
        """Returns a finding on the real step's tokens per second; on a matrix product's if a step would take minutes.

        The run's start finds the step in the compile cache.
        """
        if self.fitted is None:
            return Finding("speed", OK, "not timed: the config does not fit this machine")
        config, mesh, kind = self.fitted, self.mesh, jax.devices()[0].device_kind
        product = tune.product(config.model.dtype)
        if jax.default_backend() == "cpu" and flops.count_params(config.model) > CPU_PARAMS:
            text = f"a matrix product makes {product / 1e12:.3g} TFLOP/s; a step of this model takes minutes on a CPU: "
            return Finding("speed", OK, text + "not timed", {"product_flops": product})
        setting = machines.key(config, mesh.shape)
        before = machines.known(kind, mesh.size, setting)
        began = time.monotonic()
        made = lower.parts_of(config, mesh)
        state, frozen = made.create()
        batch, step = tune.random_batch(made), made.jit()

        def timed() -> float:
            nonlocal state
            began = time.perf_counter()
            state, metrics = step(frozen, state, batch)
            jax.block_until_ready(metrics)
            return time.perf_counter() - began

        with jax.set_mesh(mesh):
            timed()
            ready = time.monotonic() - began
            (step_s,) = tune.medians([timed], _STEPS, _STEP_SECONDS)
        now = config.train.batch_size * config.train.seq_len / step_s
        if jax.process_index() == 0:
            machines.record(kind, mesh.size, setting, now, "doctor")
        figures = {"tokens_per_second": now, "step_s": step_s, "start_s": ready}
        figures |= {"product_flops": product, "before": before and before["tokens_per_second"]}
        return compared(figures, before, config.hardware.peak_tflops or flops.peak_tflops(kind))

    def clock(self, began: tuple[float, float]) -> Finding:
        return clock(began, (time.time(), time.monotonic()), clocks())


_FOLDER = ".doctor-checkpoint"


MOST_DRIFT_S = 0.5  # of the wall clock against the monotonic one, while the doctor runs
MOST_SKEW_S = 2.0  # between two hosts
SHM_BYTES = 1e9  # of /dev/shm, by which NCCL connects the GPUs of one host
_CPU_BYTES, _BYTES = 8 << 20, 256 << 20  # of each device, to sum over all of them


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


def shared_memory() -> list[Finding]:
    """Returns a list of one finding if /dev/shm is too small for the GPUs of this host to reach each other; else []."""
    alone = jax.default_backend() != "gpu" or jax.local_device_count() == 1
    if alone or (total := shutil.disk_usage("/dev/shm").total) >= SHM_BYTES:
        return []
    text = f"/dev/shm has {size(total)}: NCCL may fail; start the container with --ipc=host or --shm-size=8g"
    return [Finding("links", WARN, text, {"shm_bytes": total})]


_FIRST_CHUNK, _LARGEST_CHUNK = 64 << 20, 1 << 30


@dataclasses.dataclass(frozen=True)
class Need:
    """The bytes that a run needs by the plan: `step`, `state` and `offloaded` (on the host) are of each device.

    `microbatch`, `remat`: the settings that `step` assumes; the most frugal ones if they are auto. `wider`: True if the bytes
    are for float32, in which this CPU computes, while `jaxlm plan` counts bfloat16.
    """

    step: int
    state: int
    offloaded: int
    checkpoint: int
    microbatch: int
    remat: str
    wider: bool = False


def present(gpu_present: bool) -> Finding:
    """Returns a finding on the devices that JAX has; FAIL if it has no GPU, but the machine has NVIDIA GPUs."""
    devices, first = jax.devices(), jax.devices()[0]
    processes = jax.process_count()
    figures = {"platform": first.platform, "kind": first.device_kind, "devices": len(devices), "processes": processes}
    text = f"{len(devices)} x {first.device_kind} ({first.platform}){f', {processes} processes' * (processes > 1)}"
    if gpu_present and first.platform == "cpu" and "cpu" not in os.environ.get("JAX_PLATFORMS", ""):
        return Finding("devices", FAIL, f"{text}, though there is an NVIDIA GPU: {pip_install('cuda12')}", figures)
    return Finding("devices", OK, text, figures)


def device_memory(planned: Need, free: int) -> Finding:
    """Returns a finding on this process's device memory, by a trial allocation; on a CPU by the host's `free` bytes."""
    if jax.default_backend() == "cpu":
        return cpu_memory(planned, jax.local_device_count(), free)
    had = {str(d): allocatable(planned.step, functools.partial(zeros, d)) for d in jax.local_devices()}
    where = min(had, key=had.__getitem__)
    figures = {"need_bytes": planned.step, "allocatable_bytes": had[where], "by_device": had}
    text = f"{_planned(planned)}; {gigabytes(had[where])} GB could be allocated"
    lacks = had[where] < planned.step
    text += f" on {where}: {_mend(planned)}" * lacks
    return Finding("memory", FAIL if lacks else OK, text, figures)


def cpu_memory(planned: Need, devices: int, free: int) -> Finding:
    """Returns the finding for a CPU. The plan is for an accelerator's program; for a CPU's program it may be off by half."""
    step, plural = planned.step * devices, "s" * (devices > 1)
    text = f"{_planned(planned)}, and {gigabytes(free)} GB of this host are free for {devices} device{plural}"
    verdict = WARN if step > free else OK
    if planned.state * devices > free or step > 2 * free:
        verdict = FAIL
        text += f", of which the state alone takes {gigabytes(planned.state)} GB"
    text += f": {_mend(planned)}" if verdict != OK else ""
    return Finding("memory", verdict, text, {"need_bytes": step, "free_bytes": free})


def _planned(planned: Need) -> str:
    wider = "; in float32, as a CPU computes: jaxlm plan counts with bfloat16" * planned.wider
    settings = f"microbatch {planned.microbatch}, remat {planned.remat}{wider}"
    return f"a step needs {gigabytes(planned.step)} GB a device by the plan ({settings})"


def _mend(planned: Need) -> str:
    less = "train.microbatch_size=-1 and model.remat=auto choose what fits; " * (planned.remat != "full")
    return f"{less}or stop the programs that hold the rest, or split the model by mesh.fsdp"


def allocatable(wanted: int, allocate: Callable[[int], jax.Array]) -> int:
    """Returns how many bytes, up to `wanted`, `allocate` could allocate in growing chunks. Frees them again."""
    held, total, chunk = [], 0, _FIRST_CHUNK
    while total < wanted:
        chunk = min(chunk, wanted - total)
        try:
            held.append(allocate(chunk))
        except RuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            if chunk <= _FIRST_CHUNK:
                break
            chunk //= 2
            continue
        total += chunk
        chunk = min(2 * chunk, _LARGEST_CHUNK)
    for array in held:
        array.delete()
    return total


def zeros(device: jax.Device, count: int) -> jax.Array:
    return jax.block_until_ready(jnp.zeros(count, jnp.uint8, device=device))  # really allocated


def host_memory(planned: Need, free: int) -> Finding:
    """Returns a finding on the host's `free` bytes: a save copies the state there first, and offloaded state lives there."""
    share = planned.checkpoint // jax.process_count()
    needed = share + planned.offloaded * jax.local_device_count()
    figures = {"need_bytes": needed, "free_bytes": free}
    text = f"a save holds {size(share)} of the host's memory for a while; {size(free)} are free"
    text += ": the first save would end the run; take a machine with more" * (needed > free)
    verdict = FAIL if needed > free else WARN if needed > 0.8 * free else OK
    return Finding("host", verdict, text, figures)


CPU_PARAMS = 60_000_000  # of the largest model that a CPU can run whole in a check
LAYERS, CPU_VOCAB, CPU_TOKENS = 2, 4096, 256  # of a larger model, when shrunk
SLOW = 0.85  # of the earlier speed; below it, a warning
_STEPS, _STEP_SECONDS = 5, 6.0  # timed at most, but two steps at least


def shrunk(config: Config, mesh: Mesh, free_bytes: int) -> tuple[Config, str]:
    """Returns (a config whose forward pass takes seconds, a description of it). Width and kernels stay."""
    m, t, cpu = config.model, config.train, mesh.devices.flat[0].platform == "cpu"
    params = flops.count_params(m)
    whole = params <= CPU_PARAMS if cpu else params * 6 < free_bytes
    model = m if whole else dataclasses.replace(m, n_layers=min(m.n_layers, LAYERS))
    tokens = t.seq_len
    if cpu and not whole:
        tokens, ways = min(t.seq_len, CPU_TOKENS), mesh.shape["context"]
        tokens = t.seq_len if tokens % ways else tokens
        model = dataclasses.replace(model, vocab_size=min(m.vocab_size, CPU_VOCAB), remat="none")
    B = sharding.batch_ways(mesh)
    train = dataclasses.replace(t, batch_size=B, microbatch_size=B, seq_len=tokens)
    what = "the whole model" if whole else f"{model.n_layers} of its {m.n_layers} layers"
    what += "" if model.vocab_size == m.vocab_size else f", vocabulary {count(model.vocab_size)}"
    return dataclasses.replace(config, model=model, train=train), f"{what}, {B} x {count(tokens)} tokens"


def differences(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns (how many elements of two arrays differ in a bit, how many of the first are not finite)."""
    integer = jnp.dtype(f"uint{8 * a.dtype.itemsize}")
    bits = [jax.lax.bitcast_convert_type(x, integer) for x in (a, b)]
    return (bits[0] != bits[1]).sum(), (~jnp.isfinite(a)).sum()


def compared(figures: dict, before: dict | None, peak_tflops: float | None) -> Finding:
    """Returns a finding on `tokens_per_second` of `figures` against earlier measurements of this setting on such devices."""
    now, of = figures["tokens_per_second"], f" of {peak_tflops:.0f}" if peak_tflops else ""
    text = f"{human(now)} tokens/s; a matrix product makes {figures['product_flops'] / 1e12:.3g}{of} TFLOP/s"
    if not before:
        return Finding("speed", OK, f"{text}; no earlier measurement of such a run on this device", figures)
    day = datetime.datetime.fromtimestamp(before["time"]).date()
    speed = before["tokens_per_second"]
    text += f"; before: {human(speed)} ({before['measurements']} times, last by {before['by']} on {day})"
    slow = now < SLOW * speed
    text += ": slower; something else runs here, or the card is throttled" * slow
    return Finding("speed", WARN if slow else OK, text, figures)
