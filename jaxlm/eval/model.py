"""The model of a run, on the devices of this machine: to sample from, or to judge texts with."""

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
    """A checkpoint on the devices of this machine; `params` is the collection of that name."""

    config: Config
    mesh: Mesh
    model: Transformer
    params: dict
    data: shards.DataDir
    step: int


def restore(config: Config, checkpoint: str) -> Restored:
    """The model of `config.workdir` at a checkpoint ("latest", "best" or a step).

    Raises ConfigError when there is none, RunError when it is damaged.
    """
    found = origin.open(config.workdir, checkpoint)
    check_same_model(pathlib.Path(config.workdir), config.model)
    # A mesh of its own: the one that trained may need more devices than there are here.
    config = dataclasses.replace(config, mesh=MeshConfig(data=1, fsdp=-1, tensor=1, context=1))
    mesh = processes.start(config.hardware, config.distributed, config.mesh, config.model.dtype)
    settled = hardware.for_platform(config.model, jax.devices()[0].platform)
    # Nothing is differentiated here; and a run's `auto` was settled for its training alone.
    config = dataclasses.replace(config, model=dataclasses.replace(settled, remat="none", offload=False))
    data = shards.open_data(config.data.dir)
    model = models.build(config.model, config.model.attention)
    abstract = models.abstract_params(model)
    params = found.params(abstract, sharding.tree_shardings(abstract, models.logical_axes(model), mesh))
    return Restored(config, mesh, model, params, data, int(found.provenance["step"]))
