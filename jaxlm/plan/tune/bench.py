"""Times the candidates of `tune` on the devices at hand, with the real optimizer state and loader."""

import dataclasses
import functools
import statistics
import threading
import time
import timeit
import typing
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxlm.config import Config, ConfigError, RunError, config_files
from jaxlm.data.batches import document_rows
from jaxlm.devices import sharding
from jaxlm.host import console
from jaxlm.host.console import Say
from jaxlm.plan import flops, lower
from jaxlm.plan.tune import tune
from jaxlm.step import parts, state
from jaxlm.step.objectives.base import Variables

FINALISTS = 3  # how many of the fastest candidates run again, in turns
CPU_PRODUCT, PRODUCT = 1024, 8192  # rows and columns of the matrices that are multiplied


class Bench:
    """Compiles and times candidates, all on one train state and one loader. If `stop` is set, a step raises KeyboardInterrupt.

    A candidate is timed for `seconds` at most, but two steps at least.
    """

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        limit_bytes: float,
        batches: Iterator[dict[str, jax.Array]],
        say: Say,
        seconds: float = 20.0,
    ):
        self._config, self._mesh, self._batches, self._seconds = config, mesh, batches, seconds
        self._compiler, self._limit_bytes = tune.Compiler(config, mesh, limit_bytes), limit_bytes
        self._say = say
        self._state: state.TrainState | None = None
        self._frozen: Variables = {}
        self.done: list[tune.Trial] = []
        self.stop = threading.Event()

    def trial(self, candidate: tune.Candidate) -> tune.Trial:
        """Compiles a candidate and times it if it fits. If it fails, the trial's note says why, and the search can go on."""
        trial = tune.Trial(candidate)
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
        self._say(f"{candidate}: {shown}")
        self.done.append(trial)
        return trial

    def _try(self, trial: tune.Trial) -> None:
        compiled, trial.predicted_bytes = self._compiler.compile(trial.candidate)
        if compiled is None or trial.predicted_bytes > self._limit_bytes:
            trial.note = "does not fit"
            return
        before = _peak_bytes()
        self._step(compiled)  # not counted: memory is being laid out
        trial.tokens_per_second = self._speeds([compiled])[0]
        after = _peak_bytes()
        trial.measured_bytes = after if after > before else None  # an earlier trial's peak may be higher

    def rematch(self, trials: list[tune.Trial], start: tune.Candidate) -> list[tune.Trial]:
        """Times the fastest trials and `start`'s again, in turns, as speeds drift. Returns these by speed, then the others."""
        ran = sorted((t for t in trials if t.tokens_per_second), key=slowness)
        again = [t for i, t in enumerate(ran) if i < FINALISTS or t.candidate == start]
        if len(again) > 1:
            programs = [self._compiler.compile(t.candidate)[0] for t in again]
            for compiled in programs:
                self._step(compiled)
            for trial, speed in zip(again, self._speeds(programs), strict=True):
                trial.tokens_per_second, trial.note = speed, "in turns"
        rest = [t for t in trials if t not in again]
        return sorted(again, key=slowness) + sorted(rest, key=slowness)

    def _speeds(self, programs: list[jax.stages.Compiled]) -> list[float]:
        """Returns each program's tokens a second, by the median time of its steps. The programs run a step each in turn."""
        train = self._config.train
        steps = [functools.partial(self._step, compiled) for compiled in programs]
        seconds = medians(steps, self._config.tune.steps, self._seconds * len(programs))
        return [train.batch_size * train.seq_len / step_s for step_s in seconds]

    def _step(self, compiled: jax.stages.Compiled) -> float:
        """Runs one step; returns its seconds, including the loader's time for the batch."""
        if self.stop.is_set():
            raise KeyboardInterrupt
        began = time.perf_counter()
        if self._state is None:
            self._frozen = {}  # frees earlier weights first
            self._state, self._frozen = lower.parts_of(self._config, self._mesh).create()
        before, self._state = self._state, None  # its memory is donated to the step
        with jax.set_mesh(self._mesh):
            self._state, metrics = compiled(self._frozen, before, next(self._batches))
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


def slowness(trial: tune.Trial) -> float:
    return -(trial.tokens_per_second or 0)


def row(config: Config, trial: tune.Trial) -> dict[str, typing.Any]:
    """Returns a trial as a row of the table."""
    speed, per_token, h = trial.tokens_per_second, flops.of(config), config.hardware
    peak = h.peak_tflops or flops.peak_tflops(jax.devices()[0].device_kind)
    share = 1e12 * peak * jax.device_count() if peak and speed else None
    sizes = {"predicted": trial.predicted_bytes, "measured": trial.measured_bytes}
    gigabytes = {name: float(f"{size / 1e9:.3g}") if size else None for name, size in sizes.items()}
    return {
        **dataclasses.asdict(trial.candidate),
        "tokens_per_second": round(speed) if speed else None,
        "mfu_palm": round(speed * per_token.palm / share, 4) if share else None,
        "mfu_causal": round(speed * per_token.causal / share, 4) if share else None,
        "predicted_gb": gigabytes["predicted"],
        "measured_gb": gigabytes["measured"],
        "usd_per_billion_tokens": round(h.usd_per_hour / 3600 / speed * 1e9, 2) if speed and h.usd_per_hour else None,
        "note": trial.note,
    }


def readable(table: list[dict[str, typing.Any]]) -> list[dict[str, typing.Any]]:
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
