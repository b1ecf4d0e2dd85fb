"""The hook that forecasts the loss, shows the three futures, and ends a run whose rest costs more than it is worth."""

import shlex
from collections.abc import Callable, Sequence

from jaxlm.config import StopConfig
from jaxlm.plan import forecast, futures
from jaxlm.processes import from_first
from jaxlm.train.loop import STOPPED, Ending, Every, Hook, Moment


class StopByForecast(Hook):
    """Looks at the forecast now and then. Ends the run if its rest costs more than it is worth.

    That is, if 0.01 nats cost more than `stop.usd_per_centinat` whatever it does next. Advice to decay now is shown when it is
    new. It ends nothing, for the rest of the plan may serve more than the loss.

    Args:
      losses: () -> (steps, losses), the training losses that were logged so far, of all starts of the run.
      rate: steps from 1 -> learning rates: those that the run had, and those of its plan.
      prices: () -> (seconds a step, dollars an hour).
      every_steps: how often to look; 0 = never. The steps of the evaluations are a good choice.
      workdir: the run's folder, for the command that it recommends.
    """

    name = "futures"

    def __init__(
        self,
        config: StopConfig,
        losses: Callable[[], tuple[Sequence[int], Sequence[float]]],
        rate: forecast.Rate,
        prices: Callable[[], tuple[float, float]],
        every_steps: int,
        workdir: str,
    ):
        self._limit, self._losses, self._rate, self._prices = config.usd_per_centinat, losses, rate, prices
        self._every, self._workdir = Every(every_steps, end=False), workdir
        self._end, self._said = 0, ""

    def due(self, step: int, end: int) -> bool:
        self._end = end
        return self._limit > 0 and self._every.due(step, end)

    def done(self, step: int) -> bool:
        return True  # a run that starts again looks at its next step of `every_steps`

    def __call__(self, moment: Moment) -> Ending | None:
        line, why = from_first(lambda: self._look(moment.step))
        if line:
            moment.say(line)
        return Ending(STOPPED, why, cause="gate") if why else None

    def _look(self, step: int) -> tuple[str, str]:
        """Returns a line to show or "", and why the run should end; "" if it should not."""
        try:
            found = look(self._losses, self._rate, self._prices, step, self._end)
        except (ValueError, ArithmeticError) as error:  # a curve that nobody thought of must not end a run
            return f"no forecast at step {step}: {error}", ""
        advice = futures.advice(found, self._limit)
        if advice.word == futures.STOP:
            return "", f"stopped at step {step}: {advice.line.removeprefix('stop: ')}{self._branch(found)}"
        new, self._said = advice.word != self._said, advice.word
        return (f"{advice.line}{self._branch(found)}" if new and advice.word == futures.DECAY else ""), ""

    def _branch(self, found: list[futures.Future]) -> str:
        decay = next(f for f in found if f.name == futures.DECAY)
        return f"; jaxlm train {shlex.quote(self._workdir)} --branch=decay --steps={decay.steps} finishes the model from here"


def look(
    losses: Callable[[], tuple[Sequence[int], Sequence[float]]],
    rate: forecast.Rate,
    prices: Callable[[], tuple[float, float]],
    step: int,
    end: int,
) -> list[futures.Future] | forecast.TooEarly:
    """Returns the three futures of a run after `step` of `end` steps; for the arguments see `StopByForecast`."""
    found = forecast.fit(*losses(), rate, step, end)
    return found if isinstance(found, forecast.TooEarly) else futures.futures(found, end, *prices())
