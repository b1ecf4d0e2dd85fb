"""What a run's own curve says of its future, for the report and for the end of each phase."""

import dataclasses
import pathlib
from collections.abc import Collection, Sequence

from jaxlm.config import Config, StopConfig
from jaxlm.data.mixture import Final, final_of
from jaxlm.data.windows import merge_windows
from jaxlm.plan import forecast, futures
from jaxlm.processes import from_first
from jaxlm.report import run as page
from jaxlm.report.page import NAME
from jaxlm.step import optim
from jaxlm.train import ledger, metrics, summary
from jaxlm.train.futures import look
from jaxlm.train.loop import Every, Hook, Moment


@dataclasses.dataclass(frozen=True)
class Outlook:
    """What the forecast of a run needs. It reads metrics.jsonl, so only the first process calls its methods.

    Attributes:
      rate: steps from 1 -> learning rates.
      steps: the last step of the plan.
      final: the final mixture, if there is one. Its losses are of other text, and the forecast, which is of the first
        mixture, leaves them out.
    """

    folder: pathlib.Path
    rate: forecast.Rate
    steps: int
    tokens_per_step: int
    usd_per_hour: float
    final: Final | None = None

    def losses(self) -> tuple[list[int], list[float | None]]:
        """Returns the steps of the first mixture and their training losses, as they were logged by all starts."""
        passed_over = merge_windows(ledger.read(self.folder)["passed_over"])
        last = self.final.switch(passed_over) if self.final else self.steps
        logged = [r for r in metrics.records(self.folder / "metrics.jsonl") if "train/loss" in r]
        logged = [r for r in logged if r["step"] <= last]
        return [r["step"] for r in logged], [r["train/loss"] for r in logged]

    def prices(self) -> tuple[float, float]:
        """Returns (seconds a step, dollars an hour). The seconds count all that this run spent on top of its steps."""
        last = max(metrics.records(self.folder / "metrics.jsonl"), key=lambda r: r.get("wall_s") or 0.0, default={})
        done = last.get("step") or 0
        return (last["wall_s"] / done if done and last.get("wall_s") else 0.0), self.usd_per_hour

    def futures(self, step: int) -> list[futures.Future] | forecast.TooEarly:
        """Returns the three futures after `step`, or why there are none."""
        try:
            return look(self.losses, self.rate, self.prices, step, self.steps)
        except (ValueError, ArithmeticError) as error:
            return forecast.TooEarly(f"no forecast: {error}")

    def summary(self, stop: StopConfig) -> dict:
        """Returns all that the report shows of the run now."""
        gathered = summary.gather(self.folder)
        step = gathered["run"]["step"]
        if not 0 < step < self.steps:
            return gathered
        found = self.futures(step)
        return gathered | {"futures": futures.summary(found, futures.advice(found, stop.usd_per_centinat), step)}


def write(folder: pathlib.Path, found: dict) -> None:
    """Writes RUN/report.html from what `Outlook.summary` returned."""
    page.write(folder / NAME, found)


def of_run(folder: pathlib.Path, config: Config) -> Outlook:
    """Returns the outlook of the run in `folder`."""
    train, usd_per_hour = config.train, config.hardware.usd_per_hour
    rate, final = optim.rates(config.optim, train.steps), final_of(config, config.data.final.weights)
    return Outlook(folder, rate, train.steps, train.batch_size * train.seq_len, usd_per_hour, final)


class Report(Hook):
    """Shows the three futures at the end of each phase.

    Args:
      milestones: the last steps of the phases.
    """

    name = "report"
    decoration = True

    def __init__(self, found: Outlook, stop: StopConfig, milestones: Collection[int]):
        self._outlook, self._stop, self._every = found, stop, Every(0, milestones, end=False)

    def due(self, step: int, end: int) -> bool:
        return self._every.due(step, end)

    def done(self, step: int) -> bool:
        return True

    def __call__(self, moment: Moment) -> None:
        for line in from_first(lambda: self._lines(moment.step)):
            moment.say(line)

    def _lines(self, step: int) -> Sequence[str]:
        found = self._outlook.futures(step)
        shown = [] if isinstance(found, forecast.TooEarly) else futures.table(found)
        return [*shown, f"forecast: {futures.advice(found, self._stop.usd_per_centinat).line}"]
