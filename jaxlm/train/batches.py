"""Puts the data loader's batches on the mesh."""

from collections.abc import Iterator

import jax
import numpy as np
from jax.sharding import Mesh

from jaxlm import sharding
from jaxlm.objectives.base import Batch
from jaxlm.step.state import TrainState


class LoaderBatches:
    """Gives the train loop the loader's batches, placed on the mesh.

    Args:
      loader: yields this process's rows (`sharding.local_rows`) of successive steps. `close` closes it.
      shapes: the shapes of a global batch with their shardings (`Parts.batch`).
    """

    def __init__(self, loader: Iterator[dict[str, np.ndarray]], mesh: Mesh, shapes: dict[str, jax.ShapeDtypeStruct]):
        self._loader, self._mesh = loader, mesh
        (self._batch_size,) = {shape.shape[0] for shape in shapes.values()}
        self._shardings = {name: shape.sharding for name, shape in shapes.items()}

    def __call__(self, state: TrainState) -> Batch:
        del state  # the loader counts its own steps
        return sharding.to_global(next(self._loader), self._mesh, self._batch_size, self._shardings)

    def close(self) -> None:
        """Stops the loader's threads and workers."""
        self._loader.close()
