"""Restores the model of a run on this machine's devices, to sample from it or to score texts."""

import dataclasses
import pathlib

import jax
from jax.sharding import Mesh

from jaxlm import models, processes, sharding
from jaxlm.config import Config, MeshConfig
from jaxlm.data import shards
from jaxlm.models import hardware
from jaxlm.models.transformer import Transformer
from jaxlm.train import origin
from jaxlm.train.workdir import check_same_model


@dataclasses.dataclass(frozen=True)
class Restored:
    """The model of a checkpoint, on this machine's devices.

    Attributes:
      config: of the run, with attention and dtype settled for this machine.
      mesh: all devices, over fsdp.
      model, params: the model and its parameters.
      data: what the run was trained on.
      step: of the checkpoint.
    """

    config: Config
    mesh: Mesh
    model: Transformer
    params: dict
    data: shards.DataDir
    step: int


def restore(config: Config, checkpoint: str) -> Restored:
    """Restores the model of `config.workdir` from a checkpoint ("latest", "best" or a step).

    Raises ConfigError if there is no such checkpoint, RunError if it is damaged.
    """
    found = origin.open(config.workdir, checkpoint)
    check_same_model(pathlib.Path(config.workdir), config.model)
    # A new mesh, since the run's own may need more devices than there are here.
    config = dataclasses.replace(config, mesh=MeshConfig(data=1, fsdp=-1, tensor=1, context=1))
    mesh = processes.start(config.hardware, config.distributed, config.mesh, config.model.dtype)
    settled = hardware.for_platform(config.model, jax.devices()[0].platform)
    # Without gradients there is nothing to recompute or offload.
    config = dataclasses.replace(config, model=dataclasses.replace(settled, remat="none", offload=False))
    data = shards.open_data(config.data.dir)
    model = models.build(config.model, config.model.attention)
    abstract = models.abstract_params(model)
    params = found.params(abstract, sharding.tree_shardings(abstract, models.logical_axes(model), mesh))
    return Restored(config, mesh, model, params, data, int(found.provenance["step"]))
