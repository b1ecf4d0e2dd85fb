"""Runs any kind of training: connects a task to the one loop, and tries again after a rollback. Run it again to resume."""

import contextlib
import dataclasses
import pathlib
import time

import jax

from jaxlm import processes
from jaxlm.config import Config
from jaxlm.models import hardware
from jaxlm.plan import tune
from jaxlm.processes import say, together
from jaxlm.programs.attempt import Attempt
from jaxlm.programs.task import Ready, Task
from jaxlm.train import books, ledger, loop, workdir
from jaxlm.train.clock import Clock, Pulse

EXIT_CODES = {loop.DONE: 0, loop.FAILED: 1, loop.REFUSED: 2, loop.STOPPED: 3, loop.PREEMPTED: 4}


def run(config: Config, task: Task) -> int:
    """Trains to `train.steps`; returns the exit code."""
    pulse = Pulse.of_parent()
    clock = Clock(pulse=pulse, since=books.begun())
    mesh = processes.start(config.hardware, config.distributed, config.mesh, config.model.dtype)
    platform = jax.devices()[0].platform
    asked, config = config, dataclasses.replace(config, model=hardware.for_platform(config.model, platform))
    folder = together(lambda: workdir.check(config, mesh))
    with contextlib.ExitStack() as stack:
        if held := together(lambda: ledger.lock(folder), first_only=True):
            stack.callback(held.close)
        data = task.data(config)
        config = tune.fit(config, mesh, say, task.parts)
        ready = Ready(config, task.parts(config, mesh), data)
        train_step = ready.parts.jit()
        while (ending := Attempt(task, ready, asked, folder, train_step, clock).run()).code == loop.ROLL_BACK:
            clock = Clock(pulse=pulse, since=time.monotonic())
        code, why = EXIT_CODES[ending.code], ending.why or ending.code
        together(lambda: ledger.end(folder, step=clock.step, code=code, why=why), first_only=True)
    _say_ending(ending, folder)
    return code


def _say_ending(ending: loop.Ending, folder: pathlib.Path) -> None:
    if ending.why:
        say(ending.why)
    words = {loop.PREEMPTED: "interrupted, the state is saved"}.get(ending.code, ending.code)
    goes_on = ending.code in (loop.PREEMPTED, loop.FAILED)
    say(f"{words}: {folder}" + ("; the same command goes on" if goes_on else ""))
