"""Checks the clock, and the links between devices and hosts."""

import datetime
import pathlib
import shutil
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxlm.console import size
from jaxlm.train.doctor.findings import FAIL, OK, WARN, Finding

OLDEST_YEAR, NEWEST_YEAR = 2025, 2100
MOST_DRIFT_S = 0.5  # of the wall clock against the monotonic one, while the doctor runs
MOST_SKEW_S = 2.0  # between two hosts
SHM_BYTES = 1e9  # of /dev/shm, by which NCCL connects the GPUs of one host
_BYTES_A_DEVICE = {"cpu": 8 << 20}  # to sum over all devices; else:
_MANY_BYTES = 256 << 20


def now() -> tuple[float, float]:
    """Returns the wall clock (Unix seconds) and the monotonic one."""
    return time.time(), time.monotonic()


def clock(began: tuple[float, float], ended: tuple[float, float], at_hosts: list[float] | None = None) -> Finding:
    """Returns a finding on the clock.

    Args:
      began, ended: what `now` returned at two moments.
      at_hosts: the wall clocks of all processes at one moment; None if there is one process.
    """
    drift = (ended[0] - began[0]) - (ended[1] - began[1])
    skew = max(at_hosts) - min(at_hosts) if at_hosts else 0.0
    year = datetime.datetime.fromtimestamp(ended[0], datetime.UTC).year
    figures = {"year": year, "drift_s": drift, "skew_s": skew, "seconds": ended[1] - began[1]}
    mend = "set it by NTP (timedatectl set-ntp true)"
    if not OLDEST_YEAR <= year <= NEWEST_YEAR:
        return Finding("clock", FAIL, f"it is {year} by the clock: certificates will be refused; {mend}", figures)
    if abs(drift) > MOST_DRIFT_S:
        text = f"the clock was moved by {drift:+.1f} s while the doctor ran: times and dollars will be off; {mend}"
        return Finding("clock", WARN, text, figures)
    if skew > MOST_SKEW_S:
        return Finding("clock", WARN, f"the hosts' clocks are {skew:.1f} s apart; {mend}", figures)
    several = (
        f"{len(at_hosts)} processes agree to {skew:.2f} s" if at_hosts else "one process: no other clock to agree with"
    )
    return Finding("clock", OK, f"{year}, drift {drift:+.3f} s; {several}", figures)


def clocks() -> list[float] | None:
    """Returns the wall clocks of all processes at about one moment; None if there is one process."""
    if jax.process_count() == 1:
        return None
    multihost_utils.sync_global_devices("doctor's clock")
    # As two numbers: JAX would round Unix seconds in float64 to float32, which is minutes.
    whole, part = divmod(time.time(), 1)
    rows = multihost_utils.process_allgather(np.array([int(whole), int(part * 1e6)], np.int32))
    return [float(row[0]) + float(row[1]) / 1e6 for row in rows]


def links(mesh: Mesh) -> Finding:
    """Returns a finding on a sum over all devices: that it is right, and how fast."""
    n = mesh.size
    if n == 1:
        return Finding("links", OK, "one device: nothing to check")
    platform = jax.devices()[0].platform
    count = _BYTES_A_DEVICE.get(platform, _MANY_BYTES) // 4
    split = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    numbers_N = jax.make_array_from_callback((n,), split, lambda at: np.arange(1, n + 1, dtype=np.float32)[at])
    fill = jax.jit(lambda x_N: jnp.broadcast_to(x_N[:, None], (n, count)), out_shardings=split)
    add = jax.jit(lambda x_NxC: x_NxC.sum(0), out_shardings=NamedSharding(mesh, PartitionSpec()))
    x_NxC = fill(numbers_N)
    sum_C = jax.block_until_ready(add(x_NxC))
    began = time.perf_counter()
    for _ in range(3):
        sum_C = jax.block_until_ready(add(x_NxC))
    seconds = (time.perf_counter() - began) / 3
    wrong = int((sum_C != n * (n + 1) / 2).sum())
    speed = 2 * (n - 1) / n * 4 * count / seconds  # what a ring moves through each link
    figures = {"devices": n, "bytes": 4 * count, "seconds": seconds, "bytes_per_second": speed, "wrong": wrong}
    if wrong:
        return Finding(
            "links", FAIL, f"a sum over {n} devices is wrong in {wrong} places: take another machine", figures
        )
    text = f"a sum of {size(4 * count)} over {n} devices, {jax.process_count()} processes: {size(speed)}/s each"
    return Finding("links", OK, text, figures)


def shared_memory(folder: pathlib.Path = pathlib.Path("/dev/shm")) -> Finding | None:
    """Returns a finding if /dev/shm is too small for the GPUs of this host to reach each other; None if all is well."""
    if jax.default_backend() != "gpu" or jax.local_device_count() == 1:
        return None
    room = shutil.disk_usage(folder).total
    if room >= SHM_BYTES:
        return None
    text = f"{folder} has {size(room)}: NCCL may fail; start the container with --ipc=host or --shm-size=8g"
    return Finding("links", WARN, text, {"shm_bytes": room})
