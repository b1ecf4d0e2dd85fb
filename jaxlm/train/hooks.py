"""The hooks that run between two steps: checkpoints, held-out loss, benchmarks, samples. (Those for a trace: `profile`.)"""

import dataclasses
import math
import pathlib
import time
from collections.abc import Callable, Collection, Sequence

from jaxlm.config import CheckpointConfig, EvalConfig, RunError, SampleConfig
from jaxlm.objectives.base import Variables
from jaxlm.processes import from_first
from jaxlm.train.checkpoints.interval import Pace
from jaxlm.train.checkpoints.store import Checkpointer
from jaxlm.train.clock import SAVE
from jaxlm.train.loop import DONE, FAILED, MOVED, PREEMPTED, ROLL_BACK, Ending, Hook, Moment
from jaxlm.train.metrics import HELD_OUT


class Save(Hook):
    """Saves checkpoints: at regular steps, when too much work is unsaved, and when the run ends with a state worth keeping.

    Args:
      config: `config.checkpoint`: every how many steps, and minutes.
      failures_per_day: how often such a machine is lost a day (`plan.preemptions_per_day`); sets the minutes if they are auto.
      meta: JSON values to store in each checkpoint (config, fingerprint of the data).
      milestones: the steps at which a phase ends. Their checkpoints are never deleted.
      remark: returns a line on the choice of the best checkpoint, or ""; asked at each save after the first.
      alive: called while a finished state waits for room on the disk.
    """

    name = "checkpoint"
    activity = SAVE

    def __init__(
        self,
        checkpointer: Checkpointer,
        config: CheckpointConfig,
        failures_per_day: float,
        meta: dict,
        milestones: frozenset[int] = frozenset(),
        remark: Callable[[], str] = str,
        alive: Callable[[], object] = lambda: None,
    ):
        self._checkpointer, self._meta, self._alive = checkpointer, meta, alive
        self._most_s = config.max_unprotected_minutes * 60 or math.inf
        self._remark, self._told = remark, False
        self._every, self._milestones, self._end = config.every_steps, milestones, 0
        self._pace = Pace(config.every_minutes, failures_per_day)
        if milestones:
            checkpointer.pinned |= milestones

    def due(self, step: int, end: int) -> bool:
        self._end = end
        if step == end or _multiple(step, self._every) or step in self._milestones:
            return True
        return self._pace.due(step, self._checkpointer.wants_save, self._checkpointer.verify_s)

    def left(self, step: int, end: int) -> float:
        return max(_left(step, end, self._every, self._milestones), self._pace.left(step, end))

    def done(self, step: int) -> bool:
        return step in self._checkpointer.steps()

    def __call__(self, moment: Moment) -> None:
        if self._checkpointer.steps() and not self._told and (line := self._remark()):
            self._told = True
            moment.say(line)
        waits = moment.step == self._end or moment.step in self._milestones  # for the save before it
        if not waits and self._checkpointer.skips(moment.step):
            return
        with self._pace.measured(moment.step, moment.say):
            self._checkpointer.save(moment.state, self._meta)

    def close(self, moment: Moment, ending: Ending) -> None:
        worth = ending.keep and ending.code != ROLL_BACK
        why = self._checkpointer.save_last(moment.step, moment.state, self._meta) if worth else ""
        if why and ending.code == DONE:
            why = self._hold(moment, why)
        self._checkpointer.close()
        if why:
            lost = f"step {moment.step} is not saved: {why}"
            if ending.code in (DONE, PREEMPTED):
                raise RunError(lost)  # what such an ending says would not be true
            moment.say(lost)

    def _hold(self, moment: Moment, why: str) -> str:
        """Tries to save a finished state until there is room, for `max_unprotected_minutes`. Returns "" or why it can't."""
        pause_s = 1.0
        while why and from_first(lambda: self._checkpointer.holds(self._most_s)):
            if pause_s == 1.0:
                moment.say(f"step {moment.step} is the last, and its state is held until it can be saved: {why}")
            self._alive()
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 60.0)
            why = self._checkpointer.save_last(moment.step, moment.state, self._meta)
        return why


class Here(Hook):
    """Ends the run if its folder was moved or deleted, before any of the other hooks writes into it.

    Args:
      moved: returns the line that says so, or "". Asked on the first process.
      others: the hooks that write.
    """

    name = "folder"

    def __init__(self, moved: Callable[[], str], others: Sequence[Hook]):
        self._moved, self._others = moved, others

    def due(self, step: int, end: int) -> bool:
        return any(hook.due(step, end) for hook in self._others)

    def done(self, step: int) -> bool:
        return True

    def __call__(self, moment: Moment) -> Ending | None:
        why = from_first(self._moved)
        return Ending(FAILED, f"stopped at step {moment.step}: {why}", keep=False, cause=MOVED) if why else None


Remark = Callable[[int, dict[str, float]], tuple[dict[str, float], list[str]]]


def nothing(step: int, figures: dict[str, float]) -> tuple[dict[str, float], list[str]]:
    """Returns no further figures and no lines: the `Remark` of a kind of training that has none."""
    del step, figures
    return {}, []


@dataclasses.dataclass(eq=False)
class HeldOut(Hook):
    """Measures the held-out loss.

    Args:
      evaluate: variables -> metrics; None if no text is held out, and then the hook is never due.
      losses: step -> `val/loss`, by which the best checkpoints are chosen. The hook adds each new loss to it.
      remark: new `val/loss` -> a line for the user, or "".
      milestones: the steps at which a phase ends.
      further: (step, metrics) -> (more metrics, lines for the user).
    """

    name = "held-out"
    evaluate: Callable[[Variables], dict[str, float]] | None
    every_steps: int
    config: EvalConfig
    losses: dict[int, float]
    remark: Callable[[float], str] = lambda loss: ""
    milestones: Collection[int] = frozenset()
    further: Remark = nothing

    def due(self, step: int, end: int) -> bool:
        wanted = step == end or _multiple(step, self.every_steps) or (step == 0 and self.config.at_start)
        return (wanted or step in self.milestones) and self.evaluate is not None

    def left(self, step: int, end: int) -> float:
        return _left(step, end, self.every_steps, self.milestones) if self.evaluate else 0

    def done(self, step: int) -> bool:
        return step in self.losses

    def __call__(self, moment: Moment) -> dict[str, float]:
        found = self.evaluate(moment.variables)
        loss = self.losses[moment.step] = found.get(HELD_OUT, math.nan)
        if line := self.remark(loss):
            moment.say(line)
        more, lines = self.further(moment.step, found)
        for line in lines:
            moment.say(line)
        return found | more


@dataclasses.dataclass(eq=False)
class Benchmarks(Hook):
    """Asks the questions of benchmarks.

    Args:
      measure: (variables, step) -> metrics, `eval/TASK/METRIC`. It also writes RUN/eval/STEP. None if no benchmark is wanted,
        and then the hook is never due.
      every_steps: `config.eval.tasks_every_steps`; 0 for the end only.
      measured: the steps that earlier starts measured. The hook adds its own.
      milestones: the steps at which a phase ends.
    """

    name = "benchmarks"
    measure: Callable[[Variables, int], dict[str, float]] | None
    every_steps: int
    measured: set[int]
    milestones: Collection[int] = frozenset()

    def due(self, step: int, end: int) -> bool:
        wanted = step == end or _multiple(step, self.every_steps) or step in self.milestones
        return wanted and self.measure is not None

    def left(self, step: int, end: int) -> float:
        return _left(step, end, self.every_steps, self.milestones) if self.measure else 0

    def done(self, step: int) -> bool:
        return step in self.measured

    def __call__(self, moment: Moment) -> dict[str, float]:
        found = self.measure(moment.variables, moment.step)
        self.measured.add(moment.step)
        return found


class Sample(Hook):
    """Samples continuations of the fixed prompts.

    Args:
      sample: (variables, step) -> (lines to show, metrics). It also writes WORKDIR/samples/<step>.jsonl.
      milestones: the steps at which a phase ends.
      further: (step, metrics) -> (more metrics, lines for the user).
      chooses: True if one of its figures chooses the best checkpoint; then it is no decoration.
    """

    name = "samples"

    def __init__(
        self,
        sample: Callable[[Variables, int], tuple[list[str], dict[str, float]]],
        config: SampleConfig,
        workdir: pathlib.Path,
        milestones: Collection[int] = frozenset(),
        further: Remark = nothing,
        chooses: bool = False,
    ):
        self.decoration = not chooses
        self._sample, self._config, self._folder, self._milestones = sample, config, workdir / "samples", milestones
        self._further = further

    def due(self, step: int, end: int) -> bool:
        c = self._config
        wanted = step == end or _multiple(step, c.every_steps) or step in c.at_steps or step in self._milestones
        return bool(c.prompts) and wanted

    def left(self, step: int, end: int) -> float:
        c = self._config
        return _left(step, end, c.every_steps, {*c.at_steps, *self._milestones}) if c.prompts else 0

    def done(self, step: int) -> bool:
        return (self._folder / f"{step}.jsonl").is_file()  # a rollback deletes those of its steps

    def __call__(self, moment: Moment) -> dict[str, float]:
        shown, found = self._sample(moment.variables, moment.step)
        more, lines = self._further(moment.step, found)
        for line in [*shown, *lines]:
            moment.say(line)
        return found | more


def owed(hooks: Sequence[Hook], step: int, end: int, interrupted: bool = False) -> list[Hook]:
    """Returns the hooks that are due at `step`, from which the run starts, and that no earlier start of the run has done.

    Only the first process writes the run's files, so all processes get the answer of the first.

    Args:
      interrupted: True if the checkpoint says that no hook ran after its step. Only checkpoints by older versions say
        so; today the run's files tell it.
    """
    due = [hook for hook in hooks if hook.due(step, end)]
    undone = from_first(lambda: [interrupted or not hook.done(step) for hook in due])
    return [hook for hook, still in zip(due, undone, strict=True) if still]


def _left(step: int, end: int, every: int, also: Collection[int]) -> int:
    """How many steps from `step` on are the last, multiples of `every` or in `also`."""
    extra = sum(step <= s < end and not _multiple(s, every) for s in also)
    regular = max(0, (end - 1) // every - max(0, step - 1) // every) if every > 0 else 0
    return regular + extra + (step <= end)


def _multiple(step: int, every: int) -> bool:
    return every > 0 and step > 0 and step % every == 0
