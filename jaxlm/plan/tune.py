"""Which settings make a step fast on this device: candidates, what they need by the compiler's own account, and a search.

The settings here change how a step is computed, never its result (DESIGN: microbatched = full batch, remat = plain, scanned
= unrolled, every attention backend the same function), so the fastest that fits is simply the best.
"""

import dataclasses
import itertools
import time
import typing

import jax
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from jaxlm import sharding
from jaxlm.config import Config, RunError
from jaxlm.console import gigabytes
from jaxlm.objectives import base, lm
from jaxlm.plan import lower

REMATS = ("none", "names", "dots", "full")  # from the fastest to the most frugal
HEADROOM = 0.95  # of a device's memory, for the step
FULL_SPEED_TOKENS = 8192  # of a microbatch on one device, from which on a larger one gains little on any accelerator


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One choice of each setting."""

    microbatch_size: int
    remat: str
    attention: str
    scan_layers: bool
    tile_tokens: int

    def overrides(self) -> list[str]:
        """As `train` takes them on its command line."""
        return [
            f"--config.train.microbatch_size={self.microbatch_size}",
            f"--config.model.remat={self.remat}",
            f"--config.model.attention={self.attention}",
            f"--config.model.scan_layers={str(self.scan_layers).lower()}",
            f"--config.loss.tile_tokens={self.tile_tokens}",
        ]

    def __str__(self) -> str:
        layers = "scanned" if self.scan_layers else "unrolled"
        return (
            f"microbatch {self.microbatch_size}, remat {self.remat}, attention {self.attention}, {layers}, "
            f"tile {self.tile_tokens}"
        )

    def applied(self, config: Config) -> Config:
        """The config with these settings."""
        model = {name: getattr(self, name) for name in ("remat", "attention", "scan_layers")}
        return dataclasses.replace(
            config,
            train=dataclasses.replace(config.train, microbatch_size=self.microbatch_size),
            eval=dataclasses.replace(config.eval, batch_size=config.eval.batch_size or self.microbatch_size),
            model=dataclasses.replace(config.model, **model),
            loss=dataclasses.replace(config.loss, tile_tokens=self.tile_tokens),
        )


@dataclasses.dataclass
class Trial:
    """What became of a candidate. `compiled` is None where it was not compiled or does not fit."""

    candidate: Candidate
    predicted_bytes: int | None = None  # of one device, by the compiled program's memory analysis
    measured_bytes: int | None = None
    tokens_per_second: float | None = None
    note: str = ""


def microbatch_sizes(config: Config, ways: int) -> list[int]:
    """Halves of the batch that the mesh's `ways` divide, the largest first."""
    sizes, size = [], config.train.batch_size
    while size and size % ways == 0:
        sizes.append(size)
        if size % 2:
            break
        size //= 2
    return sizes


class Compiler:
    """Compiles candidates and remembers what they need (the compile cache has the program of one that comes again)."""

    def __init__(self, config: Config, mesh: Mesh, limit_bytes: float, objective: base.Maker = lm.make):
        self.limit_bytes = limit_bytes
        self._config, self._mesh, self._objective = config, mesh, objective
        self._needs: dict[Candidate, int | None] = {}

    def compile(self, candidate: Candidate) -> tuple[typing.Any, int | None]:
        """(the compiled step, its bytes); (None, None) where the compiler itself says that memory does not suffice."""
        try:
            lowered, _ = lower.lower_step(candidate.applied(self._config), self._mesh, self._objective)
            compiled = lowered.compile()
        except RuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            self._needs[candidate] = None
            return None, None
        self._needs[candidate] = lower.memory_of(compiled)
        return compiled, self._needs[candidate]

    def fits(self, candidate: Candidate) -> bool:
        """Whether the compiled step stays within the limit."""
        if candidate not in self._needs:
            self.compile(candidate)
        return self._needs[candidate] is not None and self._needs[candidate] <= self.limit_bytes

    def needs(self, candidate: Candidate) -> int | None:
        """Bytes of a candidate that was compiled, None if it can't be."""
        return self._needs[candidate]


def fit(config: Config, mesh: Mesh, say: typing.Callable[[str], None], objective: base.Maker = lm.make) -> Config:
    """Settles `model.remat=auto` and `train.microbatch_size=-1` for the devices at hand, the same on all processes.

    Raises RunError if nothing fits. See `resolve`.
    """
    if not undecided(config):
        return config  # asks neither the machine for its memory, which it may not know (off Linux), nor the other processes
    limit = min(multihost_utils.process_allgather(memory_limit(config.tune.memory_gb)).ravel().tolist())
    return resolve(config, mesh, limit, say, objective)


def undecided(config: Config) -> bool:
    """True if the config leaves something for `resolve` to choose."""
    return config.model.remat == "auto" or config.train.microbatch_size == -1


def resolve(
    config: Config,
    mesh: Mesh,
    limit_bytes: float,
    log: typing.Callable[[str], None],
    objective: base.Maker = lm.make,
) -> Config:
    """Replaces `model.remat=auto` and `train.microbatch_size=-1` by what fits: the least recomputation, then the largest
    microbatch. One under FULL_SPEED_TOKENS, whose products are too small for an accelerator, comes after all others.

    Args:
      config: with `model.attention` and `model.dtype` set.
      mesh: what it will run on.
      limit_bytes: of one device.
      log: is told the choice.
      objective: makes what is minimised: its step is compiled.

    Raises:
      RunError: nothing fits.
    """
    if not undecided(config):
        return config
    auto_remat, auto_size = config.model.remat == "auto", config.train.microbatch_size == -1
    ways = sharding.batch_ways(mesh)
    sizes = microbatch_sizes(config, ways) if auto_size else [config.train.microbatch_size]
    large = [size for size in sizes if size * config.train.seq_len >= ways * FULL_SPEED_TOKENS]
    remats = REMATS if auto_remat else (config.model.remat,)
    m, compiler = config.model, Compiler(config, mesh, limit_bytes, objective)
    start = Candidate(sizes[0], remats[0], m.attention, m.scan_layers, config.loss.tile_tokens)
    for choices, remat in itertools.product((large, sizes), remats):
        size = _largest(compiler, dataclasses.replace(start, remat=remat), choices)
        if size is None:
            continue
        chosen = dataclasses.replace(start, remat=remat, microbatch_size=size)
        of = f"{gigabytes(compiler.needs(chosen), 2)} of {gigabytes(limit_bytes, 2)} GB a device"
        log(f"chosen: train.microbatch_size={size}, model.remat={remat}; {of}")
        return chosen.applied(config)
    need = compiler.needs(dataclasses.replace(start, remat=remats[-1], microbatch_size=sizes[-1]))
    said = "more than the compiler can place" if need is None else f"{gigabytes(need, 2)} GB"
    raise RunError(
        f"nothing fits into {gigabytes(limit_bytes, 2)} GB a device: microbatch_size={sizes[-1]} with remat={remats[-1]} needs "
        f"{said}; take optim.name=adamw8bit, a shorter train.seq_len, or split the model by mesh.fsdp"
    )


def _largest(compiler: Compiler, candidate: Candidate, sizes: list[int]) -> int | None:
    """The largest of `sizes` (descending) that fits. Needs grow with the size: found by halving the list."""
    low, high = 0, len(sizes)  # sizes[high:] are known to fit
    while low < high:
        middle = (low + high) // 2
        if compiler.fits(dataclasses.replace(candidate, microbatch_size=sizes[middle])):
            high = middle
        else:
            low = middle + 1
    return sizes[high] if high < len(sizes) else None


def candidates(config: Config, backends: typing.Sequence[str], ways: int) -> dict[str, tuple]:
    """Setting -> the values to try, in the order in which a search should vary them."""
    t = config.tune
    return {
        "attention": tuple(t.attention or backends),
        "microbatch_size": tuple(t.microbatch_sizes or microbatch_sizes(config, ways)),
        "remat": tuple(t.remat),
        "scan_layers": tuple(t.scan_layers),
        "tile_tokens": tuple(t.tile_tokens),
    }


def search(
    values: dict[str, tuple],
    start: Candidate,
    trial: typing.Callable[[Candidate], Trial],
    *,
    exhaustive: bool,
    max_seconds: float,
) -> list[Trial]:
    """Tries candidates; returns all trials in the order of trying.

    By default one setting after the other is varied from the best so far, which takes the sum and not the product of the
    numbers of values; microbatch and remat together, more remat only for microbatches that do not fit with less.

    Args:
      values: as from `candidates`.
      start: where to begin; should fit.
      trial: compiles and times one; its `tokens_per_second` is None where the candidate does not fit.
      exhaustive: try every combination instead.
      max_seconds: no candidate is begun after this.
    """
    end, done = time.monotonic() + max_seconds, {}

    def fits(candidate: Candidate) -> bool | None:
        return done[candidate].tokens_per_second is not None if candidate in done else None

    def needless(candidate: Candidate) -> bool:
        """Whether it can't fit, or recomputes what need not be."""
        sizes = [size for size in values["microbatch_size"] if size < candidate.microbatch_size]
        less = [remat for remat in REMATS[: REMATS.index(candidate.remat)] if not exhaustive]
        if any(fits(dataclasses.replace(candidate, microbatch_size=size)) is False for size in sizes):
            return True
        return any(fits(dataclasses.replace(candidate, remat=remat)) for remat in less)

    def sweep(base: Candidate, *settings: str) -> None:
        for choice in itertools.product(*(_smallest_first(name, values[name]) for name in settings)):
            candidate = dataclasses.replace(base, **dict(zip(settings, choice, strict=True)))
            if candidate not in done and not needless(candidate) and time.monotonic() < end:
                done[candidate] = trial(candidate)

    if exhaustive:
        sweep(start, *values)
        return list(done.values())
    sweep(start)
    for group in (("attention",), ("remat", "microbatch_size"), ("scan_layers",), ("tile_tokens",)):
        sweep((best(list(done.values())) or Trial(start)).candidate, *group)
    return list(done.values())


def _smallest_first(name: str, choices: tuple) -> tuple:
    """What fits most easily first: then what can't fit is not compiled."""
    if name == "remat":
        return tuple(sorted(choices, key=REMATS.index))
    return tuple(sorted(choices)) if name == "microbatch_size" else choices


def best(trials: list[Trial]) -> Trial | None:
    """The fastest; None if nothing ran."""
    ran = [t for t in trials if t.tokens_per_second]
    return max(ran, key=lambda t: t.tokens_per_second) if ran else None


def memory_limit(memory_gb: float = 0.0) -> float:
    """Bytes that a program may take on one device: as asked, or a share of what the device says that it has, or of what
    this host has free. The rest is for the next batch, what evaluation takes, and gaps between blocks."""
    if memory_gb:
        return memory_gb * 1e9
    stats = jax.local_devices()[0].memory_stats() or {}
    free = stats.get("bytes_limit") or proc_bytes("/proc/meminfo", "MemAvailable") / jax.local_device_count()
    return HEADROOM * free


def proc_bytes(path: str, name: str) -> int:
    """A figure that Linux gives in kB, in bytes."""
    with open(path) as f:
        return next(int(line.split()[1]) * 1024 for line in f if line.startswith(f"{name}:"))
