"""The hook that ends a run whose rest costs more than it is worth."""

import pathlib
import types

import numpy as np
import pytest

from jaxlm.config import StopConfig
from jaxlm.plan import forecast
from jaxlm.train import loop
from jaxlm.train.outlook import Outlook, StopByForecast

END = 20_000


def rate(steps):
    """A warm-up, a constant rate, and a linear decay over the last 2,000 steps."""
    return np.minimum(1, np.minimum(steps / 100, np.maximum(END - steps, 0) / 2000))


def constant(steps):
    return np.minimum(1, steps / 100)


THETA = np.append(np.log([2.5, 0.6]), [mean for mean, _ in forecast.PRIORS.values()])


def losses(done, of=rate):
    """The losses that the law gives, at each 50th step."""
    steps = np.arange(50, done + 1, 50)
    return steps, forecast.Forecast(done, of, THETA, np.zeros((7, 7)), 0.0).curve(steps)[0]


def hook(usd_per_centinat=1.0, usd_per_hour=1.0, of=rate, every=1000, done=10_000, seen=rate):
    """A hook that is called after `done` steps of a second each, and what it says."""

    class Known(Outlook):
        def losses(self):
            return losses(done, seen)

        def prices(self):
            return 1.0, usd_per_hour

    said, look = [], Known(pathlib.Path("runs/a"), of, END, usd_per_hour)
    made = StopByForecast(look, StopConfig(0.0, 0.0, usd_per_centinat), every)
    return lambda: made(types.SimpleNamespace(step=done, say=said.append)), said, made


def test_by_default_it_never_looks():
    _, _, made = hook(usd_per_centinat=0.0)
    assert not any(made.due(step, END) for step in range(0, END + 1, 100))


def test_it_looks_at_every_evaluation_between_the_ends():
    _, _, made = hook()
    assert [step for step in range(0, 5001, 500) if made.due(step, 5000)] == [1000, 2000, 3000, 4000]
    assert made.done(1000)  # nothing is owed by a start before
    _, _, never = hook(every=0)
    assert not never.due(1000, END)


def test_a_rest_that_pays_goes_on():
    call, said, _ = hook(usd_per_hour=1.0)
    assert call() is None
    assert said == []


def test_a_rest_that_is_too_dear_ends_the_run_and_says_what_a_decay_would_bring():
    call, _, _ = hook(usd_per_hour=1000.0)
    ending = call()
    assert (ending.code, ending.cause, ending.keep) == (loop.STOPPED, "gate", True)
    assert ending.why.startswith(
        "stopped at step 10000: all that is left is dearer than $1.00 for 0.01 nats. The plan's rest:"
    )
    assert ending.why.endswith("; jaxlm train runs/a --branch=decay --steps=1500 finishes the model from here")


def test_where_a_decay_now_still_pays_it_says_so_once_and_goes_on():
    call, said, _ = hook(usd_per_hour=20.0)
    assert call() is None
    assert call() is None
    (line,) = said
    assert line.startswith("decay now: a decay of 1,500 steps to loss")
    assert "--branch=decay --steps=1500" in line


def test_a_rest_without_a_decay_costs_more_for_the_same_gain():
    """The same losses and prices: with the plan's decay the rest pays, without it a decay now is better."""
    with_decay, without = (hook(usd_per_hour=4.0, of=of, done=15_000)[:2] for of in (rate, constant))
    assert (with_decay[0](), without[0]()) == (None, None)
    assert with_decay[1] == []
    assert without[1][0].startswith("decay now:")


def test_too_early_is_quiet():
    call, said, _ = hook(usd_per_hour=1000.0, done=4000)
    assert call() is None
    assert said == []


@pytest.mark.parametrize("of", [lambda steps: 0 * steps, lambda steps: np.nan * steps])
def test_what_nobody_thought_of_never_ends_a_run(of):
    call, said, _ = hook(usd_per_hour=1000.0, of=of)
    assert call() is None
    assert said == ["no forecast at step 10000: the learning rate is 0 or not finite"]
