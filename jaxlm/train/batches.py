"""Puts the data loader's batches on the mesh."""

import collections
import dataclasses
import logging
import time
from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import Mesh

from jaxlm.config import DataConfig
from jaxlm.data.batches.loader import TrainLoader
from jaxlm.data.batches.order import Order
from jaxlm.devices import sharding
from jaxlm.devices.processes import together
from jaxlm.run import clock
from jaxlm.step.objectives.base import Batch
from jaxlm.step.parts import Parts
from jaxlm.step.state import TrainState

_RESERVE = 2  # batches that a process trains on after its loader failed, until all processes agree to stop
AGREE_S = 5.0  # JAX tells the other processes in a thread: without a wait, fast steps would use up the reserve first


@dataclasses.dataclass(eq=False)
class LoaderBatches:
    """Gives the train loop the loader's batches, placed on the mesh.

    With several processes, a process whose loader fails must not leave the others waiting in a step. So each process keeps
    a reserve of batches on the host: when its loader fails, it calls `failed` and trains on the reserve until all processes
    agree to stop.

    Args:
      failed: called once with the loader's error, if there is a reserve.
      reserve: how many batches to hold back. With 0 the loader's error is raised at once.
    """

    activity, from_state = clock.DATA, False
    loader: TrainLoader
    mesh: Mesh
    shapes: dict[str, jax.ShapeDtypeStruct]
    failed: Callable[[Exception], object]
    reserve: int = 0

    def __post_init__(self):
        (self._batch_size,) = {shape.shape[0] for shape in self.shapes.values()}
        self._shardings = {name: shape.sharding for name, shape in self.shapes.items()}
        self._held: collections.deque[dict[str, np.ndarray]] = collections.deque()
        self._error: Exception | None = None

    def __call__(self, state: TrainState) -> Batch:
        """Returns the next batch. Raises the loader's error if no batch is left."""
        failed_before = self._error is not None
        self._read()
        if self._error is not None and self._held and not failed_before:
            self.failed(self._error)
            time.sleep(AGREE_S)
        if not self._held:
            raise self._error
        return sharding.to_global(self._held.popleft(), self.mesh, self._batch_size, self._shardings)

    def fill(self) -> None:
        """Reads the first batch and the reserve, so that a broken loader fails before the first step."""
        self._read()
        if self._error is not None:
            raise self._error

    def _read(self) -> None:
        while self._error is None and len(self._held) <= self.reserve:
            try:
                self._held.append(next(self.loader))
            except Exception as error:
                self._error = error

    def close(self) -> None:
        """Stops the loader's threads. Never raises: that would hide an error of the run."""
        try:
            self.loader.close()
        except Exception:
            logging.exception("the loader was not closed")


def read(
    order: Order,
    config: DataConfig,
    made: Parts,
    done: int,
    failed: Callable[[Exception], object],
    *,
    verify: bool = False,
) -> LoaderBatches:
    """Returns this process's rows of the batches from step `done` + 1 on; with several processes, with a reserve.

    `verify` compares all shards with the manifest in the background, the next steps' shards first. If a shard is damaged,
    the next batch raises DamagedData. One process with `verify` is enough: every process checks the shards that it reads.
    """
    options = {"row_indices": sharding.local_rows(made.mesh, order.batch_size), "start_step": done}
    loader = together(lambda: TrainLoader(order, **options, stall_seconds=config.timeout_s))
    if verify:
        order.data.verifier.begin(order.shards(done))
    return LoaderBatches(loader, made.mesh, made.batch(), failed, _RESERVE if jax.process_count() > 1 else 0)
