"""Watches of saves, and watches that say a sentence once. The watches of the loss are in `stability`."""

import collections
import dataclasses
import math
import typing
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from jaxlm.config import CheckpointConfig
from jaxlm.host.console import Say
from jaxlm.run.checkpoints.store import Checkpointer
from jaxlm.train.loop import FAILED, Ending, Watch

WINDOW = 50  # steps over which figures are averaged


@dataclasses.dataclass(eq=False)
class SaveInFlight(Watch):
    """Notices a failed save at the next step. Ends the run if saves fail or hang, and too much work is unsaved.

    Args:
      ask: ends the run on all processes (`StopSignal.ask`). With None, or with one process, the watch returns the Ending.
    """

    checkpointer: Checkpointer
    config: CheckpointConfig
    usd_per_hour: float = 0.0
    ask: Callable[[Ending], None] | None = None

    def __call__(self, step: int, record: dict[str, float]) -> Ending | None:
        self.checkpointer.check()
        failing = self.checkpointer.failing or self.checkpointer.hangs()
        if not failing:
            return None
        hours = self.checkpointer.unprotected_s() / 3600
        minutes, usd = self.config.max_unprotected_minutes, self.config.max_unprotected_usd
        if not (0 < minutes < hours * 60 or 0 < usd < hours * self.usd_per_hour):
            return None
        why = f"stopped at step {step}: the work of {hours * 60:.0f} minutes is unsaved, and {failing}"
        ending = Ending(FAILED, why, cause="disk")
        if self.ask is None or jax.process_count() == 1:
            return ending
        self.ask(ending)
        return None


Steps = Mapping[str, np.ndarray]  # metric -> its values, one a step
Condition = Callable[[Steps, Steps], dict[str, object] | None]


class Row(typing.NamedTuple):
    """A sign in the metrics that a run goes wrong, and the sentence that says so in plain words.

    Attributes:
      condition: (metrics of this start's first `window` steps, of its last `window`) -> values for `sentence`; None: all well.
    """

    reads: tuple[str, ...]
    window: int
    condition: Condition
    sentence: str


class SaysOnce(Watch):
    """Says a `Row`'s sentence once, when its condition is first met. The run goes on."""

    def __init__(self, row: Row, say: Say):
        self.reads, self._row, self._say, self._said = row.reads, row, say, False
        self._first: list[list[float]] = []
        self._last: collections.deque[list[float]] = collections.deque(maxlen=row.window)

    def __call__(self, step: int, record: dict[str, float]) -> None:
        values = [record[name] for name in self.reads]
        if self._said or not all(map(math.isfinite, values)):
            return
        self._last.append(values)
        if len(self._first) < self._row.window:
            self._first.append(values)
        if len(self._last) < self._row.window:
            return
        figures = self._row.condition(self._by_name(self._first), self._by_name(self._last))
        if figures is not None:
            self._said = True
            self._say(f"step {step}: {self._row.sentence.format(**figures)}")

    def _by_name(self, steps: Sequence[list[float]]) -> Steps:
        return dict(zip(self.reads, np.asarray(steps).T, strict=True))


def mean_reaches(name: str, least: float, **quoted: object) -> Condition:
    """Returns the condition that a metric's mean over the last steps is at least `least`; `quoted`: more for the sentence."""

    def condition(first: Steps, last: Steps) -> dict[str, object] | None:
        mean = last[name].mean()
        return {name: mean, **quoted} if mean >= least else None

    return condition
