"""Puts the data loader's batches on the mesh."""

from collections.abc import Iterator

import numpy as np
from jax.sharding import Mesh

from jaxlm import sharding
from jaxlm.objectives.base import Batch
from jaxlm.step.state import TrainState


class LoaderBatches:
    """Gives the train loop the loader's batches, placed on the mesh.

    Args:
      loader: yields this process's rows (`sharding.local_rows`) of successive steps. `close` closes it.
      batch_size: the number of rows of the global batch.
    """

    def __init__(self, loader: Iterator[dict[str, np.ndarray]], mesh: Mesh, batch_size: int):
        self._loader, self._mesh, self._batch_size = loader, mesh, batch_size

    def __call__(self, state: TrainState) -> Batch:
        del state  # the loader counts its own steps
        return sharding.to_global(next(self._loader), self._mesh, self._batch_size)

    def close(self) -> None:
        """Stops the loader's threads and workers."""
        self._loader.close()
