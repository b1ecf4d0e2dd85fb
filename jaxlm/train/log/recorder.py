"""Brings the metrics of steps from the device to the loggers and the progress line."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping

from jaxlm.host import screen
from jaxlm.host.screen import say
from jaxlm.report import redteam
from jaxlm.run.loggers import Writer
from jaxlm.run.scores import Scores
from jaxlm.train.log.meter import Meter
from jaxlm.train.log.progress import Progress


@dataclasses.dataclass(eq=False)
class Recorder:
    """Brings the metrics of steps from the device to metrics.jsonl, the loggers and the progress line.

    Args:
      first: the first step of this start. It is always logged, and so is the last.
      between_s: (step, last step) -> seconds that evaluations, saves and other hooks will take between them.
    """

    meter: Meter
    writer: Writer | None
    _: dataclasses.KW_ONLY
    first: int
    steps: int
    every_steps: int
    reads: Iterable[str] = ()
    before: Mapping[int, float] | None = None
    scores: Scores | None = None
    between_s: Callable[[int, int], float] = lambda step, end: 0.0

    def __post_init__(self):
        self._reads = {"skipped_in_a_row", "loss", *self.reads}
        doing, done = self.meter.clock.doing, self.first - 1
        self._progress = Progress(self.steps, done, doing, self.before) if self.writer else None
        self._step = done

    def begin(self) -> None:
        """Writes the first record of a start, so that its time is recorded even if it dies at once."""
        self._note(self._step)

    def fetch(self, step: int, metrics: dict) -> None:
        """Starts copying to the host the metrics that `read` will need. Does not wait for the step to finish."""
        for name in metrics if self._due(step) else self._reads:
            metrics[name].copy_to_host_async()

    def read(self, step: int, metrics: dict) -> dict[str, float]:
        """Waits until a step is done. Returns all metrics of a logged or skipped step, else the loss and those in `reads`."""
        record = {name: float(metrics[name]) for name in self._reads}
        self._step = step
        if self._progress:
            self._progress.stepped(step, record["loss"])
        if not self._due(step) and not record["skipped_in_a_row"] > 0:
            return record
        record |= {name: float(value) for name, value in metrics.items() if name not in record}
        line = self.meter.measure(step, self.steps)
        line |= {f"train/{name}": record[name] for name in metrics if name != "skipped_in_a_row"}
        self._score(step, line)
        if self.writer:
            self.writer.write({name: value for name, value in line.items() if name != "eta_s"})
            if "eta_s" in line:
                line["eta_s"] += self.between_s(step, self.steps)
            losses = [*filter(math.isfinite, self.scores.losses.values())] if self.scores is not None else []
            self._progress.update(line, min(losses) if len(losses) > 1 else None)
        return record

    def add(self, step: int, name: str, figures: dict[str, float]) -> None:
        """Writes and shows more figures of a step, such as held-out losses."""
        self._step = step
        self._score(step, figures)
        self._note(step, figures)
        if self.writer:
            names = [key for key in figures if redteam.leads(key)]
            words = [f"{key.removeprefix('val/').removeprefix('eval/')} {figures[key]:.4f}" for key in names]
            # The summary figure comes first, then losses: a narrow terminal leaves out the last ones.
            words.sort(key=lambda word: ("/" in word, "/loss " not in word))
            first, *others = [word.replace("/loss ", " ") for word in words] or [""]
            parts = [screen.Part(word, rank) for rank, word in enumerate([f"step {step}  {name}: {first}", *others])]
            screen.say_parts(parts)

    def say(self, text: str) -> None:
        if self.writer:
            say(text)

    def close(self) -> None:
        """Ends the live line, and writes the last record of this start, with all its time and dollars."""
        if self._progress:
            self._progress.close()
        self._note(self._step)

    def _score(self, step: int, figures: Mapping[str, float]) -> None:
        if self.scores is not None:
            self.scores.note(step, figures)

    def _note(self, step: int, figures: dict[str, float] | None = None) -> None:
        if self.writer:
            self.writer.write(self.meter.now(step) | (figures or {}))

    def _due(self, step: int) -> bool:
        return step % self.every_steps == 0 or step in (self.first, self.steps)
