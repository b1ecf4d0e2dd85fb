"""The hooks that run between two steps: checkpoints, held-out loss, samples. (The hooks for a trace are in `profile`.)"""

import math
import pathlib
from collections.abc import Callable, Collection, Sequence

from jaxlm.config import EvalConfig, SampleConfig
from jaxlm.objectives.base import Variables
from jaxlm.processes import from_first
from jaxlm.train.checkpoints.store import Checkpointer
from jaxlm.train.clock import SAVE
from jaxlm.train.loop import ROLL_BACK, Ending, Hook, Moment
from jaxlm.train.metrics import HELD_OUT


class Save(Hook):
    """Saves checkpoints: at regular steps, and when the run ends with a state worth keeping.

    Args:
      meta: JSON values to store in each checkpoint (config, fingerprint of the data).
      milestones: the steps at which a phase ends.
    """

    name = "checkpoint"
    activity = SAVE

    def __init__(
        self, checkpointer: Checkpointer, every_steps: int, meta: dict, milestones: Collection[int] = frozenset()
    ):
        self._checkpointer, self._every, self._meta, self._milestones = checkpointer, every_steps, meta, milestones

    def due(self, step: int, end: int) -> bool:
        return step == end or _multiple(step, self._every) or step in self._milestones

    def done(self, step: int) -> bool:
        return step in self._checkpointer.steps()

    def __call__(self, moment: Moment) -> None:
        self._checkpointer.save(moment.state, self._meta)

    def close(self, moment: Moment, ending: Ending) -> None:
        if ending.keep and ending.code != ROLL_BACK:
            self._checkpointer.save(moment.state, self._meta)  # does nothing if the step was saved already
        self._checkpointer.close()


class HeldOut(Hook):
    """Measures the held-out loss.

    Args:
      evaluate: variables -> metrics; None if no text is held out, and then the hook is never due.
      losses: step -> `val/loss`, by which the best checkpoints are chosen. The hook adds each new loss to it.
      milestones: the steps at which a phase ends.
    """

    name = "held-out"

    def __init__(
        self,
        evaluate: Callable[[Variables], dict[str, float]] | None,
        every_steps: int,
        config: EvalConfig,
        losses: dict[int, float],
        milestones: Collection[int] = frozenset(),
    ):
        self._evaluate, self._every, self._at_start, self._losses = evaluate, every_steps, config.at_start, losses
        self._milestones = milestones

    def due(self, step: int, end: int) -> bool:
        wanted = step == end or _multiple(step, self._every) or (step == 0 and self._at_start)
        return (wanted or step in self._milestones) and self._evaluate is not None

    def done(self, step: int) -> bool:
        return step in self._losses

    def __call__(self, moment: Moment) -> dict[str, float]:
        found = self._evaluate(moment.variables)
        self._losses[moment.step] = found.get(HELD_OUT, math.nan)
        return found


class Sample(Hook):
    """Samples continuations of the fixed prompts.

    Args:
      sample: (variables, step) -> lines to show. It also writes WORKDIR/samples/<step>.jsonl.
      milestones: the steps at which a phase ends.
    """

    name = "samples"

    def __init__(
        self,
        sample: Callable[[Variables, int], list[str]],
        config: SampleConfig,
        workdir: pathlib.Path,
        milestones: Collection[int] = frozenset(),
    ):
        self._sample, self._config, self._folder, self._milestones = sample, config, workdir / "samples", milestones

    def due(self, step: int, end: int) -> bool:
        c = self._config
        wanted = step == end or _multiple(step, c.every_steps) or step in c.at_steps or step in self._milestones
        return bool(c.prompts) and wanted

    def done(self, step: int) -> bool:
        return (self._folder / f"{step}.jsonl").is_file()

    def __call__(self, moment: Moment) -> None:
        for line in self._sample(moment.variables, moment.step):
            moment.say(line)


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


def _multiple(step: int, every: int) -> bool:
    return every > 0 and step > 0 and step % every == 0
