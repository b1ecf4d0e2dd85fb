"""Compiles the train step before anything takes memory. A run that can't fit is refused with the settings that would."""

import dataclasses
from collections.abc import Iterator

import jax
from jax.sharding import Mesh

from jaxlm.config import Config, with_keys
from jaxlm.devices import processes, sharding
from jaxlm.host.console import gigabytes
from jaxlm.plan import lower
from jaxlm.plan.fit import REMATS
from jaxlm.plan.tune import tune
from jaxlm.step.parts import Parts

_TILE_TOKENS = 2048  # of the loss, for a run that has no tiles and does not fit


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled train step; the bytes that it needs on each device, of them `state` (with a batch) and `temporaries`."""

    step: jax.stages.Compiled
    need: int
    state: int
    temporaries: int
    room: lower.Room | None


class Once:
    """Compiles the train step of a run when it is first asked for, and keeps it. Nothing may be auto."""

    def __init__(self, made: Parts, make_parts: lower.MakeParts):
        self._made, self._make_parts = made, make_parts
        self._program: Program | None = None

    def __call__(self, done: int) -> Program | None:
        """Returns the program; None if all steps are `done`. All processes call it. Raises as `admit`."""
        if done >= self._made.config.train.steps:
            return None
        if self._program is None:
            room = lower.of_devices(self._made.config.tune.memory_gb)
            with processes.working("compiling the train step"):
                self._program = admit(self._made, room, self._make_parts, begun=done > 0)
        return self._program


def admit(made: Parts, room: lower.Room | None, make_parts: lower.MakeParts, begun: bool) -> Program:
    """Compiles the train step, from shapes alone. Raises as `lower.refusal` if it needs more memory than there is (`room`).

    The room is the same on all processes; if it is unknown (None), nothing is refused.
    """
    compiled = lower.compile_lowered(made.lower())
    need, state, words = None, 0, "a step needs more memory than the compiler can place"
    if compiled:
        memory = compiled.memory_analysis()
        need, state = lower.memory_of(compiled), memory.argument_size_in_bytes
        if room is None or need <= room.bytes:
            return Program(compiled, need, state, memory.temp_size_in_bytes, room)
        words = f"a step needs {_gb(need)} of memory{' a device' * (made.mesh.size > 1)}"
    words += f", and there are {_gb(room.bytes)} {room.of}" if room else ""
    limit = room.bytes * tune.HEADROOM if room else float("inf")
    with processes.working("looking for settings that fit"):
        change = remedy(made.config, made.mesh, limit, make_parts, (need, state), begun)
    mend = "no setting makes it fit; take a smaller model, a shorter train.seq_len, or split the model over more devices by "
    mend += "mesh.fsdp"
    if change:
        mend = f"give {' '.join(change[0])}, with which it needs {_gb(change[1])}"
    platform = made.mesh.devices.flat[0].platform
    raise lower.refusal(f"{words}: {mend}", platform, made.config.tune.memory_gb, begun)


def _gb(size: float) -> str:
    return f"{gigabytes(size)} GB"


def remedy(
    config: Config,
    mesh: Mesh,
    limit_bytes: float,
    make_parts: lower.MakeParts,
    known: tuple[int | None, int],
    begun: bool,
) -> tuple[list[str], int] | None:
    """Returns (the overrides that make a step fit, the bytes that it needs then); None if there are none.

    The smallest change comes first: microbatch and remat, which change no result; then tiles of the loss; then 8-bit AdamW,
    unless the run has `begun`. `known`: the bytes that the config as it stands needs (None if the compiler could not place it),
    and those of its state.
    """
    size, remat = config.train.microbatch_size, config.model.remat
    sizes = [s for s in tune.microbatch_sizes(config, sharding.batch_ways(mesh)) if s <= size]
    remats = (remat,) if config.model.offload else REMATS[REMATS.index(remat) :]  # offload goes with `names` alone
    options = lower.QUICK if mesh.devices.flat[0].platform == "cpu" else None
    own = tune.own(config, size, remat)
    for changed, overrides in _changes(config, begun):
        compiler = tune.Compiler(changed, mesh, limit_bytes, make_parts, options)
        start = tune.own(changed, size, remat)
        if changed is config:
            need, state = known
            compiler.learn(own, need)
            if state:
                compiler.learn(own.with_(remat, 0), state)
        frugal = compiler.needs(start.with_(remats[-1], sizes[-1]))
        if frugal is None or frugal > limit_bytes:
            continue
        chosen = compiler.choose(start, sizes, remats)
        new = [override for override in chosen.overrides() if override not in own.overrides()]
        return [*new, *(override for override in overrides if override not in new)], compiler.needs(chosen)
    return None


def _changes(config: Config, begun: bool) -> Iterator[tuple[Config, list[str]]]:
    """Yields the config and ever more changed ones, each with the overrides that lead to it."""
    overrides: list[str] = []
    yield config, overrides
    if not config.loss.tile_tokens:
        config = with_keys(config, loss={"tile_tokens": _TILE_TOKENS})
        overrides = [f"--config.loss.tile_tokens={_TILE_TOKENS}"]
        yield config, overrides
    if config.optim.name == "adamw" and config.optim.mu_dtype == "float32" and not begun:
        yield with_keys(config, optim={"name": "adamw8bit"}), [*overrides, "--config.optim.name=adamw8bit"]
