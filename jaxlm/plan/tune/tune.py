"""Finds the settings that make a step fast on a device: candidates, the memory that each needs, a search that times them.

These settings change how a step is computed, not its result. So the fastest candidate that fits is the best.
"""

import dataclasses
import functools
import itertools
import statistics
import threading
import time
import timeit
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxlm.config import Config, ConfigError, MeshConfig, RunError, config_files, with_keys
from jaxlm.data.batches import document_rows
from jaxlm.devices import processes, sharding
from jaxlm.host import console
from jaxlm.host.console import Say, gigabytes
from jaxlm.plan import flops, lower, settle
from jaxlm.plan.fit import REMATS, SURELY, Planner, choose, with_changes
from jaxlm.step import parts, state
from jaxlm.step.objectives.base import Variables

HEADROOM = 0.95  # of a device's memory, for the step
# Section of the config -> its keys that are tuned.
SECTIONS = {"train": ("microbatch_size",), "model": ("remat", "attention", "scan_layers"), "loss": ("tile_tokens",)}
FULL_SPEED_TOKENS = 8192  # of a microbatch on one device: a larger one gains little on any accelerator


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One value for each setting that is tuned. The settings are keys of the config."""

    microbatch_size: int
    remat: str
    attention: str
    scan_layers: bool
    tile_tokens: int

    def overrides(self) -> list[str]:
        keys = [(section, name) for section, names in SECTIONS.items() for name in names]
        return [f"--config.{section}.{name}={str(getattr(self, name)).lower()}" for section, name in keys]

    def __str__(self) -> str:
        layers = "scanned" if self.scan_layers else "unrolled"
        settings = f"microbatch {self.microbatch_size}, remat {self.remat}, attention {self.attention}"
        return f"{settings}, {layers}, tile {self.tile_tokens}"

    def applied(self, config: Config) -> Config:
        """Returns the config with these settings."""
        keys = {section: {name: getattr(self, name) for name in names} for section, names in SECTIONS.items()}
        return with_keys(config, eval={"batch_size": config.eval.batch_size or self.microbatch_size}, **keys)


@dataclasses.dataclass
class Trial:
    """The result of compiling and timing a candidate; a figure is None if it is unknown or failed (`note` says why)."""

    candidate: Candidate
    predicted_bytes: int | None = None
    measured_bytes: int | None = None
    tokens_per_second: float | None = None
    note: str = ""


def microbatch_sizes(config: Config, ways: int) -> list[int]:
    """Returns the batch size, half, quarter, ... while `ways` (data x fsdp) divides them, then `ways` if missing."""
    batch = config.train.batch_size
    halves = [batch >> power for power in range(batch.bit_length()) if batch % (ways << power) == 0]
    return halves + [ways] * (bool(halves) and halves[-1] > ways)


@dataclasses.dataclass
class Compiler:
    """Compiles a config's step with remat policies and microbatches; JAX's compile cache has the programs.

    `known`: (remat policy, rows) -> the bytes that a device needs, None if it can't be compiled; those of 0 rows: the state's.
    """

    config: Config
    mesh: Mesh
    limit_bytes: float
    make_parts: lower.MakeParts = lower.parts_of
    options: lower.Options = None
    known: dict[tuple[str, int], int | None] = dataclasses.field(default_factory=dict)

    def needs(self, remat: str, rows: int) -> int | None:
        if (remat, rows) not in self.known:
            made = self.make_parts(with_changes(self.config, remat=remat, microbatch=rows), self.mesh)
            _, self.known[remat, rows] = lower.compile_parts(made, self.options)
        return self.known[remat, rows]

    def predicted(self, remat: str, rows: int) -> float | None:
        """Estimates the bytes by a line through the known needs of other microbatch sizes; None if fewer than two are known."""
        known = [(size, need) for (policy, size), need in self.known.items() if policy == remat and need is not None]
        if len(known) < 2:
            return None
        (least, low), (most, high) = min(known), max(known)
        return low + (high - low) / (most - least) * (rows - least)

    def choose(self, sizes: Sequence[int], remats: Sequence[str]) -> tuple[str, int] | None:
        busy = full_speed_rows(self.config, self.mesh)
        return choose(self.needs, self.predicted, self.limit_bytes, remats, sizes, busy)


def fit(
    config: Config,
    mesh: Mesh,
    say: Say,
    make_parts: lower.MakeParts = lower.parts_of,
    begun: Callable[[], bool] = lambda: False,
) -> Config:
    """Returns the config with `model.remat=auto` and `train.microbatch_size=-1` replaced by what `plan.fit.choose` takes.

    The same on all processes. Raises ConfigError or RunError (`lower.refusal`, by `begun`) if nothing fits on a device.
    """
    size, remat = config.train.microbatch_size, config.model.remat
    if size != -1 and remat != "auto":
        return config  # without asking for the memory, which may be unknown (off Linux), or the other processes
    limit_bytes = memory_limit(config.tune.memory_gb)
    sizes = microbatch_sizes(config, sharding.batch_ways(mesh)) if size == -1 else [size]
    remats = REMATS if remat == "auto" else (remat,)
    compiler = Compiler(config, mesh, limit_bytes, make_parts)
    if chosen := compiler.choose(sizes, remats):
        of = f"{gigabytes(compiler.needs(*chosen), 2)} of {gigabytes(limit_bytes, 2)} GB a device"
        remat, size = chosen
        say(f"chosen: train.microbatch_size={size}, model.remat={remat}; {of}")
        return own(config, size, remat).applied(config)
    need = compiler.needs(remats[-1], sizes[-1])
    needs = "more than the compiler can place" if need is None else f"{gigabytes(need, 2)} GB"
    words = (
        f"nothing fits into {gigabytes(limit_bytes, 2)} GB a device: microbatch_size={sizes[-1]} with remat={remats[-1]} needs "
        f"{needs}; take optim.name=adamw8bit, a shorter train.seq_len, or split the model by mesh.fsdp"
    )
    raise lower.refusal(words, mesh.devices.flat[0].platform, config.tune.memory_gb, begun())


def own(config: Config, microbatch_size: int, remat: str) -> Candidate:
    m = config.model
    return Candidate(microbatch_size, remat, m.attention, m.scan_layers, config.loss.tile_tokens)


def full_speed_rows(config: Config, mesh: Mesh) -> float:
    """Returns the fewest rows of a microbatch that keep an accelerator fully busy; 0 for a CPU, which any row keeps busy."""
    if mesh.devices.flat[0].platform == "cpu":
        return 0.0
    return sharding.batch_ways(mesh) * FULL_SPEED_TOKENS / config.train.seq_len


def candidates(config: Config, backends: Sequence[str], ways: int) -> dict[str, tuple]:
    """Returns setting's name -> the values to try, from `config.tune`, in the order in which `search` varies the settings."""
    t = config.tune
    sizes = t.microbatch_sizes or microbatch_sizes(config, ways)
    values = {"attention": t.attention or backends, "microbatch_size": sizes, "remat": t.remat}
    values |= {"scan_layers": t.scan_layers, "tile_tokens": t.tile_tokens}
    return {name: tuple(choices) for name, choices in values.items()}


def search(
    values: dict[str, tuple],
    start: Candidate,
    trial: Callable[[Candidate], Trial],
    *,
    exhaustive: bool,
    max_seconds: float,
) -> list[Trial]:
    """Tries candidates and returns all trials, in the order in which they were made. The candidate `start` should fit.

    By default it varies one setting after the other, starting each time from the fastest candidate so far; microbatch and remat
    together. A policy that recomputes more is tried only for microbatches that do not fit with one that recomputes less.
    `exhaustive` tries every combination instead. After `max_seconds` no further trial begins.
    """
    end = time.monotonic() + max_seconds
    done: dict[Candidate, Trial] = {}
    # Ordered so that `needless` can rule out later candidates.
    rising = values | {"microbatch_size": sorted(values["microbatch_size"])}
    rising["remat"] = sorted(values["remat"], key=REMATS.index)

    def fits(candidate: Candidate) -> bool | None:
        """Returns True if the candidate ran, False if its trial failed, None if it was not tried yet."""
        return done[candidate].tokens_per_second is not None if candidate in done else None

    def needless(candidate: Candidate) -> bool:
        """True if a smaller candidate already failed to fit, or a cheaper remat policy already fits."""
        smaller = [size for size in rising["microbatch_size"] if size < candidate.microbatch_size]
        cheaper = () if exhaustive else REMATS[: REMATS.index(candidate.remat)]
        return any(fits(dataclasses.replace(candidate, microbatch_size=size)) is False for size in smaller) or any(
            fits(dataclasses.replace(candidate, remat=remat)) for remat in cheaper
        )

    def sweep(base: Candidate, *settings: str) -> None:
        for choice in itertools.product(*(rising[name] for name in settings)):
            candidate = dataclasses.replace(base, **dict(zip(settings, choice, strict=True)))
            if candidate not in done and not needless(candidate) and time.monotonic() < end:
                done[candidate] = trial(candidate)

    if exhaustive:
        sweep(start, *values)
        return list(done.values())
    sweep(start)
    for group in (("attention",), ("remat", "microbatch_size"), ("scan_layers",), ("tile_tokens",)):
        sweep(min(done.values(), key=slowness, default=Trial(start)).candidate, *group)
    return list(done.values())


def memory_limit(memory_gb: float) -> float:
    """Returns the bytes that a step may take on one device: `memory_gb` x 10^9 if it is given, else HEADROOM of its memory.

    All processes get the same. Raises ConfigError if the memory is unknown.
    """
    room = lower.of_devices(memory_gb)
    if room is None:
        raise ConfigError("the memory is unknown on this platform: give --config.tune.memory_gb")
    return room.bytes if memory_gb else HEADROOM * room.bytes


_TOO_LARGE = (
    "no setting makes it fit; take a smaller model, a shorter train.seq_len, or split the model over more devices by "
    "mesh.fsdp"
)
_TILE_TOKENS = 2048  # of the loss, for a run that has no tiles and does not fit


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled train step, and bytes on each device: `need` in all, of which `state` (with a batch) and `temporaries`."""

    step: jax.stages.Compiled
    need: int
    state: int
    temporaries: int
    room: lower.Room | None


class Once:
    """Compiles the train step of a run when it is first asked for, and keeps it. No key may be auto."""

    def __init__(self, made: parts.Parts):
        self._made, self._program = made, None

    def __call__(self, done: int) -> Program | None:
        """Returns the program; None if all steps are `done`. All processes call it. Raises as `admit`."""
        if done >= self._made.config.train.steps:
            return None
        if self._program is None:
            room = lower.of_devices(self._made.config.tune.memory_gb)
            with processes.working("compiling the train step"):
                self._program = admit(self._made, room, begun=done > 0)
        return self._program


def admit(made: parts.Parts, room: lower.Room | None, begun: bool) -> Program:
    """Compiles the train step, from shapes alone. Raises as `lower.refusal` if it needs more memory than there is (`room`).

    The room is the same on all processes; if it is unknown (None), nothing is refused.
    """
    compiled, need = lower.compile_parts(made)
    state, words = 0, "a step needs more memory than the compiler can place"
    if compiled:
        memory = compiled.memory_analysis()
        state = memory.argument_size_in_bytes
        if room is None or need <= room.bytes:
            return Program(compiled, need, state, memory.temp_size_in_bytes, room)
        words = f"a step needs {_gb(need)} of memory{' a device' * (made.mesh.size > 1)}"
    words += f", and there are {_gb(room.bytes)} {room.of}" if room else ""
    limit = room.bytes * HEADROOM if room else float("inf")
    with processes.working("looking for settings that fit"):
        change = remedy(made.config, made.mesh, limit, (need, state), begun)
    mend = f"give {' '.join(change[0])}, then it needs {_gb(change[1])}" if change else _TOO_LARGE
    platform = made.mesh.devices.flat[0].platform
    raise lower.refusal(f"{words}: {mend}", platform, made.config.tune.memory_gb, begun)


def check_room(config: Config, mesh: Mesh) -> None:
    """Raises as `lower.refusal` if by arithmetic, in a second, a step needs far more than there is: compiling takes minutes.

    A CPU's program needs more than the arithmetic says (1.0 to 1.5 times, of six configs).
    """
    room = lower.of_devices(config.tune.memory_gb)
    if not room:
        return
    config = with_keys(config, model={"vocab_size": config.model.vocab_size or 1})  # not read from the data yet
    config = settle.assuming(config, remat=REMATS[-1], rows=sharding.batch_ways(mesh))
    shape = MeshConfig(**mesh.shape)
    need = Planner(config).memory(shape).total
    if need <= SURELY * room.bytes:
        return
    mend = _TOO_LARGE
    for changed, keys in _changes(config, begun=True):  # the planner itself tries 8-bit AdamW
        if change := Planner(changed).remedy(shape, HEADROOM * room.bytes):
            changes = {"model.remat": change.remat, "train.microbatch_size": change.microbatch}
            changes |= {"optim.name": change.optimizer} if change.optimizer != config.optim.name else {}
            keys = [*keys, *(f"--config.{key}={value}" for key, value in changes.items())]
            mend = f"give {' '.join(keys)}, then it needs {_gb(change.memory.total)} or more"
            break
    words = f"a step needs {_gb(need)} of memory or more, and there are {_gb(room.bytes)} {room.of}: {mend}"
    raise lower.refusal(words, mesh.devices.flat[0].platform, config.tune.memory_gb, begun=False)


def _gb(size: float) -> str:
    return f"{gigabytes(size)} GB"


def remedy(
    config: Config, mesh: Mesh, limit_bytes: float, known: tuple[int | None, int], begun: bool
) -> tuple[list[str], int] | None:
    """Returns (the overrides of the smallest change that makes a step fit, the bytes that it then needs), or None.

    `known`: the bytes that the unchanged config needs (None if the compiler could not place it), and those of its state.
    """
    size, remat = config.train.microbatch_size, config.model.remat
    sizes = [s for s in microbatch_sizes(config, sharding.batch_ways(mesh)) if s <= size]
    remats = (remat,) if config.model.offload else REMATS[REMATS.index(remat) :]  # offload works with `names` only
    options = lower.QUICK if mesh.devices.flat[0].platform == "cpu" else None
    need, state = known
    measured = {(remat, size): need} | ({(remat, 0): state} if state else {})
    before = own(config, size, remat).overrides()
    for changed, overrides in _changes(config, begun):
        compiler = Compiler(changed, mesh, limit_bytes, options=options, known=measured if changed is config else {})
        frugal = compiler.needs(remats[-1], sizes[-1])
        if frugal is None or frugal > limit_bytes:
            continue
        remat, size = compiler.choose(sizes, remats)
        new = [override for override in own(changed, size, remat).overrides() if override not in before]
        return [*new, *(override for override in overrides if override not in new)], compiler.needs(remat, size)
    return None


def _changes(config: Config, begun: bool) -> Iterator[tuple[Config, list[str]]]:
    """Yields the config, then versions of it with more and more changes, each with its overrides."""
    overrides: list[str] = []
    yield config, overrides
    if not config.loss.tile_tokens:
        config = with_keys(config, loss={"tile_tokens": _TILE_TOKENS})
        overrides = [f"--config.loss.tile_tokens={_TILE_TOKENS}"]
        yield config, overrides
    if config.optim.name == "adamw" and config.optim.mu_dtype == "float32" and not begun:
        yield with_keys(config, optim={"name": "adamw8bit"}), [*overrides, "--config.optim.name=adamw8bit"]


FINALISTS = 3  # how many of the fastest candidates run again, in turns
CPU_PRODUCT, PRODUCT = 1024, 8192  # rows and columns of the matrices that are multiplied


@dataclasses.dataclass(eq=False)
class Bench:
    """Compiles and times candidates, all on one train state and one loader. If `stop` is set, a step raises KeyboardInterrupt.

    A candidate is timed for `seconds` at most, but two steps at least.
    """

    config: Config
    mesh: Mesh
    limit_bytes: float
    batches: Iterator[dict[str, jax.Array]]
    say: Say
    seconds: float = 20.0
    done: list[Trial] = dataclasses.field(default_factory=list)
    stop: threading.Event = dataclasses.field(default_factory=threading.Event)
    _state: state.TrainState | None = None
    _frozen: Variables = dataclasses.field(default_factory=dict)

    def _compile(self, candidate: Candidate) -> tuple[jax.stages.Compiled, int] | tuple[None, None]:
        return lower.compile_parts(lower.parts_of(candidate.applied(self.config), self.mesh))

    def trial(self, candidate: Candidate) -> Trial:
        """Compiles a candidate and times it if it fits. If it fails, the trial's note says why, and the search can go on."""
        trial = Trial(candidate)
        try:
            with console.working(str(candidate), end=False):
                self._try(trial)
        except (ConfigError, RunError):  # what the loader raises: no other candidate would do better
            raise
        except (RuntimeError, ValueError) as error:  # JAX's and the kernels', such as a package that is not installed
            self._state, trial.tokens_per_second = None, None
            out_of_memory = "RESOURCE_EXHAUSTED" in str(error)
            trial.note = "ran out of memory" if out_of_memory else f"failed: {config_files.first_line(error)[:160]}"
        shown = f"{trial.tokens_per_second:,.0f} tokens/s" if trial.tokens_per_second else trial.note
        self.say(f"{candidate}: {shown}")
        self.done.append(trial)
        return trial

    def _try(self, trial: Trial) -> None:
        compiled, trial.predicted_bytes = self._compile(trial.candidate)
        if compiled is None or trial.predicted_bytes > self.limit_bytes:
            trial.note = "does not fit"
            return
        before = _peak_bytes()
        self._step(compiled)  # not counted: memory is being laid out
        trial.tokens_per_second = self._speeds([compiled])[0]
        after = _peak_bytes()
        trial.measured_bytes = after if after > before else None  # an earlier trial's peak may be higher

    def rematch(self, trials: list[Trial], start: Candidate) -> list[Trial]:
        """Times the fastest trials and `start`'s again, in turns, as speeds drift. Returns these by speed, then the others."""
        ran = sorted((t for t in trials if t.tokens_per_second), key=slowness)
        again = [t for i, t in enumerate(ran) if i < FINALISTS or t.candidate == start]
        if len(again) > 1:
            programs = [self._compile(t.candidate)[0] for t in again]
            for compiled in programs:
                self._step(compiled)
            for trial, speed in zip(again, self._speeds(programs), strict=True):
                trial.tokens_per_second, trial.note = speed, "in turns"
        rest = [t for t in trials if t not in again]
        return sorted(again, key=slowness) + sorted(rest, key=slowness)

    def _speeds(self, programs: list[jax.stages.Compiled]) -> list[float]:
        """Returns each program's tokens a second, by the median time of its steps. The programs run a step each in turn."""
        train = self.config.train
        steps = [functools.partial(self._step, compiled) for compiled in programs]
        seconds = medians(steps, self.config.tune.steps, self.seconds * len(programs))
        return [train.batch_size * train.seq_len / step_s for step_s in seconds]

    def _step(self, compiled: jax.stages.Compiled) -> float:
        """Runs one step; returns its seconds, including the loader's time for the batch."""
        if self.stop.is_set():
            raise KeyboardInterrupt
        began = time.perf_counter()
        if self._state is None:
            self._frozen = {}  # frees earlier weights first
            self._state, self._frozen = lower.parts_of(self.config, self.mesh).create()
        before, self._state = self._state, None  # its memory is donated to the step
        with jax.set_mesh(self.mesh):
            self._state, metrics = compiled(self._frozen, before, next(self.batches))
        jax.block_until_ready(metrics)
        return time.perf_counter() - began


def medians(steps: Sequence[Callable[[], float]], most: int, seconds: float) -> list[float]:
    """Returns the median seconds of each of `steps`. They run in turns, `most` times or for `seconds`, but twice at least."""
    times: list[list[float]] = [[] for _ in steps]
    end = time.perf_counter() + seconds
    while len(times[0]) < most and (len(times[0]) < 2 or time.perf_counter() < end):
        for own, step in zip(times, steps, strict=True):
            own.append(step())
    return [statistics.median(own) for own in times]


def slowness(trial: Trial) -> float:
    return -(trial.tokens_per_second or 0)


def row(config: Config, trial: Trial) -> dict:
    """Returns a trial as a row of the table."""
    speed, per_token, h = trial.tokens_per_second, flops.of(config), config.hardware
    peak = h.peak_tflops or flops.peak_tflops(jax.devices()[0].device_kind)
    share = 1e12 * peak * jax.device_count() if peak and speed else None
    sizes = (trial.predicted_bytes, trial.measured_bytes)
    predicted_gb, measured_gb = (float(f"{size / 1e9:.3g}") if size else None for size in sizes)
    return {
        **dataclasses.asdict(trial.candidate),
        "tokens_per_second": round(speed) if speed else None,
        "mfu_palm": round(speed * per_token.palm / share, 4) if share else None,
        "mfu_causal": round(speed * per_token.causal / share, 4) if share else None,
        "predicted_gb": predicted_gb,
        "measured_gb": measured_gb,
        "usd_per_billion_tokens": round(h.usd_per_hour / 3600 / speed * 1e9, 2) if speed and h.usd_per_hour else None,
        "note": trial.note,
    }


def readable(table: list[dict]) -> list[dict]:
    """Returns the table as users read it: without empty columns, and with "-" for values that are None."""
    shown = [name for name in (table[0] if table else ()) if any(line[name] not in (None, "") for line in table)]
    return [{name: "-" if line[name] is None else line[name] for name in shown} for line in table]


def _peak_bytes() -> int:
    """Returns the most bytes that were ever in use on the first device; 0 on a CPU, which does not report them."""
    return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)


def random_batch(made: parts.Parts) -> dict[str, jax.Array]:
    """Returns a batch of random tokens on the mesh of the parts. The objective's other arrays are 0."""
    t, mesh = made.config.train, made.mesh
    size = (t.batch_size, t.seq_len + 1)
    tokens = np.random.default_rng(0).integers(1, made.config.model.vocab_size, size, dtype=np.int32)
    here = sharding.local_rows(mesh, t.batch_size)
    local = document_rows.make_batch(tokens[here], separator_id=0)
    others = {name: leaf for name, leaf in made.batch().items() if name not in local}
    local |= {name: np.zeros(leaf.shape, leaf.dtype)[here] for name, leaf in others.items()}
    return sharding.to_global(local, mesh, t.batch_size)


def product(dtype: str) -> float:
    """Returns the FLOP/s of a large matrix product on one device: about the most that a step can reach."""
    size = CPU_PRODUCT if jax.default_backend() == "cpu" else PRODUCT
    a = jnp.ones((size, size), dtype, device=jax.local_devices()[0])
    multiply = jax.jit(lambda a, b: a @ b)
    jax.block_until_ready(multiply(a, a))
    seconds = timeit.repeat(lambda: jax.block_until_ready(multiply(a, a)), number=1, repeat=5)
    return 2 * size**3 / min(seconds)
