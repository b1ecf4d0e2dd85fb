"""Brings the metrics of steps from the device to the loggers and the progress line."""

import math
from collections.abc import Callable, Iterable, Mapping

from jaxlm.host import screen
from jaxlm.host.screen import say
from jaxlm.report import redteam
from jaxlm.run.loggers import Writer
from jaxlm.run.scores import Scores
from jaxlm.train.log.meter import Meter
from jaxlm.train.log.progress import Progress


class Recorder:
    """Brings the metrics of steps from the device to metrics.jsonl, the loggers and the progress line.

    Args:
      meter: computes speed, dollars and time left.
      writer: the writer of metrics on the first process, which alone writes and shows anything; None on the others.
      first: the first step of this start. It is always logged, and so is the last.
      steps: the last step of the run.
      every_steps: the number of steps from one logged step to the next.
      reads: the names of metrics to read at every step. The others are read at logged steps only.
      before: step -> training loss of the steps that earlier starts logged, for the mean that is shown.
      scores: takes all that goes into metrics.jsonl but the clocks; its best held-out loss is shown. None for no scores.
      between_s: (step, the last step) -> seconds that evaluations, saves and the like will take from the one to the other.
    """

    def __init__(
        self,
        meter: Meter,
        writer: Writer | None,
        *,
        first: int,
        steps: int,
        every_steps: int,
        reads: Iterable[str] = (),
        before: Mapping[int, float] | None = None,
        scores: Scores | None = None,
        between_s: Callable[[int, int], float] = lambda step, end: 0.0,
    ):
        self._meter, self._writer = meter, writer
        self._always, self._steps, self._every = (first, steps), steps, every_steps
        self._reads = {"skipped_in_a_row", "loss", *reads}
        self._progress = Progress(steps, first - 1, meter.clock.doing, before) if writer else None
        self._step = first - 1
        self._scores, self._between_s = scores, between_s

    def begin(self) -> None:
        """Writes the record with which a start begins: from then on its time is in the books, even if it dies at once."""
        self._note(self._step)

    def fetch(self, step: int, metrics: dict) -> None:
        """Starts copying to the host the metrics that `read` will need. Does not wait for the step to finish."""
        for name in metrics if self._due(step) else self._reads:
            metrics[name].copy_to_host_async()

    def read(self, step: int, metrics: dict) -> dict[str, float]:
        """Waits until a step is done, and returns its metrics: all if the step is logged, else those in `reads`.

        A step is logged if a log line is due, or if its update was skipped.
        """
        record = {name: float(metrics[name]) for name in self._reads}
        self._step = step
        if self._progress:
            self._progress.stepped(step, record["loss"])
        if not self._due(step) and not record["skipped_in_a_row"] > 0:
            return record
        record |= {name: float(value) for name, value in metrics.items() if name not in record}
        line = self._meter.measure(step, self._steps)
        line |= {f"train/{name}": record[name] for name in metrics if name != "skipped_in_a_row"}
        self._score(step, line)
        if self._writer:
            self._writer.write({name: value for name, value in line.items() if name != "eta_s"})
            if "eta_s" in line:
                line["eta_s"] += self._between_s(step, self._steps)
            losses = self._scores.losses.values() if self._scores is not None else ()
            self._progress.update(line, min(filter(math.isfinite, losses), default=None))
        return record

    def add(self, step: int, name: str, figures: dict[str, float]) -> None:
        """Writes and shows more figures of a step, such as held-out losses."""
        self._step = step
        self._score(step, figures)
        self._note(step, figures)
        if self._writer:
            names = [key for key in figures if redteam.leads(key)]
            words = [f"{key.removeprefix('val/').removeprefix('eval/')} {figures[key]:.4f}" for key in names]
            # The figure that sums the others up comes first, then losses: what comes last is left out in a narrow terminal.
            first, *others = sorted(words, key=lambda word: ("/" in word, "/loss " not in word)) or [""]
            parts = [screen.Part(word, rank) for rank, word in enumerate([f"step {step}  {name}: {first}", *others])]
            screen.say_parts(parts)

    def say(self, text: str) -> None:
        if self._writer:
            say(text)

    def close(self) -> None:
        """Ends the live line, and writes the record with which this start ends: all its time and dollars."""
        if self._progress:
            self._progress.close()
        self._note(self._step)

    def _score(self, step: int, figures: Mapping[str, float]) -> None:
        if self._scores is not None:
            self._scores.note(step, figures)

    def _note(self, step: int, figures: dict[str, float] | None = None) -> None:
        if self._writer:
            self._writer.write(self._meter.now(step) | (figures or {}))

    def _due(self, step: int) -> bool:
        return step % self._every == 0 or step in self._always
