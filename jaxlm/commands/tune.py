"""`jaxlm tune`: times settings of the train step on this device, with the real model, optimizer state and data."""

import argparse
import contextlib
import dataclasses
import itertools
import pathlib
import shlex
import tempfile
from collections.abc import Iterator

import jax
from jax.sharding import Mesh

from jaxlm.config import Config, ConfigError
from jaxlm.data.batches import loader
from jaxlm.data.batches.open import make_data, open_order
from jaxlm.data.shards import vocabulary
from jaxlm.devices import processes, sharding
from jaxlm.devices.processes import say
from jaxlm.host import console, interrupts
from jaxlm.host.console import gigabytes, print_table
from jaxlm.models import hardware
from jaxlm.plan import lower, settle
from jaxlm.plan.tune import machines, tune
from jaxlm.run.workdir import workdir


def run(config: Config, args: argparse.Namespace) -> int:
    """Prints the trials, fastest first, and writes the settings of the fastest to a file of overrides."""
    mesh = processes.start(config.hardware, config.distributed, config.mesh, config.model.dtype)
    if jax.process_count() > 1:
        raise ConfigError("jaxlm tune runs in one process: tune on one host, and train on all with what it finds")
    if config.data.dir and not config.model.vocab_size:
        with contextlib.suppress(ConfigError):  # opening the data later says what is wrong
            make_data(config.data, config.prepare, config.engine, 0, say)
    config = settle.sized(config, say)
    backends = hardware.backends(config.model, jax.devices()[0].platform)
    config = settle.on_platform(config, jax.devices()[0].platform).runs
    limit = tune.memory_limit(config.tune.memory_gb)
    values = tune.candidates(config, backends, sharding.batch_ways(mesh))
    check(config, values, backends, mesh)
    out = output(config, args)
    fitted = tune.fit(config, mesh, say)
    start = tune.own(config, fitted.train.microbatch_size, fitted.model.remat)
    with contextlib.ExitStack() as stack:
        runner = tune.Bench(config, mesh, limit, stack.enter_context(batches(config, mesh)), say)
        stack.enter_context(interrupts.gently(runner.stop.set))  # after the step or compilation that runs
        t = config.tune
        try:
            trials = tune.search(values, start, runner.trial, exhaustive=t.exhaustive, max_seconds=t.max_seconds)
            with console.working("the fastest again, in turns"):
                trials = runner.rematch(trials, start)
        except KeyboardInterrupt:
            done = "the results below are of the candidates tried so far" if runner.done else "nothing was timed yet"
            say(f"stopped: {done}")
            trials = sorted(runner.done, key=tune.slowness)
    table = [tune.row(config, trial) for trial in trials]
    print_table(table if args.json else tune.readable(table), args.json)
    best = trials[0] if trials and trials[0].tokens_per_second else None
    if best:
        own = next((trial for trial in trials if trial.candidate == start and trial.tokens_per_second), None)
        gain = f", {best.tokens_per_second / own.tokens_per_second:.2f} times the config's own" if own else ""
        say(f"fastest: {' '.join(best.candidate.overrides())}{gain}")
        setting = machines.key(best.candidate.applied(config), mesh.shape)
        machines.record(jax.devices()[0].device_kind, mesh.size, setting, best.tokens_per_second, "tune")
        out.write_text("\n".join(best.candidate.overrides()) + "\n")
        say(f"train with it: {command(config, args, out)}")
    elif not runner.stop.is_set():
        say(f"nothing ran in {gigabytes(limit, 1)} GB and tune.max_seconds={t.max_seconds:g}: see the notes above")
    return 4 if runner.stop.is_set() else 0 if best else 1


def command(config: Config, args: argparse.Namespace, out: pathlib.Path) -> str:
    """Returns the command that trains with the settings in `out`."""
    own = [f"--config.{key}" for key in args.overrides if not key.startswith(("workdir=", "tune."))]
    workdir = shlex.quote(config.workdir) if config.workdir else "DIR"
    folder = [] if args.config == config.workdir else [f"--config.workdir={workdir}"]  # a run's folder says it already
    words = [shlex.quote(args.config), *folder, *map(shlex.quote, own)]
    return f"jaxlm train {' '.join(words)} $(cat {shlex.quote(str(out))})"


def output(config: Config, args: argparse.Namespace) -> pathlib.Path:
    """Returns the file to write the overrides to. Raises ConfigError, before anything is timed, if it can't be written."""
    folder = workdir(config.workdir) if config.workdir else pathlib.Path()
    out = pathlib.Path(args.out or folder / "tuned.txt")
    there = out.exists()
    try:
        out.open("a").close()
    except OSError as error:
        raise ConfigError(f"{out} can't be written: {error.strerror}; give another file by --out=FILE") from error
    if not there:
        out.unlink()
    return out


def check(config: Config, values: dict[str, tuple], backends: list[str], mesh: Mesh) -> None:
    """Raises ConfigError if the model, the mesh or this device does not support one of the values to try."""
    ways = sharding.batch_ways(mesh)
    for backend in values["attention"]:
        if backend not in backends:
            raise ConfigError(f"config.tune.attention: {backend!r} is not one of {', '.join(backends)}")
    for size in values["microbatch_size"]:
        if config.train.batch_size % size or size % ways:
            raise ConfigError(
                f"config.tune.microbatch_sizes: {size} must divide train.batch_size={config.train.batch_size} and be "
                f"divisible by the mesh's data x fsdp = {ways} devices"
            )
    if empty := [name for name, choices in values.items() if not choices]:
        raise ConfigError(f"nothing to try for {empty[0]}: config.tune names no value for it")


@contextlib.contextmanager
def batches(config: Config, mesh: Mesh) -> Iterator[Iterator[dict[str, jax.Array]]]:
    """Yields batches on the mesh: from the config's data, or random tokens (without data, or for examples)."""
    t = config.train
    if config.program != "pretrain":
        yield itertools.repeat(tune.random_batch(lower.parts_of(config, mesh)))
        return
    with contextlib.ExitStack() as stack:
        if not config.data.dir:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            config = dataclasses.replace(config, data=dataclasses.replace(config.data, dir=folder))
        try:
            make_data(config.data, config.prepare, config.engine, vocabulary.required(config), say)
            order = open_order(config)
            local = sharding.local_rows(mesh, t.batch_size)
            source = loader.TrainLoader(order, row_indices=local)
            stack.callback(source.close)
            batches_of_kind = (sharding.to_global(batch, mesh, t.batch_size) for batch in source)
        except ConfigError as error:
            say(f"random tokens instead of data ({error})")
            batches_of_kind = itertools.repeat(tune.random_batch(lower.parts_of(config, mesh)))
        yield batches_of_kind
