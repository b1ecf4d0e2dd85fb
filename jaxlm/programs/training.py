"""Runs any kind of training: connects a task's objective, data and evaluation to the one loop. Run it again to resume."""

import contextlib
import dataclasses
import pathlib
import typing
from collections.abc import Callable

import jax
from jax.sharding import AbstractMesh, Mesh

from jaxlm import processes
from jaxlm.config import Config
from jaxlm.data.rows import check_fingerprint
from jaxlm.data.shards import DataDir
from jaxlm.eval import samples
from jaxlm.models import hardware
from jaxlm.objectives import base
from jaxlm.plan import tune
from jaxlm.processes import from_first, say, together
from jaxlm.step import parts as parts_lib
from jaxlm.step.state import TrainState
from jaxlm.train import books, hooks, ledger, loop, metrics, profile, signals, start, watches, workdir
from jaxlm.train.checkpoints.store import Checkpointer
from jaxlm.train.clock import RESTORE, SAVE, Clock, Pulse

EXIT_CODES = {loop.DONE: 0, loop.FAILED: 1, loop.REFUSED: 2, loop.ROLL_BACK: 3, loop.STOPPED: 3, loop.PREEMPTED: 4}


class Data(typing.Protocol):
    """The data that a run trains on; `data` holds the tokenizer."""

    data: DataDir

    def fingerprint(self) -> dict[str, str]:
        """Returns everything that decides the batches. A run resumes only if its fingerprint is the same."""


@dataclasses.dataclass(frozen=True)
class Ready:
    """Everything from which a task makes its batches and evaluations."""

    config: Config
    parts: parts_lib.Parts
    data: Data


@dataclasses.dataclass(frozen=True)
class Task:
    """One kind of training.

    Attributes:
      objective: (model, config) -> the objective to minimise.
      data: config -> the opened data. It makes the data first if there is none. Called on all processes.
      batches: (ready, done) -> the batches of the steps that follow after `done` steps.
      held_out: ready -> a function `variables -> metrics`; None if no text is held out.
      adapter: what to train instead of the model's parameters, if anything.
      origin: config -> the weights to begin from; None for new ones.
    """

    objective: base.Maker
    data: Callable[[Config], Data]
    batches: Callable[[Ready, int], loop.Batches]
    held_out: Callable[[Ready], Callable[[base.Variables], dict[str, float]] | None]
    adapter: parts_lib.Adapter | None = None
    origin: Callable[[Config], parts_lib.Weights | None] = lambda config: None

    def parts(self, config: Config, mesh: Mesh | AbstractMesh) -> parts_lib.Parts:
        """Returns the parts of a config for this kind of training."""
        return parts_lib.make(config, mesh, self.objective, self.adapter)


def run(config: Config, task: Task) -> int:
    """Trains to `train.steps`; returns the exit code."""
    clock = Clock(pulse=Pulse.of_parent(), since=books.begun())
    mesh = processes.start(config.hardware, config.distributed, config.mesh, config.model.dtype)
    platform = jax.devices()[0].platform
    asked, config = config, dataclasses.replace(config, model=hardware.for_platform(config.model, platform))
    folder = together(lambda: workdir.check(config, mesh))
    with contextlib.ExitStack() as stack:  # what is opened first is closed last
        if held := together(lambda: ledger.lock(folder), first_only=True):
            stack.callback(held.close)
        log = stack.enter_context(start.Log(folder, clock))
        data = task.data(config)
        config = tune.fit(config, mesh, say, task.parts)
        ready = Ready(config, task.parts(config, mesh), data)
        sample = together(lambda: samples.make(config.sample, config.seed, ready.parts.model, data.data, folder))
        losses = dict(from_first(lambda: list(metrics.held_out_losses(folder / "metrics.jsonl").items())))
        checkpointer = Checkpointer(folder / "checkpoints", config.checkpoint, losses=losses)
        stack.callback(checkpointer.close)  # a save in flight is finished, also when the loop failed
        with clock.spend(RESTORE, str(folder / "checkpoints")):
            state, frozen, interrupted = _first_state(ready, task, checkpointer)
        done = int(state.step)
        meta = {"config": dataclasses.asdict(config), "fingerprint": data.fingerprint()}
        save = hooks.Save(checkpointer, config.checkpoint.every_steps, meta)
        held_out = hooks.HeldOut(task.held_out(ready), config.train.eval_every_steps, config.eval, losses)
        trace = stack.enter_context(profile.Trace(config.profile.window, folder / "profile"))
        between = [trace, save, held_out, hooks.Sample(sample, config.sample, folder), trace.begin]
        owed = hooks.owed(between, done, config.train.steps, interrupted)
        if done >= config.train.steps and not owed:
            say(f"complete: {folder} is at step {done} of {config.train.steps}; raise config.train.steps to continue")
            return EXIT_CODES[loop.DONE]
        if done < config.train.steps:
            profile.check(config.profile, done + 1)
        batches = task.batches(ready, done)
        stack.callback(batches.close)
        start.announce(config.model, config.train, state.params, mesh, done)
        watching = [watches.SaveInFlight(checkpointer), watches.NonFinite(config.train.max_nonfinite_steps)]
        recorder = log.begin(asked, config, data.data.sha256, mesh, done, watching)
        step = ready.parts.jit()
        stop, steps = signals.StopSignal(), config.train.steps
        job = loop.Run(mesh, steps, step, frozen, batches, between, watching, recorder, clock, stop, owed)
        _, ending = loop.run(job, state)
        clock.begin(SAVE, "the last checkpoint")
        _end(ending, max(clock.step, done), folder)
    return EXIT_CODES[ending.code]


def _first_state(ready: Ready, task: Task, checkpointer: Checkpointer) -> tuple[TrainState, base.Variables, bool]:
    """The state to train from, the frozen variables, and True if its checkpoint says that its step's hooks were not run."""
    parts = ready.parts
    # A checkpoint has all that is trained: only what is frozen is read from the origin again.
    origin = task.origin(ready.config) if parts.frozen or not checkpointer.steps() else None
    if not checkpointer.steps():
        return *parts.create(origin), False
    state, meta = checkpointer.restore_latest(parts.abstract, parts.shardings)
    check_fingerprint(meta["fingerprint"], ready.data.fingerprint())
    return state, parts.load_frozen(origin), meta.get("interrupted", False)


def _end(ending: loop.Ending, step: int, folder: pathlib.Path) -> None:
    """Writes and says how the run ended."""
    if jax.process_index() == 0:
        ledger.end(folder, step=step, code=EXIT_CODES[ending.code], why=ending.why or ending.code)
    if ending.why:
        say(ending.why)
    words = {loop.PREEMPTED: "interrupted, the state is saved"}.get(ending.code, ending.code)
    say(f"{words}: {folder}" + ("; the same command goes on" if ending.code == loop.PREEMPTED else ""))
