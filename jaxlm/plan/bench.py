"""Times candidates of `tune` on the device at hand, with the optimizer state and the loader in place."""

import contextlib
import dataclasses
import statistics
import threading
import time
import typing

import jax
from jax.sharding import Mesh

from jaxlm import config_files
from jaxlm.config import Config, ConfigError, RunError
from jaxlm.objectives import lm
from jaxlm.plan import flops, tune
from jaxlm.step import parts, state

FINALISTS = 3  # so many of the fastest run again, in turns


class Bench:
    """Compiles and times candidates, one state and one loader carried through all of them."""

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        limit_bytes: float,
        batches: typing.Iterator[typing.Any],
        say: typing.Callable[[str], None],
    ):
        self._config, self._mesh, self._batches = config, mesh, batches
        self._compiler = tune.Compiler(config, mesh, limit_bytes)
        self._peak = PeakMemory()
        self._say = say
        self._state: state.TrainState | None = None
        self.done: list[tune.Trial] = []
        self.stop = threading.Event()  # set, the next step raises KeyboardInterrupt

    def trial(self, candidate: tune.Candidate) -> tune.Trial:
        """A candidate's needs, and its speed where it fits; one that can't be compiled or run costs no other."""
        trial = tune.Trial(candidate)
        try:
            self._try(trial)
        except (ConfigError, RunError):  # of the data
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
        if not self._compiler.fits(trial.candidate):
            trial.note = "does not fit"
            return
        self._peak.reset()
        self._step(compiled)  # not counted: memory is being laid out
        trial.tokens_per_second = self._speeds([compiled])[0]
        trial.measured_bytes = self._peak.read()

    def rematch(self, trials: list[tune.Trial], start: tune.Candidate) -> list[tune.Trial]:
        """All trials, the fastest first, after the best of them and the config's own ran again, a step of each in turn.

        A machine's speed may have moved between two trials; it is the same for those that alternate.
        """
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

    def _speeds(self, programs: list[typing.Any]) -> list[float]:
        """Tokens a second of each program by its median step, a step of each in turn: `tune.steps` of them, or as many as
        `tune.step_seconds` (for each program) lets begin, two at least."""
        t, seconds = self._config.tune, [[] for _ in programs]
        end = time.perf_counter() + t.step_seconds * len(programs)
        while len(seconds[0]) < t.steps and (len(seconds[0]) < 2 or time.perf_counter() < end):
            for times, compiled in zip(seconds, programs, strict=True):
                times.append(self._step(compiled))
        tokens = self._config.train.batch_size * self._config.train.seq_len
        return [tokens / statistics.median(times) for times in seconds]

    def _step(self, compiled: typing.Any) -> float:
        """Seconds of one step, the batch from the loader included."""
        if self.stop.is_set():
            raise KeyboardInterrupt
        began, now = time.perf_counter(), self._state or parts.make(self._config, self._mesh, lm.make).create()[0]
        self._state = None  # its memory is given to the step
        with jax.set_mesh(self._mesh):
            self._state, metrics = compiled({}, now, next(self._batches))
        jax.block_until_ready(metrics)
        return time.perf_counter() - began


def slowness(trial: tune.Trial) -> float:
    """By which trials sort with the fastest first."""
    return -(trial.tokens_per_second or 0)


def row(config: Config, trial: tune.Trial) -> dict[str, typing.Any]:
    """What a person compares of a trial, of a config with `hardware` set."""
    c, speed = trial.candidate, trial.tokens_per_second
    per_token = flops.flops_per_token(config.model, config.train.seq_len)
    peak = config.hardware.peak_tflops or flops.peak_tflops(jax.devices()[0].device_kind)
    share = 1e12 * peak * jax.device_count() if peak and speed else None
    dollars = config.hardware.usd_per_hour / 3600 / speed * 1e9 if speed and config.hardware.usd_per_hour else None
    cells = {
        **dataclasses.asdict(c),
        "tokens_per_second": round(speed) if speed else None,
        "mfu_palm": round(speed * per_token.palm / share, 4) if share else None,
        "mfu_causal": round(speed * per_token.causal / share, 4) if share else None,
        "predicted_gb": float(f"{trial.predicted_bytes / 1e9:.3g}") if trial.predicted_bytes else None,
        "measured_gb": float(f"{trial.measured_bytes / 1e9:.3g}") if trial.measured_bytes else None,
        "usd_per_billion_tokens": round(dollars, 2) if dollars else None,
        "note": trial.note,
    }
    return cells


def readable(table: list[dict[str, typing.Any]]) -> list[dict[str, typing.Any]]:
    """Without columns in which nothing stands, "-" for what is not there."""
    shown = [name for name in (table[0] if table else ()) if any(line[name] not in (None, "") for line in table)]
    return [{name: "-" if line[name] is None else line[name] for name in shown} for line in table]


class PeakMemory:
    """The most memory that was in use since `reset`: of a device by its own account, on a CPU of this whole process."""

    def __init__(self):
        self._before = 0

    def reset(self) -> None:
        """Begins anew. A device's own account only ever grows."""
        self._before = self._device()
        with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as f:
            f.write("5")  # Linux: the process's own high-water mark

    def read(self) -> int | None:
        """Bytes; None for a device that had used more before."""
        if jax.default_backend() == "cpu":
            return tune.proc_bytes("/proc/self/status", "VmHWM")
        return peak if (peak := self._device()) > self._before else None

    @staticmethod
    def _device() -> int:
        return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
