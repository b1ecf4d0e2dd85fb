"""What watches that say one line once have in common."""

import collections
import math

import numpy as np

from jaxlm.console import Say
from jaxlm.train.loop import Watch

WINDOW = 50  # steps over which figures are averaged


class Told(Watch):
    """Looks at the last steps, and says one line once. `line` returns it, or "" as long as there is nothing to say."""

    def __init__(self, say: Say, steps: int = WINDOW):
        self._say, self._told = say, False
        self.last: collections.deque[dict[str, float]] = collections.deque(maxlen=steps)

    def __call__(self, step: int, record: dict[str, float]) -> None:
        if self._told or not all(math.isfinite(record[name]) for name in self.reads):
            return
        self.last.append({name: record[name] for name in self.reads})
        if len(self.last) == self.last.maxlen and (line := self.line()):
            self._told = True
            self._say(f"step {step}: {line}")

    def line(self) -> str:
        """Returns the line, or ""."""
        raise NotImplementedError

    def every(self, name: str) -> np.ndarray:
        """Returns a figure of the last steps."""
        return np.asarray([record[name] for record in self.last])

    def mean(self, name: str) -> float:
        """Returns its mean over the last steps."""
        return float(self.every(name).mean())
