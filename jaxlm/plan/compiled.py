"""Compiles the real train step for absent devices, and reads how much each device holds and what it sends to others.

Only shapes are needed. If JAX's CUDA plugin is installed (`pip install "jaxlm[cuda12]"`; no GPU is needed), XLA's GPU
compiler compiles the step for H100s. Otherwise the step is compiled for the same number of fake CPU devices. That shows
how parameters are split and what is sent, but the memory is that of a CPU program in float32, which says little about a
GPU.
"""

import contextlib
import dataclasses
import math
import time
import typing
from collections.abc import Sequence

import jax
from jax.experimental import topologies

from jaxlm import sharding
from jaxlm.config import Config, ConfigError, MeshConfig
from jaxlm.plan import collectives, lower

LARGE = 1_000_000  # elements; a parameter with more should not be whole on every device of a mesh with fsdp

# What XLA asks about an H100 that is not there: openxla/xla's gpu_device_info of the SXM card, whose figures are those of
# its data sheet and of CUDA's properties.
_H100 = """
gpu_device_info {
  threads_per_block_limit: 1024  threads_per_warp: 32  shared_memory_per_block: 49152  shared_memory_per_core: 233472
  threads_per_core_limit: 2048  core_count: 132  fpus_per_core: 128  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535  block_dim_limit_z: 65535  memory_bandwidth: 3352320000000  l2_cache_size: 52428800
  clock_rate_ghz: 1.98  device_memory_size: 84929347584  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 }  registers_per_core_limit: 65536  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
runtime_version { major: 12 minor: 9 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


@dataclasses.dataclass(frozen=True)
class Target:
    """The devices to compile for, which may be absent.

    Attributes:
      platform: "gpu" or "cpu", as `models.hardware.for_platform` takes it.
      name: the name of the devices for users.
      devices: the devices, absent or fake.
      options: the compiler's options.
    """

    platform: str
    name: str
    devices: Sequence[jax.Device]
    options: dict[str, int | bool]


def target(devices: int, hosts: int) -> Target:
    """Returns H100s if JAX's CUDA plugin is installed, else fake CPU devices. Call it before JAX starts its devices.

    Raises:
      ConfigError: JAX has already started fewer CPU devices.
    """
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", devices)
    try:
        shape = f"1x{hosts}x{-(-devices // hosts)}"
        absent = topologies.get_topology_desc(platform="cuda", target_config=_H100, topology=shape).devices
        # Autotuning would need the GPU itself.
        return Target("gpu", f"{devices} x H100", absent[:devices], {"xla_gpu_autotune_level": 0})
    except (NotImplementedError, RuntimeError):
        pass
    found = jax.devices("cpu")
    if len(found) < devices:
        raise ConfigError(f"JAX has begun with {len(found)} CPU devices, the mesh needs {devices}: use a new process")
    return Target("cpu", f"{devices} fake CPU devices", found[:devices], lower.QUICK)


def compile_step(config: Config, mesh: MeshConfig, target: Target) -> dict[str, typing.Any]:
    """Compiles the step and reads the program.

    Args:
      config: the config, with the dtype and the attention of the target's platform, and a microbatch that the mesh
        divides.
      mesh: the sizes of the mesh's axes.
      target: the devices.

    Returns:
      A dict. target, dtype, microbatch: as given. seconds: the time of compiling. memory: the bytes on each device.
        memory_note: what to know of these bytes. parameters_per_device: the number of parameters' elements on each
        device. replicated: how many parameters over LARGE every device holds whole, and the largest of them.
        collectives: kind, times and bytes a step.
    """
    start = time.monotonic()
    real = sharding.make_mesh(mesh, target.devices)
    lowered, rows = lower.lower_step(config, real)
    program = lowered.compile(compiler_options=target.options or None)
    note = "" if target.platform == "gpu" else "XLA's program for CPUs in float32, not a GPU's"
    if config.optim.offload or config.model.offload:
        note = "as if nothing were offloaded: JAX knows no host memory of devices that are not there"
    whole = [row for row in rows if row.replicated and math.prod(row.shape) > LARGE]
    largest = max(whole, key=lambda row: math.prod(row.shape), default=None)
    return {
        "target": target.name,
        "dtype": config.model.dtype,
        "microbatch": config.train.microbatch_size,
        "seconds": time.monotonic() - start,
        "memory": lower.memory_of(program),
        "memory_note": note,
        "parameters_per_device": sum(row.per_device for row in rows),
        "replicated": len(whole),
        "largest_replicated": largest and {"name": largest.name, "elements": math.prod(largest.shape)},
        "collectives": _by_kind(program.as_text()),
    }


def _by_kind(text: str) -> list[dict[str, str | int]]:
    """The collectives in the text of a compiled program, added up by kind."""
    found = collectives.read(text)
    rows = []
    for kind in collectives.KINDS:
        of_kind = [c for c in found if c.kind == kind]
        if of_kind:
            times, size = sum(c.turns for c in of_kind), sum(c.turns * c.bytes for c in of_kind)
            rows.append({"kind": kind, "times": times, "bytes": size})
    return rows
