"""Compiles the real train step from shapes alone, for devices that may be absent; measures memory, needed and available.

With JAX's CUDA plugin (`pip install -e ".[cuda12]"`; no GPU is needed), XLA's GPU compiler compiles the step for H100s. Else
the step is compiled for fake CPU devices, in float32: the memory of that program says little about a GPU.
"""

import contextlib
import dataclasses
import functools
import math
import pathlib
import re
import time
import typing
from collections.abc import Callable, Sequence

import jax
from jax.experimental import multihost_utils, topologies
from jax.sharding import AbstractMesh, Mesh

from jaxlm.config import Config, ConfigError, MeshConfig, RunError
from jaxlm.devices import sharding, tree
from jaxlm.host import files
from jaxlm.models import adapters
from jaxlm.plan.flops import trained_rows
from jaxlm.step import parts
from jaxlm.step.objectives import dpo, lm, policy, reward

# Program -> the function that makes its objective.
OBJECTIVES = {"reward": reward.make, "dpo": dpo.make}
OBJECTIVES |= dict.fromkeys(("pretrain", "sft"), lm.make) | dict.fromkeys(("ppo", "grpo"), policy.make)
LARGE = 1_000_000  # elements; a parameter with more should not be whole on every device of a mesh with fsdp
# Options of XLA's CPU compiler: compile fast and optimise little. The code is slow, but takes the same memory.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
# What XLA must know about an absent H100: openxla/xla's gpu_device_info of the SXM card, with figures of its data sheet and
# of CUDA's properties.
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

Options = dict[str, int | bool] | None
MakeParts = Callable[[Config, Mesh | AbstractMesh], parts.Parts]


def parts_of(config: Config, mesh: Mesh | AbstractMesh) -> parts.Parts:
    """Returns the training's parts from the config alone. The last ids stand for the tokens whose rows are trained apart."""
    size = config.model.vocab_size
    rows = tuple(range(size - trained_rows(config.adapter), size))
    adapter = adapters.of(config.adapter, rows)
    faster = rows if adapter is None and config.program != "pretrain" else ()
    return parts.make(config, mesh, OBJECTIVES[config.program], adapter, faster)


@dataclasses.dataclass(frozen=True)
class Placement:
    """How a leaf of a tree of shapes is sharded. `elements`: on each device."""

    name: str
    leaf: jax.ShapeDtypeStruct
    sharding: jax.sharding.Sharding

    @functools.cached_property
    def elements(self) -> int:
        return math.prod(self.sharding.shard_shape(self.leaf.shape))

    @property
    def bytes(self) -> int:
        return self.elements * self.leaf.dtype.itemsize


def placements(abstract: typing.Any, shardings: typing.Any) -> list[Placement]:
    leaves = zip(tree.named_leaves(abstract), jax.tree.leaves(shardings), strict=True)
    return [Placement(name, leaf, placed) for (name, leaf), placed in leaves]


def memory_of(compiled: jax.stages.Compiled) -> int:
    """Returns the bytes that a compiled step needs on each device: more than XLA's own `peak_memory_in_bytes` says."""
    m = compiled.memory_analysis()
    return m.argument_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes + m.temp_size_in_bytes


def averages(config: Config) -> bool:
    """True if a moving average of the weights lies on the devices, beside what the step takes."""
    return bool(config.checkpoint.average) and not config.optim.offload


def beside(made: parts.Parts) -> int:
    """Returns the bytes on each device that no step takes: those of the weights' moving average."""
    trained = placements(made.abstract.params, made.shardings.params)
    return 4 * sum(row.elements for row in trained) * averages(made.config)


def compile_parts(made: parts.Parts, options: Options = None) -> tuple[jax.stages.Compiled, int] | tuple[None, None]:
    """Returns (the compiled step, the bytes that it needs on a device); (None, None) if the compiler can't place it."""
    try:
        compiled = made.lower().compile(compiler_options=options)
    except RuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return None, None
    return compiled, memory_of(compiled) + beside(made)


@dataclasses.dataclass(frozen=True)
class Target:
    """The devices to compile for, which may be absent; `name` is what users are shown."""

    platform: str
    name: str
    devices: Sequence[jax.Device]
    options: Options


def target(devices: int, hosts: int) -> Target:
    """Returns H100s if JAX's CUDA plugin is installed, else fake CPU devices. Call it before JAX starts its devices."""
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", devices)
    with contextlib.suppress(NotImplementedError, RuntimeError):
        shape = f"1x{hosts}x{-(-devices // hosts)}"
        absent = topologies.get_topology_desc(platform="cuda", target_config=_H100, topology=shape).devices
        # Autotuning would need the GPU itself.
        return Target("gpu", f"{devices} x H100", absent[:devices], {"xla_gpu_autotune_level": 0})
    cpus = jax.devices("cpu")
    if len(cpus) < devices:
        raise ConfigError(f"JAX has begun with {len(cpus)} CPU devices, the mesh needs {devices}: use a new process")
    return Target("cpu", f"{devices} fake CPU devices", cpus[:devices], QUICK)


def compile_step(config: Config, shape: MeshConfig, target: Target) -> dict:
    """Compiles the step for a target's platform, and returns its memory, sharding and collectives, for `jaxlm plan`."""
    start = time.monotonic()
    mesh = sharding.make_mesh(shape, target.devices)
    made = parts_of(config, mesh)
    program = made.lower().compile(compiler_options=target.options)
    rows = placements(
        tree.merge(made.frozen | made.abstract.params), tree.merge(made.frozen_shardings | made.shardings.params)
    )
    note = "" if target.platform == "gpu" else "XLA's program for CPUs in float32, not a GPU's"
    if config.optim.offload or config.model.offload:
        note = "as if nothing were offloaded: JAX knows no host memory of absent devices"
    whole = {row.name: row.leaf.size for row in rows if row.leaf.size == row.elements > LARGE}
    largest = max(whole, key=whole.__getitem__, default=None)
    return {
        "target": target.name,
        "dtype": config.model.dtype,
        "microbatch": config.train.microbatch_size,
        "seconds": time.monotonic() - start,
        "memory": memory_of(program) + beside(made),
        "memory_note": note,
        "parameters_per_device": sum(row.elements for row in rows),
        "replicated": len(whole),
        "largest_replicated": largest and {"name": largest, "elements": whole[largest]},
        "collectives": collectives_by_kind(program.as_text()),
    }


@dataclasses.dataclass(frozen=True)
class Room:
    """The available memory of each device, and words for the user on where it is."""

    bytes: float
    of: str


def of_devices(memory_gb: float) -> Room | None:
    """Returns each device's memory: `memory_gb` if given, else the least of all processes; None if it is unknown."""
    if memory_gb:
        return Room(memory_gb * 1e9, "by config.tune.memory_gb")
    device, alone = jax.local_devices()[0], jax.device_count() == 1
    least = -1.0  # unknown
    if device.platform == "cpu":
        of = "free on this machine" if alone else "free for each device"
        with contextlib.suppress(OSError):
            least = available_bytes() / jax.local_device_count()
    else:
        of = "on the device" if alone else "on each device"
        least = float((device.memory_stats() or {}).get("bytes_limit", least))
    if jax.process_count() > 1:
        least = float(multihost_utils.process_allgather(least).min())
    return None if least < 0 else Room(least, of)


def refusal(words: str, platform: str, memory_gb: float, begun: bool) -> ConfigError | RunError:
    """Returns the error for a step that does not fit: RunError if the run has begun and the host may free memory later."""
    if platform != "cpu" or memory_gb:
        return ConfigError(words)
    words += "; if there is more memory (swap, caches), say how much by --config.tune.memory_gb=GB"
    return (RunError if begun else ConfigError)(words)


def available_bytes(root: pathlib.Path = files.ROOT) -> int:
    """Returns how much of the host's memory this process may still take. Raises OSError without /proc (macOS)."""
    lines = (root / "proc/meminfo").read_text().splitlines()
    available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    return min([available, *_left_by_cgroups(root)])


def _left_by_cgroups(root: pathlib.Path) -> list[int]:
    """Returns the bytes that each cgroup's limit leaves to this process; page cache that can be dropped counts as free."""
    left = []
    for folder, first_version in files.cgroups("memory", root):
        limit, used = ("limit_in_bytes", "usage_in_bytes") if first_version else ("max", "current")
        with contextlib.suppress(OSError, ValueError):  # "max" = no limit
            most, now = (int((folder / f"memory.{name}").read_text()) for name in (limit, used))
            stats = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            left.append(most - now + int(stats.get("inactive_file", stats.get("total_inactive_file", 0))))
    return left


KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")

_BYTES = {"pred": 1, "s4": 0.5, "u4": 0.5, "c64": 8, "c128": 16, "bf16": 2}
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?(?P<name>[\w.\-]+) \(.*\{\s*(?:/\*.*)?$")
_COLLECTIVE = re.compile(rf" = (?P<shape>.*?) (?P<kind>{'|'.join(KINDS)})(?P<start>-start)?\(")
_ARRAY = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,]*)\]")
_CALLED = re.compile(r"(?:body|condition|calls|to_apply)=%?([\w.\-]+)")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective operation, as one device sees it.

    Attributes:
      bytes: the size of its input or its result on one device, whichever is larger.
      group: the number of devices that take part together.
      name: the model's operation that it comes from (`op_name`).
      turns: how often it runs in one step; a loop of unknown length counts as one turn.
    """

    kind: str
    bytes: int
    group: int
    shapes: tuple[str, ...]
    in_loop: bool
    name: str
    turns: int = 1


def collectives(compiled_text: str) -> list[Collective]:
    """Returns the collectives of an optimised HLO module, in the order of the text, without those within one device."""
    head, turns = compiled_text.partition("\n")[0], _turns(compiled_text)
    devices = math.prod(map(int, re.findall(r"(?:num_partitions|replica_count)=(\d+)", head)))
    sent, computation = [], ""
    for line in compiled_text.splitlines():
        if head := _COMPUTATION.match(line):
            computation = head["name"]
        if not (match := _COLLECTIVE.search(line)):
            continue
        group = _group(line, match["kind"], devices)
        arrays = _ARRAY.findall(match["shape"])
        if match["start"] and match["kind"] == "all-gather":
            arrays = arrays[len(arrays) // 2 :]  # an asynchronous one returns (inputs, results)
        elif match["start"] and match["kind"] == "collective-permute":
            arrays = arrays[1:2]  # (input, result), and two counters before jaxlib 0.5
        size = sum(_size(*array) for array in arrays) * (group if match["kind"] == "reduce-scatter" else 1)
        shapes = tuple(f"{dtype}[{shape}]" for dtype, shape in arrays)
        name = re.search(r'op_name="([^"]*)"', line)
        if group > 1:
            times, in_loop = turns.get(computation, (1, False))
            sent.append(Collective(match["kind"], int(size), group, shapes, in_loop, name[1] if name else "", times))
    return sent


def collectives_by_kind(compiled_text: str) -> list[dict[str, str | int]]:
    """Returns a dict for each kind of collective in a step: `kind`, `times` and `bytes`, summed over the step."""
    sent = collectives(compiled_text)
    return [
        {"kind": kind, "times": sum(c.turns for c in same), "bytes": sum(c.turns * c.bytes for c in same)}
        for kind in KINDS
        if (same := [c for c in sent if c.kind == kind])
    ]


def _size(dtype: str, shape: str) -> float:
    bits = re.search(r"\d+", dtype)
    width = _BYTES.get(dtype) or (int(bits[0]) / 8 if bits else 0)
    return width * math.prod(int(n) for n in shape.split(",") if n)


def _group(line: str, kind: str, devices: int) -> int:
    """Returns a group's size; replica_groups={{0,1},{2,3}}, [groups,size]<=[...], mesh['a'=4,'b'=2] {'b'}; {}: all devices."""
    if kind == "collective-permute":
        return 2 if re.search(r"source_target_pairs=\{\{", line) else 1
    if iota := re.search(r"replica_groups=\[(\d+),(\d+)\]", line):
        return int(iota[2])
    if named := re.search(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(.*?\))? ?\{([^}]*)\}", line):
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", named[1]))
        used = re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", named[2])  # 'b':(2)4 is a part of axis b, of size 4
        return math.prod(int(part or sizes[axis]) for axis, part in used)
    if listed := re.search(r"replica_groups=\{\{([\d,]*)\}", line):
        return len(listed[1].split(","))
    if "replica_groups={}" in line or "replica_groups=" not in line:
        return devices
    raise ValueError(f"unknown groups of devices in {line.strip()[:200]}")


def _turns(text: str) -> dict[str, tuple[int, bool]]:
    """Returns computation -> (its runs a step: the product of the lengths of the loops around it, True if it is in a loop)."""
    calls: dict[str, list[tuple[str, int, bool]]] = {}
    entry, computation = "", ""
    for line in text.splitlines():
        if head := _COMPUTATION.match(line):
            computation = head["name"]
            entry = computation if line.startswith("ENTRY") else entry
        length = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', line) if " while(" in line else None
        for name in _CALLED.findall(line):
            calls.setdefault(computation, []).append((name, int(length[1]) if length else 1, " while(" in line))
    reached: dict[str, tuple[int, bool]] = {}
    ahead = [(entry, 1, False)]
    while ahead:
        name, times, looped = ahead.pop()
        before = reached.get(name, (0, False))
        reached[name] = (before[0] + times, before[1] or looped)
        ahead += [(called, times * n, looped or loop) for called, n, loop in calls.get(name, ())]
    return reached
