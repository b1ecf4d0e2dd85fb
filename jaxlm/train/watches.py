"""Watches over saves and a sign of life, and what those that say one line once have in common. Over the loss: `stability`."""

import collections
import dataclasses
import math
from collections.abc import Callable

import jax
import numpy as np

from jaxlm.config import CheckpointConfig
from jaxlm.console import Say
from jaxlm.train.checkpoints.store import Checkpointer
from jaxlm.train.loop import FAILED, Ending, Watch

WINDOW = 50  # steps over which figures are averaged


@dataclasses.dataclass(eq=False)
class SaveInFlight(Watch):
    """Calls `Checkpointer.check` after every step, so that a failed save is noticed at the next step.

    Ends the run, with exit code 1, when saving fails and too much work is unsaved.

    Args:
      config: `config.checkpoint`: how much is too much, in minutes and dollars.
      usd_per_hour: the price of all devices; 0 if nobody knows.
      ask: how one of several processes ends the run for all (`StopSignal.ask`); None: by what this watch returns.
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


class Alive(Watch):
    """Calls `beat(step)` after every step, for whoever waits for a sign of life elsewhere."""

    def __init__(self, beat: Callable[[int], None]):
        self._beat = beat

    def __call__(self, step: int, record: dict[str, float]) -> None:
        self._beat(step)


class Told(Watch):
    """Looks at the last steps, and says one line once. `line` returns it, or "" as long as there is nothing to say."""

    def __init__(self, say: Say, steps: int = WINDOW):
        self._say, self._said = say, False
        self.last: collections.deque[dict[str, float]] = collections.deque(maxlen=steps)

    def __call__(self, step: int, record: dict[str, float]) -> None:
        if self._said or not all(math.isfinite(record[name]) for name in self.reads):
            return
        self.last.append({name: record[name] for name in self.reads})
        if len(self.last) == self.last.maxlen and (line := self.line()):
            self._said = True
            self._say(f"step {step}: {line}")

    def line(self) -> str:
        """Returns the line, or ""."""
        raise NotImplementedError

    def every(self, name: str) -> np.ndarray:
        return np.asarray([record[name] for record in self.last])

    def mean(self, name: str) -> float:
        return float(self.every(name).mean())
