"""Runs any kind of training: connects a task to the one loop, and tries again after a rollback. Run it again to resume."""

import contextlib
import dataclasses
import functools
import pathlib
import shlex
import time

import jax

from jaxlm import console, processes
from jaxlm.config import Config, older
from jaxlm.data import vocabulary
from jaxlm.eval import benchmarks
from jaxlm.models import hardware
from jaxlm.plan import admission, machines, tune
from jaxlm.processes import from_first, say, together
from jaxlm.programs import pages
from jaxlm.programs.attempt import Attempt
from jaxlm.programs.task import Ready, Task
from jaxlm.train import books, ledger, loop, metrics, mirrors, signals, start, supervised, workdir
from jaxlm.train.checkpoints.mirror import Mirror
from jaxlm.train.clock import COMPILE, EVALUATE, MIRROR, RESTORE, Clock, Pulse
from jaxlm.train.scores import Scores

EXIT_CODES = {loop.DONE: 0, loop.FAILED: 1, loop.REFUSED: 2, loop.STOPPED: 3, loop.PREEMPTED: 4}


def run(config: Config, task: Task) -> int:
    """Trains to `train.steps`; returns the exit code."""
    older.check_trains(config)
    pulse = Pulse.of_parent()
    clock = Clock(pulse=pulse, since=books.begun())
    mesh = processes.start(config.hardware, config.distributed, config.mesh, config.model.dtype)
    platform = jax.devices()[0].platform
    settled = hardware.for_platform(config.model, platform, config.mesh.context)
    asked, config = config, dataclasses.replace(config, model=settled)
    folder = together(lambda: workdir.workdir(config.workdir))
    with contextlib.ExitStack() as stack:
        if held := together(lambda: ledger.lock(folder), first_only=True):
            stack.callback(held.close)
            console.keep(folder / console.LOG)
        scores = Scores(config.checkpoint)
        with clock.spend(MIRROR):
            alive = functools.partial(clock.begin, MIRROR)
            mirror = together(lambda: mirrors.of_run(config, folder, scores, alive), first_only=True)
        together(lambda: workdir.check(config, mesh))
        config = workdir.as_begun(config, folder)
        asked = dataclasses.replace(asked, eval=config.eval, optim=config.optim)
        scores.take(*from_first(lambda: scores.read(folder).pairs()))
        asked_for = benchmarks.find(config.eval)
        log = start.Log(folder, clock, config.train, config.hardware)
        stack.push(log.closed_by)
        data = task.data(config)
        with clock.spend(RESTORE, str(folder / "checkpoints")):
            together(
                lambda: workdir.check_same_batches(folder, data.fingerprint(), getattr(data.data, "as_before", ""))
            )
        together(lambda: pages.of_data(config), first_only=True)
        asked, config = (vocabulary.with_size(c, data.data.vocab_size) for c in (asked, config))
        with clock.spend(COMPILE):
            config = tune.fit(
                config, mesh, say, task.parts, lambda: from_first(lambda: workdir.has_checkpoints(folder))
            )
        ready = Ready(config, task.parts(config, mesh), data, asked_for)
        program = admission.Once(ready.parts, task.parts)
        stop = signals.StopSignal(lambda: clock.activity)
        while True:
            ending = Attempt(task, ready, asked, folder, program, clock, log, scores, stop, mirror).run()
            if ending.code != loop.ROLL_BACK:
                break
            ended = {"step": clock.step, "code": 3, "why": ending.why, "cause": ending.cause}
            together(functools.partial(ledger.end, folder, **ended), first_only=True)
            if stop.alone():
                ending = loop.Ending(loop.PREEMPTED, ending.why)
                break
            clock = Clock(pulse=pulse, since=time.monotonic())
            log = start.Log(folder, clock, config.train, config.hardware)
        if ending.code == loop.PREEMPTED and not ending.why and supervised.orphaned():
            ending = dataclasses.replace(ending, why="the supervisor was gone")
        if ending.cause == loop.MOVED:
            say(ending.why)
        else:
            _conclude(ending, clock, folder, config, mesh, mirror, task.next_command)
    return EXIT_CODES[ending.code]


def _conclude(
    ending: loop.Ending,
    clock: Clock,
    folder: pathlib.Path,
    config: Config,
    mesh: jax.sharding.Mesh,
    mirror: Mirror | None,
    next_command: str,
) -> None:
    """Writes down and says how the run ended, and waits for the mirror."""
    code = EXIT_CODES[ending.code]
    together(lambda: _write_down(ending, code, clock, folder, config), first_only=True)
    _say_ending(ending, folder, next_command)
    with clock.spend(MIRROR):
        together(lambda: _close(mirror, folder, config.checkpoint.mirror_timeout_s), first_only=True)
    if ending.code == loop.DONE and jax.process_index() == 0:
        _record_speed(config, mesh, folder)


def _write_down(ending: loop.Ending, code: int, clock: Clock, folder: pathlib.Path, config: Config) -> None:
    """Writes into run.json how the run ended, then its page."""
    ledger.end(folder, step=clock.step, code=code, why=ending.why or ending.code, cause=ending.cause)
    with clock.spend(EVALUATE, "report"):
        pages.of_run(config, folder)


def _close(mirror: Mirror | None, folder: pathlib.Path, seconds: float) -> None:
    """Waits for the mirror, and writes into run.json if it holds all."""
    if mirror:
        ledger.note(folder, mirrored=mirror.close(seconds))


def _record_speed(config: Config, mesh: jax.sharding.Mesh, folder: pathlib.Path) -> None:
    """Keeps the speed of this machine for `jaxlm doctor`: the median of what was logged."""
    speeds = []
    with contextlib.suppress(OSError):  # the run is done: its speed is worth no exit code
        records = metrics.records(folder / "metrics.jsonl")
        speeds = sorted(r["tokens_per_second"] for r in records if r.get("tokens_per_second"))
    if speeds:
        key = machines.key(config, mesh.shape)
        machines.record(jax.devices()[0].device_kind, mesh.size, key, speeds[len(speeds) // 2], "train")


def _say_ending(ending: loop.Ending, folder: pathlib.Path, next_command: str) -> None:
    if ending.why:
        say(ending.why)
    words = {loop.PREEMPTED: "interrupted, the state is saved"}.get(ending.code, ending.code)
    goes_on = ending.code in (loop.PREEMPTED, loop.FAILED)
    say(f"{words}: {folder}" + ("; the same command goes on" if goes_on else ""))
    for line in pages.to_open(folder) if not goes_on else ():
        say(line)
    if ending.code == loop.DONE:
        name = f"./{folder}" if str(folder).startswith("-") else str(folder)
        say(f"next: {next_command.format(shlex.quote(name))}")
