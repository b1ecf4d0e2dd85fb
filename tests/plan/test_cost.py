"""Hours and dollars, on demand and on spot."""

import math

import numpy as np
import pytest

from jaxlm import config
from jaxlm.config import config_files
from jaxlm.plan import accelerators
from jaxlm.plan.cost import cost, save_hours, slow_down, tokens
from jaxlm.run.checkpoints.pace import minutes

A100 = accelerators.load().named("A100 80GB")


def load(*overrides: str) -> config.Config:
    return config.resolve(config_files.load("gpuburnout_1b", ["workdir=w", *overrides]))


def test_one_run_by_hand():
    c = load()
    found = cost(c, A100, devices=1, hosts=1)
    assert tokens(c) == 90_000 * 64 * 2048
    assert found["tokens_per_second"] == pytest.approx(28.36e3, rel=1e-3)
    assert found["hours"] == pytest.approx(tokens(c) / 28.36e3 / 3600, rel=1e-3)
    assert found["usd"] == pytest.approx(found["hours"] * A100.usd)
    assert found["usd_per_billion"] == pytest.approx(found["usd"] / tokens(c) * 1e9)


def test_the_storys_dollars():
    """90,000 steps for $175 on one A100 at its own speed: batches of about 60 rows of 2,048 tokens, at our price an hour."""
    assert cost(load(), A100, devices=1, hosts=1)["usd"] == pytest.approx(175, rel=0.1)


def test_more_devices_take_less_time_for_the_same_dollars():
    one, eight = (cost(load(), A100, devices=n, hosts=1) for n in (1, 8))
    assert eight["hours"] == pytest.approx(one["hours"] / 8)
    assert eight["usd"] == pytest.approx(one["usd"])


def test_spot_against_a_simulation():
    """Preemptions at random, each losing what came since the last checkpoint and the restart."""
    c = load("plan.preemptions_per_day=12", "plan.restart_minutes=15")
    hours = 20.0
    rng = np.random.default_rng(0)
    interval, restart, totals = hours / 20, 0.25, []
    for _ in range(4000):
        clock, done, next_one = 0.0, 0.0, rng.exponential(2.0)
        while done < hours:
            if clock + hours - done <= next_one:
                clock += hours - done
                break
            done = math.floor((done + next_one - clock) / interval + 1e-9) * interval
            clock = next_one + restart
            next_one = clock + rng.exponential(2.0)
        totals.append(clock)
    assert slow_down(c, interval, hosts=1) * hours == pytest.approx(np.mean(totals), rel=0.02)


def test_spot_gets_worse_with_hosts_and_rare_checkpoints():
    c = load("plan.preemptions_per_day=1")
    assert slow_down(c, 1, 1) < slow_down(c, 1, 4)
    assert slow_down(c, 1, 1) < slow_down(c, 9, 1)
    assert slow_down(load("plan.preemptions_per_day=0"), 100, 1) == 1
    # To first order: half an interval and ten minutes for each preemption.
    assert slow_down(c, 100 / 90, 1) == pytest.approx(1 + (100 / 90 / 2 + 1 / 6) / 24, rel=1e-3)
    assert slow_down(load("plan.preemptions_per_day=5000"), 1, 1) == math.inf
    never = cost(load("plan.preemptions_per_day=5000", "checkpoint.every_minutes=0"), A100, 1, 1)
    assert (never["usd_spot"], never["spot_pays_hours"]) == (math.inf, 0)


def test_the_plan_saves_as_often_as_training_does():
    c = load("checkpoint.every_steps=9000")  # a tenth of the run
    state = 12 * 1_038_692_352
    auto = minutes(state / 1e10, state / 1e9, 2.0)
    assert save_hours(c, 100, devices=1, hosts=1) == pytest.approx(auto / 60)
    assert save_hours(c, 100, devices=16, hosts=2) < auto / 60
    assert save_hours(c, auto / 60, 1, 1) == pytest.approx(auto / 60 / 10)
    assert save_hours(load("checkpoint.every_steps=9000", "checkpoint.every_minutes=30"), 100, 1, 1) == 0.5
    assert save_hours(load("checkpoint.every_steps=9000", "checkpoint.every_minutes=0"), 100, 1, 1) == 10
    assert save_hours(load("checkpoint.every_steps=0", "checkpoint.every_minutes=0"), 100, 1, 1) == 100


def test_how_often_spot_must_save_to_pay():
    c = load("checkpoint.every_steps=9000", "checkpoint.every_minutes=0")
    found = cost(c, A100, devices=1, hosts=1)
    assert found["usd_spot"] > found["usd"]
    for share, pays in ((0.95, True), (1.05, False)):
        often = f"checkpoint.every_minutes={found['spot_pays_hours'] * 60 * share}"
        other = cost(load("checkpoint.every_steps=0", often), A100, 1, 1)
        assert (other["usd_spot"] < other["usd"]) == pays
    assert cost(load("train.steps=100", "optim.warmup_steps=1"), A100, 1, 1)["spot_pays_hours"] == math.inf


def test_a_reference_that_judges_once_costs_a_third_of_the_training():
    full = load("program=dpo", "model.remat=none")
    found, plain = (cost(c, A100, devices=1, hosts=1) for c in (full, load("program=sft", "model.remat=none")))
    assert found["judging_hours"] == pytest.approx(plain["hours"] / 3, rel=1e-3)
    assert found["hours"] == pytest.approx(plain["hours"] + found["judging_hours"])
    assert found["usd"] == pytest.approx(found["hours"] * A100.usd)
    again = cost(load("program=dpo", "adapter.kind=lora", "model.remat=none"), A100, devices=1, hosts=1)
    assert (again["judging_hours"], plain["judging_hours"]) == (0, 0)
