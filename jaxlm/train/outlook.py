"""What a run's own curve says of its future: for the report, for the end of each phase, and for a stop that pays."""

import dataclasses
import pathlib
import shlex
from collections.abc import Collection, Sequence

from jaxlm.config import Config, StopConfig
from jaxlm.data.shards.mixture import Final, final_of, merge_windows
from jaxlm.devices.processes import from_first
from jaxlm.plan import forecast, futures
from jaxlm.report import run as page
from jaxlm.report.page import NAME
from jaxlm.run import ledger, lineage, metrics
from jaxlm.step import optim
from jaxlm.train import summary
from jaxlm.train.loop import STOPPED, Ending, Every, Hook, Moment


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
    usd_per_hour: float
    final: Final | None = None

    def losses(self) -> tuple[list[int], list[float | None]]:
        """Returns the steps of the first mixture and their training losses, as they were logged by all starts."""
        passed_over = merge_windows(ledger.read(self.folder)["passed_over"])
        last = self.final.switch(passed_over) if self.final else self.steps
        records = metrics.records(self.folder / "metrics.jsonl")
        logged = [(r["step"], r["train/loss"]) for r in records if "train/loss" in r and r["step"] <= last]
        return [step for step, _ in logged], [loss for _, loss in logged]

    def prices(self) -> tuple[float, float]:
        """Returns (seconds a step, dollars an hour). The seconds count all that this run spent on top of its steps."""
        last = lineage.latest(metrics.records(self.folder / "metrics.jsonl"))
        done = last.get("step") or 0
        return (last["wall_s"] / done if done and last.get("wall_s") else 0.0), self.usd_per_hour

    def ahead(self, step: int) -> list[futures.Future] | forecast.TooEarly:
        """Returns the three futures after `step`, or why there are none. Raises ValueError or ArithmeticError if none fits."""
        fitted = forecast.fit(*self.losses(), self.rate, step, self.steps)
        return fitted if isinstance(fitted, forecast.TooEarly) else futures.futures(fitted, self.steps, *self.prices())

    def futures(self, step: int) -> list[futures.Future] | forecast.TooEarly:
        """Returns `ahead`, for readers: a curve that nobody thought of is too early to say."""
        try:
            return self.ahead(step)
        except (ValueError, ArithmeticError) as error:
            return forecast.TooEarly(f"no forecast: {error}")

    def summary(self, stop: StopConfig) -> dict:
        """Returns all that the report shows of the run now."""
        gathered = summary.gather(self.folder)
        step = gathered["run"]["step"]
        if not 0 < step < self.steps:
            return gathered
        ahead = self.futures(step)
        return gathered | {"futures": futures.summary(ahead, futures.advice(ahead, stop.usd_per_centinat), step)}


def of_run(folder: pathlib.Path, config: Config) -> Outlook:
    steps, final = config.train.steps, final_of(config, config.data.final.weights)
    return Outlook(folder, optim.rates(config.optim, steps), steps, config.hardware.usd_per_hour, final)


def write(folder: pathlib.Path, gathered: dict) -> None:
    """Writes RUN/report.html from what `Outlook.summary` returned."""
    page.write(folder / NAME, gathered)


class Report(Hook):
    """Shows the three futures at the end of each phase.

    Args:
      milestones: the last steps of the phases.
    """

    name = "report"
    decoration = True

    def __init__(self, outlook: Outlook, stop: StopConfig, milestones: Collection[int]):
        self._outlook, self._stop, self._every = outlook, stop, Every(0, milestones, end=False)

    def due(self, step: int, end: int) -> bool:
        return self._every.due(step, end)

    def done(self, step: int) -> bool:
        return True

    def __call__(self, moment: Moment) -> None:
        for line in from_first(lambda: self._lines(moment.step)):
            moment.say(line)

    def _lines(self, step: int) -> Sequence[str]:
        ahead = self._outlook.futures(step)
        shown = [] if isinstance(ahead, forecast.TooEarly) else futures.table(ahead)
        return [*shown, f"forecast: {futures.advice(ahead, self._stop.usd_per_centinat).line}"]


@dataclasses.dataclass(eq=False)
class StopByForecast(Hook):
    """Looks at the forecast now and then. Ends the run if its rest costs more than it is worth.

    That is, if 0.01 nats cost more than `stop.usd_per_centinat` whatever it does next. Advice to decay now is shown when it is
    new. It ends nothing, for the rest of the plan may serve more than the loss.

    Args:
      every_steps: how often to look; 0 = never. The steps of the evaluations are a good choice.
    """

    name = "futures"
    outlook: Outlook
    config: StopConfig
    every_steps: int
    _advised: str = ""

    def due(self, step: int, end: int) -> bool:
        return self.config.usd_per_centinat > 0 and Every(self.every_steps, end=False).due(step, end)

    def done(self, step: int) -> bool:
        return True  # a run that starts again looks at its next step of `every_steps`

    def __call__(self, moment: Moment) -> Ending | None:
        line, why = from_first(lambda: self._advice(moment.step))
        if line:
            moment.say(line)
        return Ending(STOPPED, why, cause="gate") if why else None

    def _advice(self, step: int) -> tuple[str, str]:
        """Returns a line to show or "", and why the run should end; "" if it should not."""
        try:
            ahead = self.outlook.ahead(step)
        except (ValueError, ArithmeticError) as error:  # a curve that nobody thought of must not end a run
            return f"no forecast at step {step}: {error}", ""
        advice = futures.advice(ahead, self.config.usd_per_centinat)
        new, self._advised = advice.word != self._advised, advice.word
        if advice.word not in (futures.STOP, futures.DECAY):
            return "", ""
        steps = next(future.steps for future in ahead if future.name == futures.DECAY)
        branch = f"jaxlm train {shlex.quote(str(self.outlook.folder))} --branch=decay --steps={steps}"
        line = f"{advice.line.removeprefix('stop: ')}; {branch} finishes the model from here"
        if advice.word == futures.STOP:
            return "", f"stopped at step {step}: {line}"
        return line if new else "", ""
