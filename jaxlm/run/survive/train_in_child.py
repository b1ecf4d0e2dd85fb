"""Trains a config in a child process, with its output in a file, and reads the result. For `jaxlm ladder` and `jaxlm sweep`."""

import collections
import contextlib
import dataclasses
import math
import os
import pathlib
import signal
import sys
from collections.abc import Callable, Collection, Sequence
from concurrent import futures

import jax

from jaxlm.config import Config, ConfigError, config_files, resolve, with_keys
from jaxlm.data.batches import which_data
from jaxlm.devices import processes
from jaxlm.host.console import hours, say, working
from jaxlm.run import ledger, metrics, workdir
from jaxlm.run.survive import supervisor

_LOOK_S = 1.0  # between two looks at the runs that train
OUTPUT = "output.txt"  # in the run's folder: all that the process says and prints
_LEFT = ("optim.lr", "optim.b2", "model.vocab_size")  # 0 = by rule, by the data
# Keys that change where or how fast a run is trained, not its result.
_OF_THE_MACHINE = ("optim.offload", "model.offload", "model.attention")
_OF_THE_MACHINE += ("model.remat", "model.scan_layers", "model.fuse_projections")
# Sections whose other keys change the result.
_WHOLE = ("model", "optim", "adapter", "dpo", "policy", "rollout", "reward", "replay")


@dataclasses.dataclass(frozen=True)
class Result:
    """The measurements of a run that has done all its steps. `loss`: held-out, or another metric; None if it is not finite."""

    loss: float | None
    bits_per_byte: dict[str, float]
    bytes_per_token: float | None
    hours: float


def supervised(config: Config) -> supervisor.Supervisor:
    """Returns what trains or resumes a config in `workdir`. Raises ConfigError if another run is there."""
    folder = workdir.workdir(config.workdir)
    _check_same(folder, config)
    command = [sys.executable, "-m", "jaxlm.main", f"--config.workdir={config.workdir}"]
    return supervisor.Supervisor(command, config, output=folder / OUTPUT)


# Of a run in a file: loss (None until it is done), why (it has none; or ""), hours, planned_hours.
Entry = dict
After = Callable[[Entry, Config, str], None]


def check(config: Config, word: str | None, overrides: Sequence[str], verb: str) -> None:
    """Leaves the devices to the runs. Raises ConfigError if there can be no runs one after another here, or no data."""
    supervisor.wanted("on")  # or says that this needs Linux
    if processes.several(config.distributed):
        raise ConfigError(f"jaxlm {verb} trains in one process: start it on one host, without config.distributed")
    which_data.check(config, word, overrides, say)
    jax.config.update("jax_platforms", "cpu")


def train_all(
    runs: Sequence[Entry],
    config_of: Callable[[Entry], Config],
    after: After,
    refused: Callable[[Entry], str] = lambda run: "",
    cores: Sequence[Collection[int]] = (),
    stopped: Callable[[Entry, Config], str] = lambda run, config: "",
) -> int:
    """Trains the runs that are not done, in their order; returns the exit code.

    Args:
      after: puts the result of a run into its entry, and writes it. It gets a text if the run stopped itself: why.
      refused: returns why a run is not begun, which ends it all with code 3 once those that train are done; "" if it is begun.
      cores: as many runs train at a time as there are sets of cores, each on its own; (): one, on all.
      stopped: asked each second of each run that trains; returns why it is to stop, or "".
    """
    waiting, cores = collections.deque(run for run in runs if not done(run)), cores or [os.sched_getaffinity(0)]
    own = iter(cores)
    running: dict[supervisor.Supervisor, tuple[futures.Future[int], Entry]] = {}
    code = ended = 0
    with (
        working("training", len(waiting), "runs", end=False, quiet=True) as tell,
        futures.ThreadPoolExecutor(len(cores), "run", lambda: os.sched_setaffinity(0, next(own))) as pool,
        supervisor.signals(running) as asked,
    ):
        while running or (waiting and not code and not asked):
            while waiting and not code and not asked and len(running) < len(cores):
                if line := refused(waiting[0]):
                    say(f"{_place(runs, waiting[0])}: not begun: {line}")
                    code = 3
                    break
                begun = supervised(config_of(waiting[0]))
                if not asked:  # meanwhile
                    running[begun] = pool.submit(begun.run), waiting.popleft()
            tell(ended, ", ".join(run["name"] for _, run in running.values()))
            futures.wait([future for future, _ in running.values()], _LOOK_S, futures.FIRST_COMPLETED)
            for each, (future, run) in [*running.items()]:
                if future.done():
                    del running[each]
                    failed = _ended(runs, run, each.config, future.result(), after, len(cores))
                    ended, code = ended + 1, code or failed
                elif why := "" if run["why"] else stopped(run, each.config):
                    run["why"] = why
                    each.on_signal(signal.SIGTERM)
    if asked and waiting and not code:  # it came as a run ended, which took no notice
        say("interrupted between two runs; the same command resumes")
        return 4
    return code


def _ended(runs: Sequence[Entry], run: Entry, config: Config, code: int, after: After, at_once: int) -> int:
    """Takes the result of a run whose process ended with `code`, and says it; returns 0 if another may begin, else the code."""
    what, place = _place(runs, run), pathlib.Path(config.workdir)
    if code == 4 and not run["why"]:
        say(f"{what}: interrupted; the same command resumes")
        return code
    after(run, config, last_words(place) if code == 3 else "")
    if not done(run):
        say(f"{what}: ended with code {code}: {last_words(place)} (its output: {place / OUTPUT})")
        return code or 1
    left = sum(other["planned_hours"] or 0.0 for other in runs if not done(other)) / at_once
    came = run["why"] if run["loss"] is None else f"came to {run['loss']:.4f}"
    say(f"{what}: {came}, {hours(run['hours'])}" + (f"; about {hours(left)} left" if left else ""))
    return 0


def _place(runs: Sequence[Entry], run: Entry) -> str:
    return f"run {runs.index(run) + 1} of {len(runs)}, {run['name']}"


def done(run: Entry) -> bool:
    return run["loss"] is not None or bool(run["why"])


def last_words(folder: pathlib.Path) -> str:
    """Returns the last line that the run's process in a folder wrote; "" if there is none."""
    lines = [""]
    with contextlib.suppress(FileNotFoundError), open(folder / OUTPUT, "rb") as file:
        file.seek(max(file.seek(0, os.SEEK_END) - 4096, 0))
        lines = [line.strip() for line in file.read().decode("utf-8", "replace").split("\n")]
    return next(filter(None, reversed(lines)), "")


def result(config: Config, mixture: dict[str, float], metric: str = metrics.HELD_OUT) -> Result | None:
    """Returns the result of the run in `workdir`; None if it is not done. Raises ConfigError if another run is there."""
    folder, steps = pathlib.Path(config.workdir), config.train.steps
    path = folder / "metrics.jsonl"
    if not path.is_file():
        return None
    _check_same(folder, config)
    losses = metrics.held_out_losses(path, ledger.read(folder)["rollbacks"], metric)
    if steps not in losses:
        return None
    last = metrics.read(path)[steps]
    bits = {source: per_byte for source in mixture if (per_byte := last.get(f"val/{source}/bits_per_byte"))}
    length = {source: last[f"val/{source}/loss"] / math.log(2) / per_byte for source, per_byte in bits.items()}
    weight = sum(mixture[source] for source in bits)
    mean = sum(mixture[source] * length[source] for source in bits) / weight if weight else None
    loss = losses[steps] if math.isfinite(losses[steps]) else None
    return Result(loss, bits, mean, spent(folder))


def spent(folder: pathlib.Path) -> float:
    """Returns the hours that the run in a folder has taken so far."""
    records = metrics.records(folder / "metrics.jsonl")
    return max((record.get("wall_s") or 0.0 for record in records), default=0.0) / 3600


def _check_same(folder: pathlib.Path, config: Config) -> None:
    """Raises ConfigError if the folder's run has another value of a `_trained` key. A 0 that a rule fills fits any value."""
    try:
        begun = resolve(config_files.from_run(folder / "config.json"))
    except (OSError, ConfigError):
        return  # none yet, or training says what is wrong
    ratio = config.optim.matrix_lr_ratio or begun.optim.matrix_lr_ratio
    config = with_keys(config, optim={"rates": config.optim.with_matrices(ratio)})
    saved = _trained(begun)
    for key, now in _trained(config).items():
        if saved[key] != now and not (now == 0 and key in _LEFT):
            raise ConfigError(f"{folder} holds another run, with {key}={saved[key]} where now it is {now}: delete it")


def _trained(config: Config) -> dict:
    """Returns key -> value of all keys on which the result of a run on the same data depends."""
    whole = dataclasses.asdict(config)
    keys = {"train": ("steps", "batch_size", "seq_len"), "loss": ("z_loss",)}
    keys |= {section: whole[section] for section in _WHOLE}
    flat = {f"{section}.{key}": whole[section][key] for section in keys for key in keys[section]}
    return {"seed": config.seed} | {key: flat[key] for key in flat if key not in _OF_THE_MACHINE}
