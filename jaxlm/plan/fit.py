"""What fits on a device: the largest microbatch, and what would make a run fit that does not."""

import dataclasses
import typing

from jaxlm import sharding
from jaxlm.config import Config, ConfigError, MeshConfig, nearest
from jaxlm.plan.memory import KEPT, Estimator, Memory, abstract_mesh

MOST_DEVICES = 256  # that are tried for a model that one device can't hold
MOST_PLANNED = 4096


@dataclasses.dataclass(frozen=True)
class Fit:
    """A way to run a config: its settings, and what each device then holds.

    Attributes:
      devices: in all.
      microbatch: rows over all devices.
    """

    devices: int
    optimizer: str
    remat: str
    microbatch: int
    memory: Memory


def parse_mesh(text: str) -> MeshConfig:
    """`fsdp:64` or `data:4,fsdp:8` as a mesh; axes that are not named are 1.

    Raises:
      ConfigError: an unknown axis, one that stands twice, or a size that is no positive number.
    """
    axes = [field.name for field in dataclasses.fields(MeshConfig)]
    sizes: dict[str, int] = {}
    for part in text.replace(" ", "").split(","):
        axis, colon, size = part.partition(":")
        where = f"config.plan.mesh={text!r}"
        if axis not in axes:
            raise ConfigError(f"{where}: no axis {axis!r}; {nearest(axis, axes)} (such as fsdp:64 or data:4,fsdp:8)")
        if not colon or not size.isascii() or not size.isdigit() or int(size) < 1:
            raise ConfigError(f"{where}: give {axis} a number of devices, such as {axis}:8")
        if axis in sizes:
            raise ConfigError(f"{where}: {axis} stands there twice")
        sizes[axis] = int(size)
    return MeshConfig(**{axis: sizes.get(axis, 1) for axis in axes})


def devices_of(mesh: MeshConfig) -> int:
    """How many devices a mesh without -1 has."""
    product = 1
    for size in dataclasses.astuple(mesh):
        product *= size
    return product


def check_mesh(config: Config, mesh: MeshConfig) -> None:
    """Refuses a mesh that training would refuse, and more devices than can be planned for. Raises ConfigError."""
    if devices_of(mesh) > MOST_PLANNED:
        raise ConfigError(
            f"config.plan.mesh={config.plan.mesh!r} has {devices_of(mesh):,} devices, at most {MOST_PLANNED:,}"
        )
    there = abstract_mesh(mesh, devices_of(mesh))
    sharding.check_batch(there, **{"train.batch_size": config.train.batch_size})
    sharding.check_context(there, config.train.seq_len, config.model)
    sharding.check_tensor(there, config.model)
    if config.plan.hosts and devices_of(mesh) % config.plan.hosts:
        raise ConfigError(
            f"config.plan.hosts={config.plan.hosts} does not divide the {devices_of(mesh)} devices of config.plan.mesh"
        )


def own_microbatch(config: Config, mesh: MeshConfig) -> int:
    """The config's microbatch where the mesh divides it, else one row a device."""
    ways, own = mesh.data * mesh.fsdp, config.train.microbatch_size
    return own if own > 0 and own % ways == 0 else ways


class Planner:
    """Looks for what fits, for one config on any mesh; what is laid out once is kept."""

    def __init__(self, config: Config):
        self.config = config
        self._estimators: dict[tuple, Estimator] = {}

    def memory(self, mesh: MeshConfig, optimizer: str = "", remat: str = "", microbatch: int = 0) -> Memory:
        """The memory of the config with these changes ("" and 0: as the config has it)."""
        optimizer = optimizer or self.config.optim.name
        key = (mesh, optimizer)
        changed = with_changes(self.config, optimizer, remat, microbatch)
        if key not in self._estimators:
            self._estimators[key] = Estimator(changed, abstract_mesh(mesh, devices_of(mesh)))
        return self._estimators[key](changed)

    def microbatches(self, mesh: MeshConfig) -> list[int]:
        """The microbatches to choose from, largest first: powers of two for each device that divide the batch."""
        ways, batch = mesh.data * mesh.fsdp, self.config.train.batch_size
        sizes = [ways << power for power in range(batch.bit_length())]
        return [size for size in reversed(sizes) if batch % size == 0]

    def largest(self, mesh: MeshConfig, limit: float, optimizer: str = "", remat: str = "") -> Fit | None:
        """The largest microbatch that fits `limit` bytes, None where not even one row a device does."""
        for microbatch in self.microbatches(mesh):
            memory = self.memory(mesh, optimizer, remat, microbatch)
            if memory.total <= limit:
                names = (optimizer or self.config.optim.name, remat or self.config.model.remat)
                return Fit(devices_of(mesh), *names, microbatch, memory)
        return None

    def fewest(self, limit: float) -> Fit | None:
        """The fewest devices, by powers of two on `mesh.fsdp`, on which the config fits as it is."""
        devices = 1
        while devices <= min(MOST_DEVICES, self.config.train.batch_size):
            if found := self.largest(MeshConfig(**_ones() | {"fsdp": devices}), limit):
                return found
            devices *= 2
        return None

    def remedy(self, mesh: MeshConfig, limit: float) -> Fit | None:
        """What makes it fit on this mesh, with the least lost: another remat policy, then 8-bit AdamW, then both."""
        own = self.config.model.remat
        stronger = list(KEPT)[list(KEPT).index(own) :]
        for optimizer in dict.fromkeys((self.config.optim.name, "adamw8bit")):
            for remat in stronger:
                if found := self.largest(mesh, limit, optimizer, remat):
                    return found
        return None


def with_changes(config: Config, optimizer: str = "", remat: str = "", microbatch: int = 0) -> Config:
    """The config with these set where they are given."""
    c = config
    return dataclasses.replace(
        c,
        optim=dataclasses.replace(c.optim, name=optimizer or c.optim.name),
        model=dataclasses.replace(c.model, remat=remat or c.model.remat),
        train=dataclasses.replace(c.train, microbatch_size=microbatch or c.train.microbatch_size),
    )


def _ones() -> dict[str, typing.Any]:
    return {field.name: 1 for field in dataclasses.fields(MeshConfig)}
