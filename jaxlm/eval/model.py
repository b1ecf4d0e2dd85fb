"""Restores the model of a run on this machine's devices, to sample from it or to score texts."""

import dataclasses
import pathlib

import jax
from jax.sharding import Mesh

from jaxlm import models, processes, sharding
from jaxlm.config import DataConfig, DistributedConfig, HardwareConfig, MeshConfig, ModelConfig
from jaxlm.data import shards
from jaxlm.models import hardware
from jaxlm.models.transformer import Transformer
from jaxlm.train import origin
from jaxlm.train.workdir import check_same_model


@dataclasses.dataclass(frozen=True)
class Restored:
    """A run's model, restored from a checkpoint onto this machine's devices.

    Attributes:
      mesh: the mesh, with all devices on the axis fsdp.
      model, params: the model and its parameters.
      data: the data that the run was trained on.
      step: the training step at which the checkpoint was saved.
    """

    mesh: Mesh
    model: Transformer
    params: dict
    data: shards.DataDir
    step: int


def restore(
    workdir: str,
    checkpoint: str,
    config: ModelConfig,
    data: DataConfig,
    hardware_config: HardwareConfig,
    distributed: DistributedConfig,
) -> Restored:
    """Restores the model of a run from a checkpoint ("latest", "best" or a step).

    Args:
      config: the config of the model; "auto" is replaced by what suits this machine.
      data, hardware_config, distributed: the run's sections of these names.

    Raises:
      ConfigError: there is no such checkpoint.
      RunError: the checkpoint is damaged.
    """
    found = origin.open(workdir, checkpoint)
    check_same_model(pathlib.Path(workdir), config)
    # A new mesh, since the run's own may need more devices than there are here.
    all_devices = MeshConfig(data=1, fsdp=-1, tensor=1, context=1)
    mesh = processes.start(hardware_config, distributed, all_devices, config.dtype)
    settled = hardware.for_platform(config, jax.devices()[0].platform)
    # Without gradients there is nothing to recompute or offload.
    settled = dataclasses.replace(settled, remat="none", offload=False)
    opened = shards.open_data(data.dir)
    model = models.build(settled, settled.attention)
    abstract = models.abstract_params(model)
    params = found.params(abstract, sharding.tree_shardings(abstract, models.logical_axes(model), mesh))
    return Restored(mesh, model, params, opened, int(found.provenance["step"]))
