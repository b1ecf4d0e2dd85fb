"""Finds how much memory there is for a run: a device's own, or on a CPU what this machine and its cgroups leave."""

import contextlib
import dataclasses
import pathlib

import jax
from jax.experimental import multihost_utils

from jaxlm import files
from jaxlm.config import ConfigError, RunError

_FILES = ("memory.max", "memory.current")
_OLDER = ("memory.limit_in_bytes", "memory.usage_in_bytes")  # of cgroups version 1


@dataclasses.dataclass(frozen=True)
class Room:
    """Memory that there is.

    Attributes:
      bytes: for each device.
      of: whose it is, for the user.
    """

    bytes: float
    of: str


def of_devices(memory_gb: float) -> Room | None:
    """Returns the memory of each device, the least of all processes; None if this platform does not say it.

    Args:
      memory_gb: `config.tune.memory_gb`, which counts if it is not 0.
    """
    if memory_gb:
        return Room(memory_gb * 1e9, "by config.tune.memory_gb")
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        found = None
        with contextlib.suppress(OSError):
            found = available_bytes() / jax.local_device_count()
        of = "free on this machine" if jax.device_count() == 1 else "free for each device"
    else:
        found = (device.memory_stats() or {}).get("bytes_limit")
        of = "on the device" if jax.device_count() == 1 else "on each device"
    if jax.process_count() > 1:
        least = float(multihost_utils.process_allgather(-1.0 if found is None else float(found)).min())
        found = None if least < 0 else least
    return None if found is None else Room(float(found), of)


def refusal(words: str, platform: str, memory_gb: float, begun: bool) -> ConfigError | RunError:
    """Returns the error of a step that does not fit: what the same command meets again, or what may pass.

    A device has the same memory the next time. A machine may have more of it free then; so a run that has begun only
    failed.

    Args:
      words: what is wrong and how to mend it.
      platform: of the devices.
      memory_gb: `config.tune.memory_gb`: then the limit never changes.
      begun: True if the run has checkpoints.
    """
    if platform != "cpu" or memory_gb:
        return ConfigError(words)
    words += "; if more can be had (swap, caches), say how much by --config.tune.memory_gb=GB"
    return (RunError if begun else ConfigError)(words)


def available_bytes(root: pathlib.Path = files.ROOT) -> int:
    """Returns the bytes that this process may still take of the host's memory: MemAvailable, or what its cgroup leaves.

    Raises OSError where there is no /proc (macOS).
    """
    return min([proc_bytes(root / "proc/meminfo", "MemAvailable"), *_left_by_cgroups(root)])


def proc_bytes(path: pathlib.Path, name: str) -> int:
    """Returns a figure in a file of Linux's /proc, such as MemAvailable in /proc/meminfo, in bytes."""
    lines = path.read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def _left_by_cgroups(root: pathlib.Path) -> list[int]:
    """What each limit on this process's memory leaves; page cache that can be dropped counts as free."""
    left = []
    for place, older in files.cgroups("memory", root):
        limit, used = _OLDER if older else _FILES
        with contextlib.suppress(OSError, ValueError):  # "max" = no limit
            most, now = int((place / limit).read_text()), int((place / used).read_text())
            stats = dict(line.split() for line in (place / "memory.stat").read_text().splitlines())
            left.append(most - now + int(stats.get("inactive_file", stats.get("total_inactive_file", 0))))
    return left
