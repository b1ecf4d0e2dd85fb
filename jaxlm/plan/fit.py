"""Finds what fits into the memory of a device: the largest microbatch, and changes that make a config fit."""

import dataclasses
import math

from jaxlm import sharding
from jaxlm.config import Config, ConfigError, MeshConfig, nearest
from jaxlm.plan.memory import KEPT, Estimator, Memory, abstract_mesh

MOST_DEVICES = 256  # `fewest` looks no further for a model that one device can't hold
MOST_PLANNED = 4096  # devices in config.plan.mesh
ONE_DEVICE = MeshConfig(**{field.name: 1 for field in dataclasses.fields(MeshConfig)})


@dataclasses.dataclass(frozen=True)
class Fit:
    """A way to run a config, and the memory that it takes.

    Attributes:
      devices: the number of devices.
      optimizer: the value of `optim.name`.
      remat: the value of `model.remat`.
      microbatch: the rows of a microbatch, over all devices.
      memory: the memory of each device that it takes.
    """

    devices: int
    optimizer: str
    remat: str
    microbatch: int
    memory: Memory


def parse_mesh(text: str) -> MeshConfig:
    """Returns the mesh that a text such as `fsdp:64` or `data:4,fsdp:8` describes. Other axes have size 1.

    Raises:
      ConfigError: an axis is unknown or named twice, or a size is not a positive whole number.
    """
    axes = [field.name for field in dataclasses.fields(MeshConfig)]
    sizes: dict[str, int] = {}
    for part in text.replace(" ", "").split(","):
        axis, colon, size = part.partition(":")
        given = f"config.plan.mesh={text!r}"
        if axis not in axes:
            raise ConfigError(f"{given}: no axis {axis!r}; {nearest(axis, axes)} (such as fsdp:64 or data:4,fsdp:8)")
        if not colon or not size.isascii() or not size.isdigit() or int(size) < 1:
            raise ConfigError(f"{given}: give {axis} a number of devices, such as {axis}:8")
        if axis in sizes:
            raise ConfigError(f"{given}: {axis} stands there twice")
        sizes[axis] = int(size)
    return MeshConfig(**{axis: sizes.get(axis, 1) for axis in axes})


def devices_of(mesh: MeshConfig) -> int:
    """Returns the number of devices of a mesh. No axis may be -1."""
    return math.prod(dataclasses.astuple(mesh))


def check_mesh(config: Config, mesh: MeshConfig) -> None:
    """Raises ConfigError if training would refuse the mesh, or if it has more than MOST_PLANNED devices."""
    if devices_of(mesh) > MOST_PLANNED:
        raise ConfigError(
            f"config.plan.mesh={config.plan.mesh!r} has {devices_of(mesh):,} devices, at most {MOST_PLANNED:,}"
        )
    abstract = abstract_mesh(mesh, devices_of(mesh))
    sharding.check_batch(abstract, **{"train.batch_size": config.train.batch_size})
    sharding.check_context(abstract, config.train.seq_len, config.model)
    sharding.check_tensor(abstract, config.model)
    if config.plan.hosts and devices_of(mesh) % config.plan.hosts:
        raise ConfigError(
            f"config.plan.hosts={config.plan.hosts} does not divide the {devices_of(mesh)} devices of config.plan.mesh"
        )


def own_microbatch(config: Config, mesh: MeshConfig) -> int:
    """Returns the rows of the config's own microbatch if the mesh divides them, else one row a device."""
    ways, own = mesh.data * mesh.fsdp, config.train.microbatch_size
    return own if own > 0 and own % ways == 0 else ways


class Planner:
    """Finds what fits, for one config on any mesh.

    Keeps the shapes for each mesh and optimizer, since they are slow to make.
    """

    def __init__(self, config: Config):
        self.config = config
        self._estimators: dict[tuple, Estimator] = {}

    def memory(self, mesh: MeshConfig, optimizer: str = "", remat: str = "", microbatch: int = 0) -> Memory:
        """Returns the memory that the config's train step takes on each device, after these changes.

        An optimizer or remat of "" and a microbatch of 0 stand for the config's own value.
        """
        optimizer = optimizer or self.config.optim.name
        key = (mesh, optimizer)
        changed = with_changes(self.config, optimizer, remat, microbatch)
        if key not in self._estimators:
            self._estimators[key] = Estimator(changed, abstract_mesh(mesh, devices_of(mesh)))
        return self._estimators[key](changed)

    def microbatches(self, mesh: MeshConfig) -> list[int]:
        """Returns the microbatches to choose from, in rows, largest first.

        Each is a power of two rows a device and divides the batch.
        """
        ways, batch = mesh.data * mesh.fsdp, self.config.train.batch_size
        sizes = [ways << power for power in range(batch.bit_length())]
        return [size for size in reversed(sizes) if batch % size == 0]

    def largest(self, mesh: MeshConfig, limit: float, optimizer: str = "", remat: str = "") -> Fit | None:
        """Returns the fit with the largest microbatch that needs at most `limit` bytes a device; None if there is none."""
        for microbatch in self.microbatches(mesh):
            memory = self.memory(mesh, optimizer, remat, microbatch)
            if memory.total <= limit:
                names = (optimizer or self.config.optim.name, remat or self.config.model.remat)
                return Fit(devices_of(mesh), *names, microbatch, memory)
        return None

    def fewest(self, limit: float) -> Fit | None:
        """Returns the unchanged config's fit on the fewest devices (1, 2, 4, ... on fsdp).

        None if MOST_DEVICES, or one for each row of the batch, are too few.
        """
        devices = 1
        while devices <= min(MOST_DEVICES, self.config.train.batch_size):
            if found := self.largest(dataclasses.replace(ONE_DEVICE, fsdp=devices), limit):
                return found
            devices *= 2
        return None

    def remedy(self, mesh: MeshConfig, limit: float) -> Fit | None:
        """Returns the smallest change that makes the config fit on this mesh; None if there is none.

        It tries other remat policies first, then 8-bit AdamW, then both.
        """
        own = self.config.model.remat
        stronger = list(KEPT)[list(KEPT).index(own) :]
        for optimizer in dict.fromkeys((self.config.optim.name, "adamw8bit")):
            for remat in stronger:
                if found := self.largest(mesh, limit, optimizer, remat):
                    return found
        return None

    def faster(self, mesh: MeshConfig, limit: float) -> Fit | None:
        """Returns the fit with the policy that recomputes least, where the config's own repeats products (dots, full).

        None if its own repeats none, or if no policy that repeats fewer fits.
        """
        own = self.config.model.remat
        cheaper = list(KEPT)[: list(KEPT).index(own)] if own in ("dots", "full") else []
        return next(filter(None, (self.largest(mesh, limit, remat=remat) for remat in cheaper)), None)


def with_changes(config: Config, optimizer: str = "", remat: str = "", microbatch: int = 0) -> Config:
    """Returns the config with these values; "" and 0 stand for its own value."""
    c = config
    return dataclasses.replace(
        c,
        optim=dataclasses.replace(c.optim, name=optimizer or c.optim.name),
        model=dataclasses.replace(c.model, remat=remat or c.model.remat),
        train=dataclasses.replace(c.train, microbatch_size=microbatch or c.train.microbatch_size),
    )
