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

from jaxlm.host.console import size
from jaxlm.plan.doctor.findings import FAIL, OK, WARN, Finding

OLDEST_YEAR, NEWEST_YEAR = 2025, 2100
MOST_DRIFT_S = 0.5  # of the wall clock against the monotonic one, while the doctor runs
MOST_SKEW_S = 2.0  # between two hosts
SHM_BYTES = 1e9  # of /dev/shm, by which NCCL connects the GPUs of one host
_CPU_BYTES, _BYTES = 8 << 20, 256 << 20  # of each device, to sum over all of them
_ALONE = "one process: no other clock to agree with"


def now() -> tuple[float, float]:
    """Returns the wall clock (Unix seconds) and the monotonic one."""
    return time.time(), time.monotonic()


def clock(began: tuple[float, float], ended: tuple[float, float], at_hosts: list[float] | None = None) -> Finding:
    """Returns a finding on the clock.

    Args:
      began, ended: what `now` returned at two moments.
      at_hosts: the wall clocks of all processes at one moment; None if there is one process.
    """
    seconds = ended[1] - began[1]
    drift, skew = ended[0] - began[0] - seconds, max(at_hosts) - min(at_hosts) if at_hosts else 0.0
    year = datetime.datetime.fromtimestamp(ended[0], datetime.UTC).year
    mend, verdict = "set it by NTP (timedatectl set-ntp true)", WARN
    if not OLDEST_YEAR <= year <= NEWEST_YEAR:
        verdict, text = FAIL, f"it is {year} by the clock: certificates will be refused; {mend}"
    elif abs(drift) > MOST_DRIFT_S:
        text = f"the clock was moved by {drift:+.1f} s while the doctor ran: times and dollars will be off; {mend}"
    elif skew > MOST_SKEW_S:
        text = f"the hosts' clocks are {skew:.1f} s apart; {mend}"
    else:
        agree = f"{len(at_hosts)} processes agree to {skew:.2f} s" if at_hosts else _ALONE
        verdict, text = OK, f"{year}, drift {drift:+.3f} s; {agree}"
    return Finding("clock", verdict, text, {"year": year, "drift_s": drift, "skew_s": skew, "seconds": seconds})


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
    if wrong:
        text = f"a sum over {n} devices is wrong in {wrong} places: take another machine"
        return Finding("links", FAIL, text, figures)
    text = f"a sum of {size(bytes_each)} over {n} devices, {jax.process_count()} processes: {size(speed)}/s each"
    return Finding("links", OK, text, figures)


def shared_memory(folder: pathlib.Path = pathlib.Path("/dev/shm")) -> list[Finding]:
    """Returns a finding if /dev/shm is too small for the GPUs of this host to reach each other."""
    if jax.default_backend() != "gpu" or jax.local_device_count() == 1:
        return []
    total = shutil.disk_usage(folder).total
    if total >= SHM_BYTES:
        return []
    text = f"{folder} has {size(total)}: NCCL may fail; start the container with --ipc=host or --shm-size=8g"
    return [Finding("links", WARN, text, {"shm_bytes": total})]
