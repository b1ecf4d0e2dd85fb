"""What Linux's cgroups leave this process, in a container above all: its folders there, and how many cores it may use.

This module does not import JAX, because the worker processes of `jaxlm prepare` must not.
"""

import contextlib
import functools
import os
import pathlib
from collections.abc import Iterator

ROOT = pathlib.Path("/")


def folders(controller: str, root: pathlib.Path = ROOT) -> Iterator[tuple[pathlib.Path, bool]]:
    """Yields (folder, True if it is of version 1) of each group whose limits hold for this process, the innermost first.

    Yields nothing where there is no /proc (macOS).

    Args:
      controller: what is limited: "memory", "cpu".
    """
    try:
        groups = [line.split(":", 2) for line in (root / "proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return
    for _, controllers, where in groups:
        older = controller in controllers.split(",")
        if controllers and not older:
            continue
        base = root / "sys/fs/cgroup" / (controller if older else "")
        own = base / where.lstrip("/")
        for place in [own, *own.parents]:  # a limit further up holds too; in a container the path may not be seen
            if not place.is_relative_to(base):
                break
            yield place, older


@functools.cache
def threads() -> int:
    """Returns how many threads make batches, or encode texts: one a core of this process, at most four."""
    return min(4, cores())


def cores(root: pathlib.Path = ROOT) -> int:
    """Returns how many cores this process may keep busy: those it is bound to, or fewer by its cgroups' quota; at least 1."""
    found = [len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1]
    for place, older in folders("cpu", root):
        with contextlib.suppress(OSError, ValueError):  # "max" = no limit; in version 1 that is -1
            if older:
                quota, period = ((place / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            else:
                quota, period = (place / "cpu.max").read_text().split()
            if int(quota) > 0:
                found.append(max(1, int(quota) // int(period)))
    return min(found)
