"""Checks that the loader delivers batches faster than the step takes them."""

import pathlib
import threading
import time

from jax.sharding import Mesh

from jaxlm import sharding
from jaxlm.config import Config, ConfigError
from jaxlm.console import human
from jaxlm.data import loader
from jaxlm.data.open import open_order
from jaxlm.data.shards import MANIFEST
from jaxlm.train.doctor.findings import FAIL, OK, WARN, Finding

SECONDS = 3.0  # of timing
STALL_S = 20.0  # for one batch
MARGIN = 1.5  # the loader should be this much faster than the step


def check(config: Config, mesh: Mesh, needed: float, certain: bool) -> Finding:
    """Returns a finding on the tokens per second of the real loader on the run's own data.

    Args:
      needed: the tokens per second that the step takes, or at most can take.
      certain: True if `needed` was measured with this model; False if it is an upper bound.
    """
    d = config.data
    if not data_exists(d.dir):  # of which the finding "data" says whether it can be made
        return Finding("loader", OK, "not timed: there is no data yet")
    try:
        order = open_order(config)
    except ConfigError as error:
        return Finding("loader", FAIL, str(error))
    local = sharding.local_rows(mesh, order.batch_size)
    source = loader.TrainLoader(order, row_indices=local, stall_seconds=min(d.timeout_s, STALL_S))
    try:
        batches = rate(source, 8)
    finally:
        closing = threading.Thread(target=source.close, daemon=True)  # beside: workers may be slow to end
        closing.start()
        closing.join(5)
    speed = batches * order.batch_size * order.seq_len
    figures = {"tokens_per_second": speed, "batches_per_second": batches, "needed": needed, "certain": certain}
    takes = f"the step takes {'' if certain else 'at most '}{human(needed)}"
    text = f"{human(batches)} batches/s = {human(speed)} tokens/s; {takes}"
    if speed < needed * (MARGIN if certain else 1):
        return Finding("loader", WARN, f"{text}: the loader may set the speed", figures)
    return Finding("loader", OK, text, figures)


def rate(source: loader.TrainLoader, ahead: int) -> float:
    """Returns batches per second over SECONDS, those left out that were made `ahead` while nobody asked."""
    next(source)
    moments = [time.perf_counter()]
    while moments[-1] - moments[0] < SECONDS:
        next(source)
        moments.append(time.perf_counter())
    first = ahead if len(moments) > 3 * ahead else 0
    return (len(moments) - 1 - first) / (moments[-1] - moments[first])


def data_exists(folder: str) -> bool:
    """Returns True if there is something where the data should be."""
    return bool(folder) and (pathlib.Path(folder) / MANIFEST).exists()
