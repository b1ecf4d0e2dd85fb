"""Finds settings that fit into a device's memory: one search, by arithmetic (`Planner`) or by the compiler (`plan.tune`)."""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Sequence

from jaxlm.config import Config, ConfigError, MeshConfig, with_keys
from jaxlm.devices import sharding
from jaxlm.plan.accelerators import Accelerator
from jaxlm.plan.memory import KEPT, Estimator, Memory, abstract_mesh

MOST_DEVICES = 256  # the most that `fewest` tries
MOST_PLANNED = 4096  # devices in config.plan.mesh
REMATS = tuple(KEPT)  # from the fastest to the most frugal
SURELY = 1.2  # a microbatch that is predicted to need more than this multiple of the limit is not tried
# Ways to fine-tune: name -> the adapter's kind, how its frozen layers are kept, the optimizer ("" for the config's own).
METHODS = {
    "all parameters, adamw": ("none", "none", "adamw"),
    "all parameters, adamw8bit": ("none", "none", "adamw8bit"),
    "LoRA": ("lora", "none", ""),
    "QLoRA (nf4)": ("lora", "nf4", ""),
}
ONE_DEVICE = MeshConfig(**{field.name: 1 for field in dataclasses.fields(MeshConfig)})
Needs = Callable[[str, int], float | None]  # a remat policy, rows of a microbatch -> bytes of a device


@dataclasses.dataclass(frozen=True)
class Fit:
    """A way to run a config. `microbatch`: rows over all devices. `memory`: of each device."""

    devices: int
    optimizer: str
    remat: str
    microbatch: int
    memory: Memory


def parse_mesh(text: str) -> MeshConfig:
    """Returns the mesh of a `config.plan.mesh` such as `fsdp:64` or `data:4,fsdp:8`; other axes have size 1."""
    sizes = re.findall(r"(\w+):(\d+)", text)
    return dataclasses.replace(ONE_DEVICE, **{axis: int(size) for axis, size in sizes})


def devices_of(mesh: MeshConfig) -> int:
    return math.prod(dataclasses.astuple(mesh))


def check_mesh(config: Config, mesh: MeshConfig) -> None:
    """Raises ConfigError if training would refuse the mesh, or if it has more than MOST_PLANNED devices."""
    devices, hosts = devices_of(mesh), config.plan.hosts
    if devices > MOST_PLANNED:
        raise ConfigError(f"config.plan.mesh={config.plan.mesh!r} has {devices:,} devices, at most {MOST_PLANNED:,}")
    abstract = abstract_mesh(mesh, devices)
    sharding.check_batch(abstract, "train.batch_size", config.train.batch_size)
    sharding.check_context(abstract, config.train.seq_len, config.model)
    sharding.check_tensor(abstract, config.model)
    if hosts and devices % hosts:
        raise ConfigError(f"config.plan.hosts={hosts} does not divide the {devices} devices of config.plan.mesh")


def own_microbatch(config: Config, mesh: MeshConfig) -> int:
    """Returns the rows of the config's own microbatch if the mesh divides them, else one row a device."""
    ways, own = mesh.data * mesh.fsdp, config.train.microbatch_size
    return own if own > 0 and own % ways == 0 else ways


def choose(
    needs: Needs,
    predicted: Needs,
    limit_bytes: float,
    remats: Sequence[str],
    sizes: Sequence[int],
    full_speed: float = 0.0,
) -> tuple[str, int] | None:
    """Returns the remat policy and the microbatch size to use; None if nothing fits.

    The policy is the one that recomputes least, the microbatch the largest that fits with it. Microbatches of at least
    `full_speed` rows are tried first, with any policy: smaller ones make matrix products too small. `needs` returns the bytes
    of a device (None: the step can't be compiled), and may compile for minutes; `predicted` returns an estimate at once (None:
    unknown). `remats` are ordered by how much they recompute, from the least; `sizes` from the largest.
    """

    def largest(remat: str, sizes: Sequence[int]) -> int | None:
        """Returns the largest of `sizes` that fits; None if no size fits. Bisects, starting at the predicted size."""
        low, high = 0, len(sizes)  # sizes[high:] are known to fit
        while low < high:
            middle = (low + high) // 2
            guesses = [predicted(remat, size) for size in sizes[low:high]]
            if guesses[-1] is not None:
                promising = [low + i for i, guess in enumerate(guesses) if guess <= limit_bytes]
                if not promising and high < len(sizes) and guesses[-1] > SURELY * limit_bytes:
                    break
                middle = promising[0] if promising else high - 1
            need = needs(remat, sizes[middle])
            if need is not None and need <= limit_bytes:
                high = middle
            else:
                low = middle + 1
        return sizes[high] if high < len(sizes) else None

    large = [size for size in sizes if size >= full_speed]
    rounds = (large, sizes) if len(large) < len(sizes) else (sizes,)
    for choices, remat in itertools.product(rounds, remats):
        if (rows := largest(remat, choices)) is not None:
            return remat, rows
    return None


class Planner:
    """Finds what fits by arithmetic, for one config on any mesh. Caches the shapes, which are slow to compute."""

    def __init__(self, config: Config):
        self.config = config
        self._estimators: dict[tuple[MeshConfig, str], Estimator] = {}

    def memory(self, mesh: MeshConfig, optimizer: str = "", remat: str = "", microbatch: int = 0) -> Memory:
        """Returns the memory on each device of a mesh; "" and 0 stand for the config's own optimizer, remat and microbatch."""
        changed = with_changes(self.config, optimizer, remat, microbatch)
        key = mesh, changed.optim.name
        if key not in self._estimators:
            self._estimators[key] = Estimator(changed, abstract_mesh(mesh, devices_of(mesh)))
        return self._estimators[key](changed)

    def largest(self, mesh: MeshConfig, limit: float, optimizer: str = "", remats: Sequence[str] = ()) -> Fit | None:
        """Returns the fit with the first of `remats` (or the config's own) that fits, and its largest microbatch; else None."""

        @functools.cache
        def needs(remat: str, microbatch: int) -> float:
            return self.memory(mesh, optimizer, remat, microbatch).total

        ways, batch = mesh.data * mesh.fsdp, self.config.train.batch_size
        sizes = [ways << power for power in reversed(range(batch.bit_length())) if batch % (ways << power) == 0]
        chosen = choose(needs, needs, limit, remats or (self.config.model.remat,), sizes)
        if not chosen:
            return None
        name = optimizer or self.config.optim.name
        return Fit(devices_of(mesh), name, *chosen, self.memory(mesh, optimizer, *chosen))

    def fewest(self, limit: float) -> Fit | None:
        """Returns the unchanged config's fit on the fewest devices (1, 2, 4, ... on fsdp, at most MOST_DEVICES); else None."""
        most = min(MOST_DEVICES, self.config.train.batch_size)
        meshes = (dataclasses.replace(ONE_DEVICE, fsdp=1 << power) for power in range(most.bit_length()))
        return next(filter(None, (self.largest(mesh, limit) for mesh in meshes)), None)

    def remedy(self, mesh: MeshConfig, limit: float) -> Fit | None:
        """Returns the fit of the smallest change on this mesh: other remat policies, then 8-bit AdamW; None if nothing fits."""
        stronger = REMATS[REMATS.index(self.config.model.remat) :]
        optimizers = dict.fromkeys((self.config.optim.name, "adamw8bit"))
        return next(filter(None, (self.largest(mesh, limit, name, stronger) for name in optimizers)), None)

    def faster(self, mesh: MeshConfig, limit: float) -> Fit | None:
        """Returns a fit that recomputes less, if the config's own policy recomputes matrix products; else None."""
        own = self.config.model.remat
        return self.largest(mesh, limit, remats=REMATS[: REMATS.index(own)]) if own in ("dots", "full") else None


def with_changes(config: Config, optimizer: str = "", remat: str = "", microbatch: int = 0) -> Config:
    """Returns the config with these values; "" and 0 keep the config's own value."""
    return with_keys(
        config,
        optim={"name": optimizer or config.optim.name},
        model={"remat": remat or config.model.remat},
        train={"microbatch_size": microbatch or config.train.microbatch_size},
    )


def with_method(config: Config, name: str) -> Config:
    """Returns the config with the method `name` of METHODS to fine-tune, in microbatches of one row on one device."""
    kind, quantize, optimizer = METHODS[name]
    changed = with_keys(config, adapter={"kind": kind, "quantize": quantize})
    return with_changes(changed, optimizer=optimizer, microbatch=1)


def by_method(config: Config, cards: Sequence[Accelerator]) -> list[dict]:
    """Returns for each of METHODS its bytes with one row, by remat policy, and the smallest card for the most frugal policy."""
    rows = []
    for name in METHODS:
        planner = Planner(with_method(config, name))
        ends = REMATS[0], REMATS[-1]
        taken = {remat: planner.memory(ONE_DEVICE, remat=remat, microbatch=1).total for remat in ends}
        large = [card for card in cards if card.memory >= taken[REMATS[-1]]]
        card = min(large, key=lambda card: (card.memory, card.usd), default=None)
        rows.append({"method": name, "bytes": taken, "card": card and card.name})
    return rows
