"""The hooks that run between two steps: checkpoints, held-out loss, benchmarks, samples. (The hooks of a trace: `profile`.)"""

import dataclasses
import math
import pathlib
import time
from collections.abc import Callable, Sequence

import jax

from jaxlm.config import CheckpointConfig, RunError
from jaxlm.devices.processes import from_first
from jaxlm.run import metrics
from jaxlm.run.checkpoints.pace import Pace
from jaxlm.run.checkpoints.store import Checkpointer
from jaxlm.run.clock import SAVE
from jaxlm.train import watches
from jaxlm.train.loop import DONE, FAILED, MOVED, PREEMPTED, ROLL_BACK, Ending, Every, Hook, Moment


@dataclasses.dataclass(eq=False)
class Save(Hook):
    """Saves checkpoints: at regular steps, when too much work is unsaved, and when the run ends with a state worth keeping.

    Args:
      remark: returns a line on the choice of the best checkpoint, or ""; called at saves after the first until a line comes.
    """

    name = "checkpoint"
    activity = SAVE
    checkpointer: Checkpointer
    config: CheckpointConfig
    failures_per_day: float
    meta: dict
    milestones: frozenset[int] = frozenset()
    remark: Callable[[], str] = str
    alive: Callable[[], object] = lambda: None

    def __post_init__(self):
        self._most_s = self.config.max_unprotected_minutes * 60 or math.inf
        self._every, self._end, self._told = Every(self.config.every_steps, self.milestones), 0, False
        self._pace = Pace(self.config.every_minutes, self.failures_per_day)

    def due(self, step: int, end: int) -> bool:
        self._end = end
        if self._every.due(step, end):
            return True
        return self._pace.due(step, self.checkpointer.wants_save, self.checkpointer.verify_s)

    def left(self, step: int, end: int) -> float:
        return max(self._every.left(step, end), self._pace.left(step, end))

    def done(self, step: int) -> bool:
        return step in self.checkpointer.steps()

    def __call__(self, moment: Moment) -> None:
        if self.checkpointer.steps() and not self._told and (line := self.remark()):
            self._told = True
            moment.say(line)
        waits = moment.step == self._end or moment.step in self.milestones  # for the previous save
        if not waits and self.checkpointer.skips(moment.step):
            return
        with self._pace.measured(moment.step, moment.say):
            self.checkpointer.save(moment.state, self.meta)

    def close(self, moment: Moment, ending: Ending) -> None:
        worth = ending.keep and ending.code != ROLL_BACK
        why = self.checkpointer.save_last(moment.step, moment.state, self.meta) if worth else ""
        if why and ending.code == DONE:
            why = self._hold(moment, why)
        self.checkpointer.close()
        if why:
            lost = f"step {moment.step} is not saved: {why}"
            if ending.code in (DONE, PREEMPTED):
                raise RunError(lost)  # these endings say that the state is saved
            moment.say(lost)

    def _hold(self, moment: Moment, why: str) -> str:
        """Retries to save the finished state for `max_unprotected_minutes`. Returns "", or why it is not saved."""
        pause_s = 1.0
        while why and from_first(lambda: self.checkpointer.holds(self._most_s)):
            if pause_s == 1.0:
                most = f"up to {self.config.max_unprotected_minutes:g} minutes" if self._most_s < math.inf else "ever"
                moment.say(
                    f"step {moment.step}, the last, is tried again for {most} (checkpoint.max_unprotected_minutes), each "
                    f"minute; ctrl-C ends that: {why}"
                )
            self.alive()
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 60.0)
            why = self.checkpointer.save_last(moment.step, moment.state, self.meta)
        return why


@dataclasses.dataclass(eq=False)
class Here(Hook):
    """Ends the run if its folder was moved or deleted, before another hook writes into it."""

    name = "folder"
    moved: Callable[[], str]
    others: Sequence[Hook]

    def due(self, step: int, end: int) -> bool:
        return any(hook.due(step, end) for hook in self.others)

    def done(self, step: int) -> bool:
        return True

    def __call__(self, moment: Moment) -> Ending | None:
        why = from_first(self.moved)
        return Ending(FAILED, f"stopped at step {moment.step}: {why}", keep=False, cause=MOVED) if why else None


Remark = Callable[[int, dict[str, float]], tuple[dict[str, float], list[str]]]


def nothing(step: int, figures: dict[str, float]) -> tuple[dict[str, float], list[str]]:
    """Returns no further figures and no lines: for a kind of training without remarks."""
    return {}, []


_MOST_FORGOTTEN = 0.02  # of the base's bits per byte
_FEWEST_ENDED = 0.5
_BASE, _CHANGE, _ENDED = "val/base/bits_per_byte", "val/base/change", "samples/ended"


class Remarks:
    """Says in plain words what goes wrong while a model learns to answer.

    It forgets its base, its answers do not end, or fewer than half of the held-out pairs are ranked as labelled.

    Called with (step, figures of an evaluation or of samples); returns (more figures, lines for the user).

    Args:
      before: bits per byte of the base's text before the first step; None if not measured yet. A measurement at step 0
        replaces it.
      pairs: how many pairs are held out.
    """

    def __init__(self, before: float | None, replay: float, pairs: int = 0):
        self._before, self._replay, self._pairs = before, replay, pairs

    def __call__(self, step: int, figures: dict[str, float]) -> tuple[dict[str, float], list[str]]:
        if step == 0:
            self._before = figures.get(_BASE, self._before)
            return {}, []
        more, lines = self._forgotten(figures)
        return more, [*lines, *self._endless(figures), *self._swapped(figures)]

    def _forgotten(self, figures: dict[str, float]) -> tuple[dict[str, float], list[str]]:
        now = figures.get(_BASE)
        if now is None or not self._before:
            return {}, []
        change = now / self._before - 1
        line = f"the base's own text: {now:.4f} bits per byte, {change:+.1%} since the first step"
        if change > _MOST_FORGOTTEN:
            more = f"more replay (replay.share={self._replay:g} now)" if self._replay else "replay (replay.share=0.05)"
            line += f"; it forgets what it knew: {more}, a lower optim.lr, fewer steps or adapter.kind=lora help"
        return {_CHANGE: change}, [line]

    def _endless(self, figures: dict[str, float]) -> list[str]:
        ended = figures.get(_ENDED, 1.0)
        if ended >= _FEWEST_ENDED:
            return []
        return [
            f"{1 - ended:.0%} of the answers do not end within sample.max_new_tokens; if the run ends so: more steps, "
            "a higher optim.lr, or data whose answers end"
        ]

    def _swapped(self, figures: dict[str, float]) -> list[str]:
        accuracy = figures.get("val/accuracy", 1.0)
        if accuracy + 1.5 / math.sqrt(max(self._pairs, 1)) >= 0.5:  # three standard errors
            return []
        return [watches.SWAPPED.sentence.format(accuracy=accuracy, pairs="of the held-out pairs")]


def base_before(folder: pathlib.Path) -> float | None:
    """Returns the bits per byte of the base's text at step 0, by the metrics of earlier starts; None if not measured."""
    records = metrics.records(folder / "metrics.jsonl", containing=f'"{_BASE}')
    return next((r[_BASE] for r in records if r["step"] == 0 and r.get(_BASE) is not None), None)


@dataclasses.dataclass(eq=False)
class Measuring(Hook):
    """Measures the model at regular steps, unless `measure` is None."""

    measure: Callable | None
    every: Every

    def due(self, step: int, end: int) -> bool:
        return self.measure is not None and self.every.due(step, end)

    def left(self, step: int, end: int) -> int:
        return self.every.left(step, end) if self.measure else 0


@dataclasses.dataclass(eq=False)
class HeldOut(Measuring):
    """Measures the held-out loss, and adds it to `losses`; also that of the weights' moving average, if the state has one.

    `remark` gives a line for the user, `further` figures and lines.
    """

    name = "held-out"
    losses: dict[int, float]
    remark: Callable[[float], str] = lambda loss: ""
    further: Remark = nothing

    def done(self, step: int) -> bool:
        return step in self.losses

    def __call__(self, moment: Moment) -> dict[str, float]:
        figures = self.measure(moment.variables)
        loss = self.losses[moment.step] = figures.get(metrics.HELD_OUT, math.nan)
        if moment.state.average and metrics.HELD_OUT in figures:
            placed = jax.tree.map(lambda leaf: leaf.sharding, moment.state.params)  # it may be in the host's memory
            average = moment.frozen | jax.device_put(moment.state.average, placed)
            of_average = self.measure(average)[metrics.HELD_OUT]
            figures = {metrics.AVERAGE: of_average} | figures  # it is shown beside the loss
        more, lines = self.further(moment.step, figures)
        for line in filter(None, [self.remark(loss), *lines]):
            moment.say(line)
        return figures | more


@dataclasses.dataclass(eq=False)
class Benchmarks(Measuring):
    """Runs the benchmarks, and writes RUN/eval/STEP. `measured`: the steps that earlier starts measured."""

    name = "benchmarks"
    measured: set[int] = dataclasses.field(default_factory=set)

    def done(self, step: int) -> bool:
        return step in self.measured

    def __call__(self, moment: Moment) -> dict[str, float]:
        figures = self.measure(moment.variables, moment.step)
        self.measured.add(moment.step)
        return figures


@dataclasses.dataclass(eq=False)
class Sample(Measuring):
    """Samples continuations of the fixed prompts. `chooses`: True if a figure of the samples chooses the best checkpoint."""

    name = "samples"
    folder: pathlib.Path
    further: Remark = nothing
    chooses: bool = False

    def __post_init__(self):
        self.decoration = not self.chooses

    def done(self, step: int) -> bool:
        return (self.folder / f"{step}.jsonl").is_file()  # a rollback deletes the files of its steps

    def __call__(self, moment: Moment) -> dict[str, float]:
        shown, figures = self.measure(moment.variables, moment.step)
        more, lines = self.further(moment.step, figures)
        for line in [*shown, *lines]:
            moment.say(line)
        return figures | more


def owed(hooks: Sequence[Hook], step: int, end: int) -> list[Hook]:
    """Returns the hooks due at `step`, where this start begins, that no earlier start of the run has done.

    Only the first process writes the run's files, so all processes get the answer of the first.
    """
    due = [hook for hook in hooks if hook.due(step, end)]
    undone = from_first(lambda: [not hook.done(step) for hook in due])
    return [hook for hook, still in zip(due, undone, strict=True) if still]
