"""The only training loop. Every program feeds it an objective, batches, and what to do at evaluations.

The host never waits for the step it has just sent to the device: metrics of step N-1 are read after step N is
dispatched, and only those that are needed; the batch of step N+1 goes to the device while step N runs. Only evaluations,
samples, checkpoints and the two ends of a trace wait.
"""

import dataclasses
import logging
import os
import pathlib
import signal
import threading
import time
import typing

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from jaxlm import sharding
from jaxlm.config import Config
from jaxlm.train import metrics as metrics_lib
from jaxlm.train import profile
from jaxlm.train.checkpoint import Checkpointer
from jaxlm.train.state import TrainState

DONE, STOPPED, PREEMPTED = 0, 3, 4


class Batches(typing.Protocol):
    """This process's rows of successive steps, as dicts of numpy arrays."""

    def __next__(self) -> dict[str, np.ndarray]: ...

    def close(self) -> None: ...


@dataclasses.dataclass(frozen=True)
class Hooks:
    """What a program does besides training.

    Attributes:
      evaluate: `params -> metrics` at `train.eval_every_steps` and at the end.
      sample: `(params, step) -> lines to show` at the steps that `config.sample` names and at the end.
      meta: stored in each checkpoint (config, data fingerprint).
      interrupted: the state is that of a run that was stopped before the evaluation or samples of its last step.
    """

    evaluate: typing.Callable[[typing.Any], dict[str, float]]
    sample: typing.Callable[[typing.Any, int], list[str]]
    meta: dict
    interrupted: bool = False


def run(
    config: Config,
    mesh: Mesh,
    state: TrainState,
    train_step: typing.Callable,
    batches: Batches,
    checkpointer: Checkpointer,
    meter: metrics_lib.Meter,
    writer: metrics_lib.Writer | None,
    hooks: Hooks,
) -> int:
    """Trains from `state.step` to `train.steps`; returns the exit code.

    Args:
      train_step: compiled `(state, batch) -> (state, metrics)` that takes over the memory of `state`.
      writer: None on all processes but the first.

    Returns:
      DONE, STOPPED (too many non-finite steps in a row) or PREEMPTED (SIGTERM or ctrl-C; the state is saved).
    """
    step, total = int(state.step), config.train.steps
    loop = _Loop(config, checkpointer, meter, writer, hooks, first=step + 1)
    trace_folder = pathlib.Path(config.workdir) / "profile"
    tracer = profile.Tracer(config.profile.window, trace_folder, loop.say, meter.pause)

    def next_batch() -> typing.Any:
        return sharding.to_global(next(batches), mesh, config.train.batch_size)

    with StopSignal() as stop, jax.set_mesh(mesh), tracer:
        if step == 0 and config.eval.at_start:
            loop.evaluate(state, step)
        if hooks.interrupted:
            loop.milestone(state, step)
        pending, code = None, DONE
        batch = next_batch() if step < total else None
        while step < total:
            tracer.before(step + 1, state)
            state, on_device = train_step(state, batch)
            step += 1
            loop.fetch(step, on_device)
            batch = next_batch() if step < total else None  # one ahead: a resumed run needs only the step
            checkpointer.check()
            if pending is not None and not loop.record(*pending):
                code = STOPPED
            pending = (step, on_device)
            tracer.after(step, state)
            if stop.requested(step) and code == DONE and step < total:
                code = PREEMPTED
            if code == DONE and loop.is_milestone(step):
                code = DONE if loop.record(*pending) else STOPPED
                pending = None
                if code == DONE:
                    loop.milestone(state, step)
            if code != DONE:
                break
        if pending is not None and code != STOPPED and not loop.record(*pending):
            code = STOPPED
        tracer.end(step, state)
        loop.finish(state, step, code)
    return code


class _Loop:
    """The parts of the loop that touch the host: records, evaluations, samples and checkpoints."""

    def __init__(self, config, checkpointer, meter, writer, hooks, *, first: int):
        self._always = (first, config.train.steps)  # a start shows its first step, however seldom it logs
        self._config, self._checkpointer, self._meter = config, checkpointer, meter
        self._writer, self._hooks = writer, hooks
        self._progress = metrics_lib.Progress(config.train.steps)

    def fetch(self, step: int, on_device: dict) -> None:
        """Starts the copies to the host that `record` will need; they wait for the step, the host does not."""
        for name, value in on_device.items():
            if name == "skipped_in_a_row" or self._log_due(step):
                value.copy_to_host_async()

    def record(self, step: int, on_device: dict) -> bool:
        """Writes a step's metrics when they are due, or when it was skipped. False when the run must stop."""
        in_a_row = float(on_device["skipped_in_a_row"])
        if self._log_due(step) or in_a_row > 0:
            train = {f"train/{name}": float(value) for name, value in jax.device_get(on_device).items()}
            del train["train/skipped_in_a_row"]
            record = self._meter.measure(step, self._config.train.steps) | train
            if self._writer:
                self._writer.write({k: v for k, v in record.items() if k != "eta_s"})
                self._progress.update(record)
        limit = self._config.train.max_nonfinite_steps
        if limit and in_a_row >= limit:
            self.say(f"stopped at step {step}: {limit} steps in a row had a loss or gradient that is not finite")
            return False
        return True

    def is_milestone(self, step: int) -> bool:
        """Whether an evaluation, samples or a checkpoint is due (the end of the run is `finish`'s)."""
        return step < self._config.train.steps and (
            self._eval_due(step) or self._sample_due(step) or self._save_due(step)
        )

    def milestone(self, state: TrainState, step: int) -> None:
        """Evaluates, samples and saves, whichever is due."""
        evaluated = self.evaluate(state, step) if self._eval_due(step) else {}
        if self._sample_due(step):
            self.sample(state, step)
        if self._save_due(step):
            self._save(state, evaluated)

    def evaluate(self, state: TrainState, step: int) -> dict[str, float]:
        """Held-out metrics, written and said."""
        start = time.monotonic()
        evaluated = self._hooks.evaluate(state.params)
        self._meter.pause(time.monotonic() - start)
        if evaluated and self._writer:
            self._writer.write(self._meter.clock(step) | evaluated)
            parts = [f"{name.removeprefix('val/')} {value:.4f}" for name, value in evaluated.items()]
            self.say(f"step {step}  held-out: " + "  ".join(parts))
        return evaluated

    def sample(self, state: TrainState, step: int) -> None:
        """Samples from the fixed prompts."""
        start = time.monotonic()
        for line in self._hooks.sample(state.params, step):
            self.say(line)
        self._meter.pause(time.monotonic() - start)

    def finish(self, state: TrainState, step: int, code: int) -> None:
        """Last evaluation and samples of a whole run; the last checkpoint of any."""
        evaluated = {}
        if code == DONE:
            evaluated = self.evaluate(state, step)
            self.sample(state, step)
        if code != STOPPED:
            # A stopped run keeps its last good checkpoint: the state after many skipped steps is not better.
            self._save(state, evaluated, interrupted=code == PREEMPTED and self.is_milestone(step))
        self._checkpointer.close()
        self._progress.close()

    def say(self, text: str) -> None:
        """A line for the person, from the first process only."""
        if self._writer:
            self._progress.message(text)

    def _save(self, state: TrainState, evaluated: dict[str, float], interrupted: bool = False) -> None:
        start = time.monotonic()
        self._checkpointer.save(state, self._hooks.meta | {"interrupted": interrupted}, evaluated)
        self._meter.pause(time.monotonic() - start)

    def _log_due(self, step: int) -> bool:
        return step % self._config.log.every_steps == 0 or step in self._always

    def _eval_due(self, step: int) -> bool:
        return _multiple(step, self._config.train.eval_every_steps)

    def _sample_due(self, step: int) -> bool:
        return _multiple(step, self._config.sample.every_steps) or step in self._config.sample.at_steps

    def _save_due(self, step: int) -> bool:
        return _multiple(step, self._config.checkpoint.every_steps)


def _multiple(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


class StopSignal:
    """SIGTERM and SIGINT (ctrl-C) as a wish to stop after the step, agreed on by all processes.

    A second SIGINT ends the process at once. With several processes JAX's own preemption notice takes SIGTERM (a
    Python handler never sees it), so ctrl-C is passed on as SIGTERM and all processes stop at the same step.
    """

    def __init__(self):
        self._asked = threading.Event()
        self._old: dict[int, typing.Any] = {}

    def __enter__(self) -> "StopSignal":
        if threading.current_thread() is threading.main_thread():
            self._old[signal.SIGINT] = signal.signal(signal.SIGINT, self._on_signal)
            if jax.process_count() == 1:
                self._old[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._on_signal)
        return self

    def __exit__(self, *exc) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def requested(self, step: int) -> bool:
        """Whether to stop after this step; with several processes all get the same answer at the same step."""
        if jax.process_count() > 1:
            return multihost_utils.reached_preemption_sync_point(step)
        return self._asked.is_set()

    @staticmethod
    def _at_once(number: int, frame: typing.Any) -> None:
        os.write(2, b"\njaxlm: stopped at once; what came after the last checkpoint is not saved\n")
        os._exit(1)

    def _on_signal(self, number: int, frame: typing.Any) -> None:
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, self._at_once)
        self._asked.set()
        logging.warning("stopping after this step; the state will be saved")
        if jax.process_count() > 1:
            os.kill(os.getpid(), signal.SIGTERM)
