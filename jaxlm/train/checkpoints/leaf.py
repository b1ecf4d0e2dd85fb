"""Reads one array of a checkpoint at a time, on the host, so that no more than one is ever in memory."""

import pathlib
from collections.abc import Callable

import numpy as np

from jaxlm.files import plain_path
from jaxlm.train.checkpoints import digest, restore, verify
from jaxlm.train.checkpoints.damage import CorruptCheckpointError, reading

Reader = Callable[[str], np.ndarray]


def reader(folder: pathlib.Path, item: str = "params") -> Reader:
    """Returns a function that reads a parameter of a checkpoint by its name, `layers_0/attn/q/kernel`.

    It raises CorruptCheckpointError if the array is not what was saved, RunError if it can't be read.

    Args:
      folder: the checkpoint's folder, `checkpoints/<step>`.
      item: the collection that holds the parameter.
    """
    digests: dict[str, int] = {}

    def read(name: str) -> np.ndarray:
        if not digests:
            digests.update(restore.read_meta(folder)["digests"])
        step = int(folder.name)
        with reading(step), plain_path(folder) as plain:
            value = np.asarray(verify.open_array(plain, f"{item}/{name}").result().read().result())
        if digest.of_piece(value, (0,) * value.ndim, value.shape) != digests.get(f"{item}/{name}"):
            raise CorruptCheckpointError(f"checkpoint {step} is damaged: {item}/{name} is not what was saved")
        return value

    return read
