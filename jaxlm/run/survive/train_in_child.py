"""Trains a config in a child process, with its output in a file, and reads the result. For `jaxlm ladder`."""

import contextlib
import dataclasses
import math
import os
import pathlib
import sys
import typing

from jaxlm import config as config_lib
from jaxlm.config import Config, ConfigError, config_files
from jaxlm.run import ledger, metrics, workdir
from jaxlm.run.survive import supervisor

OUTPUT = "output.txt"  # in the run's folder: all that the process says and prints
_LEFT = ("optim.lr", "optim.b2", "model.vocab_size")  # 0 = by rule, by the data
# Keys that change where or how fast a run is trained, not its result.
_OF_THE_MACHINE = ("optim.offload", "model.offload", "model.attention")
_OF_THE_MACHINE += ("model.remat", "model.scan_layers", "model.fuse_projections")


@dataclasses.dataclass(frozen=True)
class Result:
    """The measurements of a run that has done all its steps. `loss`: held-out; None if it is not finite."""

    loss: float | None
    bits_per_byte: dict[str, float]
    bytes_per_token: float | None
    hours: float


def train(config: Config) -> int:
    """Trains or resumes in `workdir`, supervised; returns the exit code. Raises ConfigError if another run is there."""
    folder = workdir.workdir(config.workdir)
    _check_same(folder, config)
    command = [sys.executable, "-m", "jaxlm.main", f"--config.workdir={config.workdir}"]
    with open(folder / OUTPUT, "ab") as output:
        return supervisor.Supervisor(command, config, output=output).run()


def last_words(folder: pathlib.Path) -> str:
    """Returns the last line that the run's process in a folder wrote; "" if there is none."""
    lines = [""]
    with contextlib.suppress(FileNotFoundError), open(folder / OUTPUT, "rb") as file:
        file.seek(max(file.seek(0, os.SEEK_END) - 4096, 0))
        lines = [line.strip() for line in file.read().decode("utf-8", "replace").split("\n")]
    return next(filter(None, reversed(lines)), "")


def result(config: Config, mixture: dict[str, float]) -> Result | None:
    """Returns the result of the run in `workdir`; None if it is not done. Raises ConfigError if another run is there."""
    folder, steps = pathlib.Path(config.workdir), config.train.steps
    path = folder / "metrics.jsonl"
    if not path.is_file():
        return None
    _check_same(folder, config)
    losses = metrics.held_out_losses(path, ledger.read(folder)["rollbacks"])
    if steps not in losses:
        return None
    records = metrics.read(path)
    last = records[steps]
    by_source = {source: last.get(f"val/{source}/bits_per_byte") for source in mixture}
    bits = {source: per_byte for source, per_byte in by_source.items() if per_byte}
    length = {source: last[f"val/{source}/loss"] / math.log(2) / per_byte for source, per_byte in bits.items()}
    weight = sum(mixture[source] for source in bits)
    mean = sum(mixture[source] * length[source] for source in bits) / weight if weight else None
    loss = losses[steps] if math.isfinite(losses[steps]) else None
    wall_s = max(record.get("wall_s") or 0.0 for record in records.values())
    return Result(loss, bits, mean, wall_s / 3600)


def _check_same(folder: pathlib.Path, config: Config) -> None:
    """Raises ConfigError if the folder's run has another value of a `_trained` key. A 0 that a rule fills fits any value."""
    try:
        begun = config_lib.resolve(config_files.from_run(folder / "config.json"))
    except (OSError, ConfigError):
        return  # none yet, or training says what is wrong
    ratio = config.optim.matrix_lr_ratio or begun.optim.matrix_lr_ratio
    config = config_lib.with_keys(config, optim={"rates": config.optim.with_matrices(ratio)})
    saved = _trained(begun)
    for key, now in _trained(config).items():
        if saved[key] != now and not (now == 0 and key in _LEFT):
            raise ConfigError(f"{folder} holds another run, with {key}={saved[key]} where now it is {now}: delete it")


def _trained(config: Config) -> dict[str, typing.Any]:
    """Returns key -> value of all keys on which the result of a run on the same data depends."""
    whole = dataclasses.asdict(config)
    keys = {"train": ("steps", "batch_size", "seq_len"), "loss": ("z_loss",)}
    keys |= {section: whole[section] for section in ("model", "optim")}
    flat = {f"{section}.{key}": whole[section][key] for section in keys for key in keys[section]}
    return {"seed": config.seed} | {key: flat[key] for key in flat if key not in _OF_THE_MACHINE}
