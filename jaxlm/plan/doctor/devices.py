"""Checks that the devices answer, and that the memory which the plan needs can really be had, on them and on the host."""

import dataclasses
import functools
import os
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxlm.config import Config, MeshConfig
from jaxlm.host.console import gigabytes, size
from jaxlm.plan import fit, lower, memory
from jaxlm.plan.doctor.findings import FAIL, OK, WARN, Finding

_FIRST_CHUNK, _LARGEST_CHUNK = 64 << 20, 1 << 30


@dataclasses.dataclass(frozen=True)
class Need:
    """What the plan says that a run needs, in bytes.

    Attributes:
      step: of each device at the peak of a step, by arithmetic (`plan.memory`).
      state: of each device, for what is there all the time: parameters, optimizer, gradients.
      offloaded: of the host's memory for each device: the optimizer's state, if it lives there.
      checkpoint: of the disk for one checkpoint: parameters and optimizer's state, over all devices.
      microbatch, remat: the settings for which `step` holds; those that are chosen at the start stand for the most frugal.
      wider: True if `step` holds for float32, which this CPU computes in, where `jaxlm plan` counts an accelerator's bfloat16.
    """

    step: int
    state: int
    offloaded: int
    checkpoint: int
    microbatch: int
    remat: str
    wider: bool = False


def need(config: Config, mesh: Mesh, dtype_asked: str = "") -> Need:
    """Returns what the plan says.

    Args:
      config: the config; `model.attention` and `model.dtype` must not be auto.
      mesh: the devices.
      dtype_asked: `model.dtype` as it was given, perhaps auto.
    """
    microbatch = fit.own_microbatch(config, MeshConfig(**mesh.shape))
    remat = "full" if config.model.remat == "auto" else config.model.remat
    settled = fit.with_changes(config, remat=remat, microbatch=microbatch)
    made = lower.parts_of(settled, mesh)
    checkpoint = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(made.abstract))
    _, offloaded = memory.device_bytes(made.abstract, made.shardings)
    planned = memory.estimate(settled, mesh)
    state = planned.parameters + planned.optimizer + planned.gradients
    wider = dtype_asked == "auto" and config.model.dtype == "float32"
    return Need(planned.total, state, offloaded, checkpoint, microbatch, remat, wider)


def present(gpu_present: bool) -> Finding:
    """Returns a finding on the devices that JAX has; FAIL if it has none of the GPUs that are there.

    Args:
      gpu_present: True if the machine has an NVIDIA device.
    """
    devices, first = jax.devices(), jax.devices()[0]
    figures = {"platform": first.platform, "kind": first.device_kind, "devices": len(devices)}
    figures |= {"processes": jax.process_count()}
    text = f"{len(devices)} x {first.device_kind} ({first.platform})"
    text += f", {jax.process_count()} processes" if jax.process_count() > 1 else ""
    if gpu_present and first.platform == "cpu" and "cpu" not in os.environ.get("JAX_PLATFORMS", ""):
        return Finding("devices", FAIL, f'{text}, though there is an NVIDIA GPU: pip install "jaxlm[cuda12]"', figures)
    return Finding("devices", OK, text, figures)


def device_memory(planned: Need, free: int) -> Finding:
    """Returns a finding on the memory of this process's devices against the plan.

    An accelerator's memory is allocated for real, in growing chunks, and freed again. A CPU's is the `free` bytes of the
    host, which it shares with all else.
    """
    if jax.default_backend() == "cpu":
        return cpu_memory(planned, jax.local_device_count(), free)
    had = {str(d): allocatable(planned.step, functools.partial(zeros, d)) for d in jax.local_devices()}
    where = min(had, key=had.__getitem__)
    figures = {"need_bytes": planned.step, "allocatable_bytes": had[where], "by_device": had}
    text = f"{_planned(planned)}; {gigabytes(had[where])} GB could be allocated"
    if had[where] < planned.step:
        return Finding("memory", FAIL, f"{text} on {where}: {_mend(planned)}", figures)
    return Finding("memory", OK, text, figures)


def cpu_memory(planned: Need, devices: int, free: int) -> Finding:
    """Returns the finding for a CPU. The plan is made for an accelerator's program: of a CPU's it may be off by half.

    Args:
      planned: the plan.
      devices: the number of JAX's devices on this host, which share its memory.
      free: the free bytes of this host.
    """
    step, plural = planned.step * devices, "s" * (devices > 1)
    text = f"{_planned(planned)}, and {gigabytes(free)} GB of this host are free for {devices} device{plural}"
    verdict = OK
    if planned.state * devices > free or step > 2 * free:
        verdict = FAIL
        text += f", of which the state that is always there is {gigabytes(planned.state)} GB: {_mend(planned)}"
    elif step > free:
        verdict, text = WARN, f"{text}: {_mend(planned)}"
    return Finding("memory", verdict, text, {"need_bytes": step, "free_bytes": free})


def _planned(planned: Need) -> str:
    wider = "; in float32, as a CPU computes: jaxlm plan counts with bfloat16" * planned.wider
    settings = f"microbatch {planned.microbatch}, remat {planned.remat}{wider}"
    return f"a step needs {gigabytes(planned.step)} GB a device by the plan ({settings})"


def _mend(planned: Need) -> str:
    less = "train.microbatch_size=-1 and model.remat=auto choose what fits; " * (planned.remat != "full")
    return f"{less}or end what holds the rest, or split the model by mesh.fsdp"


def allocatable(wanted: int, allocate: Callable[[int], jax.Array]) -> int:
    """Returns how many bytes could be allocated, up to `wanted`, in growing chunks. Frees them again.

    Args:
      wanted: the bytes that the plan needs.
      allocate: bytes -> an array of them; raises JAX's RESOURCE_EXHAUSTED if there is no room.
    """
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
    """Returns `count` zero bytes that really lie on the device."""
    return jax.block_until_ready(jnp.zeros(count, jnp.uint8, device=device))


def host_memory(planned: Need, free: int) -> Finding:
    """Returns a finding on the host's `free` bytes: a save copies the state there first, and offloaded state lives there."""
    share = planned.checkpoint // jax.process_count()
    needed = share + planned.offloaded * jax.local_device_count()
    figures = {"need_bytes": needed, "free_bytes": free}
    text = f"a save holds {size(share)} of the host's memory for a while; {size(free)} are free"
    if needed > free:
        return Finding("host", FAIL, f"{text}: the first save would end the run; take a machine with more", figures)
    return Finding("host", WARN if needed > 0.8 * free else OK, text, figures)
