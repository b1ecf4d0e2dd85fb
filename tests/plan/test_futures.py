"""The three futures of a run, and the advice: on made-up figures, and on runs whose ends are known."""

import dataclasses
import json
import math
import pathlib

import check_forecast
import numpy as np
import pytest

from jaxlm.plan import forecast

CURVES = pathlib.Path(__file__).parents[3] / "shared/data/curves"
PEAK = 3e-4


def stable(steps):
    """Warm-up of 100 steps, a constant rate, and a linear decay over the last 2,000 of 20,000 steps."""
    return PEAK * np.minimum(1, np.minimum(steps / 100, np.maximum(20_000 - steps, 0) / 2000))


def fitted(done=8000):
    theta = np.append(np.log([2.5, 0.6]), [mean for mean, _ in forecast.PRIORS.values()])
    return forecast.Forecast(done, stable, theta, 1e-4 * np.eye(7), 0.003)


def future(name, usd, gain, half=0.0, steps=1000):
    return forecast.Future(name, steps, 3 - gain, 2.9 - gain, 3.1 - gain, gain, gain - half, gain + half, usd / 2, usd)


def three(plan, decay):
    return [future(forecast.PLAN, *plan), future(forecast.DECAY, *decay), future(forecast.STOP, 0, 0, steps=0)]


def test_the_three_futures():
    plan, decay, stop = forecast.futures(fitted(), 20_000, seconds_per_step=1.8, usd_per_hour=2)
    assert [f.name for f in (plan, decay, stop)] == [forecast.PLAN, forecast.DECAY, forecast.STOP]
    assert [f.steps for f in (plan, decay, stop)] == [12_000, 1200, 0]
    assert [f.hours for f in (plan, decay, stop)] == pytest.approx([6, 0.6, 0])
    assert [f.usd for f in (plan, decay, stop)] == pytest.approx([12, 1.2, 0])
    assert plan.loss < decay.loss < stop.loss
    assert decay.gain == pytest.approx(stop.loss - decay.loss)
    assert decay.gain > 0.08  # most of B: what the falling rate takes off
    assert plan.usd_per_centinat == pytest.approx(12 * 0.01 / plan.gain)
    assert plan.low < plan.loss < plan.high
    assert (stop.gain, stop.usd_per_centinat) == (0, 0)


def test_decaying_now_ends_at_a_rate_of_nothing_and_takes_the_share_asked_for():
    _, decay, _ = forecast.futures(fitted(), 20_000, 1, 1, decay_share=0.25)
    assert decay.steps == 2000
    same = fitted().at(10_000, lambda steps: PEAK * np.maximum(10_000 - steps, 0) / 2000)
    assert (decay.loss, decay.low, decay.high) == pytest.approx(same, abs=1e-4)


def test_decaying_now_takes_no_more_steps_than_the_plan_has():
    plan, decay, _ = forecast.futures(fitted(19_500), 20_000, 1, 1)
    assert decay.steps == plan.steps == 500
    assert decay.loss == pytest.approx(plan.loss, abs=1e-4)  # the plan's own decay is under way


@pytest.mark.parametrize(
    ("plan", "decay", "limit", "word"),
    [
        ((10, 0.10), (1, 0.05), 2, forecast.GO_ON),  # $1 for 0.01 nats
        ((50, 0.10), (1, 0.05), 2, forecast.DECAY),  # $5 and $0.20
        ((50, 0.10), (9, 0.01), 2, forecast.STOP),
        ((50, 0.10), (9, 0.01), 0, forecast.GO_ON),  # whatever it costs
        ((50, 0.10, 0.08), (9, 0.01), 2, forecast.GO_ON),  # too dear, but not for sure
        ((50, 0.10), (9, 0.01, 0.02), 2, forecast.DECAY),
        ((50, -0.01), (9, 0.0), 2, forecast.STOP),  # the loss rises
        ((0, 0.0), (0, 0.0), 2, forecast.GO_ON),  # a machine that costs nothing
    ],
)
def test_advice(plan, decay, limit, word):
    given = forecast.advice(three(plan, decay), limit)
    assert given.word == word
    assert given.line.startswith(word)
    assert "\n" not in given.line


def test_advice_names_its_figures():
    given = forecast.advice(three((50, 0.10), (1, 0.05)), 2)
    assert given.line == (
        "decay now: a decay of 1,000 steps to loss 2.950 (2.850 to 3.050), 0.050 below now, for $1.00, $0.20 for 0.01 nats. "
        "The plan's rest is dearer than $2.00 for 0.01 nats: 1,000 steps to loss 2.900 (2.800 to 3.000), 0.100 below now, "
        "for $50.00, $5.00 for 0.01 nats"
    )


def test_too_early_is_advice_too():
    given = forecast.advice(forecast.TooEarly("too early: 10 of 100 steps"), 2)
    assert given == forecast.Advice(forecast.TOO_EARLY, "too early: 10 of 100 steps")


def test_the_table():
    lines = forecast.table(three((50, 0.10), (9, 0.0)))
    assert len(lines) == 4
    assert " ".join(lines[1].split()) == "on to the plan 1,000 2.9000 2.8000-3.0000 25.0 $50.00 $5.00"
    assert lines[2].split()[-2:] == ["$9.00", "-"]
    assert len({len(line) for line in lines}) == 1


def test_the_summary_is_json():
    found = three((50, 0.10), (9, 0.0))
    text = json.dumps(forecast.summary(found, forecast.advice(found, 2), 500), allow_nan=False)
    plan, decay, stop = json.loads(text)["rows"]
    assert (plan["name"], plan["step"], plan["usd_per_centinat"]) == (forecast.PLAN, 1500, pytest.approx(5))
    assert (decay["usd_per_centinat"], stop["step"]) == (None, 500)
    early = forecast.TooEarly("too early: 10 of 100 steps")
    assert forecast.summary(early, forecast.advice(early, 2), 10) == {"advice": early.why, "rows": []}


@pytest.mark.shared
def test_public_curves_are_never_stopped_where_a_planned_decay_still_pays():
    """At three points of each run, for prices from just what the rest of the plan truly costs up to five times that.

    And it is told to stop, or to decay, where the rest truly costs ten times what the user wants to pay.
    """
    paths = sorted(CURVES.glob("*.csv"))
    if not paths:
        pytest.skip("no shared data")
    words: dict[float, list[str]] = {}
    for path in paths:
        steps, losses, rate = check_forecast.read(path)
        end = int(steps[-1])
        for done in (int(share * end) for share in (0.4, 0.6, 0.9)):
            seen = steps <= done
            fit = forecast.fit(steps[seen], losses[seen], rate, done, end)
            true = float(np.median(losses[seen][-5:]) - np.median(losses[-5:]))
            if isinstance(fit, forecast.TooEarly) or true <= 0:
                continue
            found = forecast.futures(fit, end, 1.0, 1.0)
            price = found[0].usd * forecast.CENTINAT / true
            for times in (1, 1.1, 1.25, 2, 5, 0.1):
                words.setdefault(times, []).append(forecast.advice(found, times * price).word)
    assert len(words[1]) > 50
    assert all(forecast.STOP not in words[times] for times in (1, 1.1, 1.25, 2, 5))
    assert all(set(words[times]) == {forecast.GO_ON} for times in (1.25, 2, 5))
    assert forecast.GO_ON not in words[0.1]
    assert words[0.1].count(forecast.STOP) > 25


def test_prices_of_what_gains_nothing_are_infinite():
    assert future("", 5, 0).usd_per_centinat == math.inf
    assert future("", 5, -0.1).cheapest == math.inf
    assert future("", 0, -0.1).usd_per_centinat == 0
    assert dataclasses.replace(future("", 5, -0.1), gain_high=0.1).cheapest == pytest.approx(5 * 0.01 / 0.3)
