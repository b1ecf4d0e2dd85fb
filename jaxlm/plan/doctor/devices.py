"""Checks that the devices answer, and that devices and host really have the memory that the plan needs."""

import dataclasses
import datetime
import functools
import os
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxlm import models
from jaxlm.config import Config, MeshConfig, pip_install
from jaxlm.devices import sharding
from jaxlm.host.console import count, gigabytes, human, size
from jaxlm.plan import fit, flops, lower, memory
from jaxlm.plan.doctor.findings import FAIL, OK, WARN, Finding
from jaxlm.plan.flops import count_params
from jaxlm.plan.tune import bench, machines
from jaxlm.step import parts
from jaxlm.step.objectives import base, lm

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


def need(config: Config, mesh: Mesh, dtype_asked: str = "") -> Need:
    """Returns the bytes that the run needs by the plan. `dtype_asked`: `model.dtype` as it was given, perhaps auto."""
    microbatch = fit.own_microbatch(config, MeshConfig(**mesh.shape))
    remat = "full" if config.model.remat == "auto" else config.model.remat
    settled = fit.with_changes(config, remat=remat, microbatch=microbatch)
    made = lower.parts_of(settled, mesh)
    kept = made.abstract.params if config.checkpoint.average else {}
    checkpoint = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((made.abstract, kept)))
    planned = memory.estimate(settled, mesh)
    _, offloaded = memory.device_bytes(made.abstract, made.shardings)
    offloaded += planned.parameters if kept and config.optim.offload else 0
    state = planned.parameters + planned.optimizer + planned.gradients + planned.average
    wider = dtype_asked == "auto" and config.model.dtype == "float32"
    return Need(planned.total, state, offloaded, checkpoint, microbatch, remat, wider)


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
    params = count_params(m)
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


def twice(config: Config, mesh: Mesh, free_bytes: int) -> Finding:
    """Returns a finding on a forward pass, computed three times: a differing bit is an error of hardware or kernel."""
    small, what = shrunk(config, mesh, free_bytes)
    made = parts.make(small, mesh, lm.make)
    batch = bench.random_batch(made)
    began = time.monotonic()
    with jax.set_mesh(mesh):
        key, shardings = jax.random.key(config.seed), made.shardings.params["params"]
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


def differences(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns (how many elements of two arrays differ in a bit, how many of the first are not finite)."""
    integer = jnp.dtype(f"uint{8 * a.dtype.itemsize}")
    bits = [jax.lax.bitcast_convert_type(x, integer) for x in (a, b)]
    return (bits[0] != bits[1]).sum(), (~jnp.isfinite(a)).sum()


def speed(config: Config, mesh: Mesh, product_flops: float) -> Finding:
    """Returns a finding on the real step's tokens per second. The run's start finds the step in the compile cache."""
    kind, setting = jax.devices()[0].device_kind, machines.key(config, mesh.shape)
    before = machines.known(kind, mesh.size, setting)
    began = time.monotonic()
    made = lower.parts_of(config, mesh)
    state, frozen = made.create()
    batch, step = bench.random_batch(made), made.jit()

    def timed() -> float:
        nonlocal state
        began = time.perf_counter()
        state, metrics = step(frozen, state, batch)
        jax.block_until_ready(metrics)
        return time.perf_counter() - began

    with jax.set_mesh(mesh):
        timed()
        ready = time.monotonic() - began
        (step_s,) = bench.medians([timed], _STEPS, _STEP_SECONDS)
    now = config.train.batch_size * config.train.seq_len / step_s
    if jax.process_index() == 0:
        machines.record(kind, mesh.size, setting, now, "doctor")
    figures = {"tokens_per_second": now, "step_s": step_s, "start_s": ready}
    figures |= {"product_flops": product_flops, "before": before and before.tokens_per_second}
    return compared(figures, before, config.hardware.peak_tflops or flops.peak_tflops(kind))


def compared(figures: dict, before: machines.Known | None, peak_tflops: float | None) -> Finding:
    """Returns a finding on `tokens_per_second` of `figures` against earlier measurements of this setting on such devices."""
    now, of = figures["tokens_per_second"], f" of {peak_tflops:.0f}" if peak_tflops else ""
    text = f"{human(now)} tokens/s; a matrix product makes {figures['product_flops'] / 1e12:.3g}{of} TFLOP/s"
    if not before:
        return Finding("speed", OK, f"{text}; no earlier measurement of such a run on this device", figures)
    day = datetime.datetime.fromtimestamp(before.time).date()
    text += f"; before: {human(before.tokens_per_second)} ({before.measurements} times, last by {before.by} on {day})"
    slow = now < SLOW * before.tokens_per_second
    text += ": slower; something else runs here, or the card is throttled" * slow
    return Finding("speed", WARN if slow else OK, text, figures)
