"""Hours and dollars, on demand and on spot."""

import dataclasses
import math

import numpy as np
import pytest

from jaxlm import config, config_files
from jaxlm.plan import accelerators
from jaxlm.plan.cost import cost, slow_down, tokens

A100 = accelerators.load().named("A100 80GB")


def load(*overrides: str) -> config.Config:
    return config.resolve(config_files.load("gpuburnout_1b", ["workdir=w", *overrides]))


def test_one_run_by_hand():
    c = load()
    found = cost(c, A100, devices=1, hosts=1)
    assert tokens(c) == 90_000 * 64 * 2048
    assert found.tokens_per_second == pytest.approx(28.36e3, rel=1e-3)
    assert found.hours == pytest.approx(tokens(c) / 28.36e3 / 3600, rel=1e-3)
    assert found.usd == pytest.approx(found.hours * A100.usd)
    assert found.usd_per_billion == pytest.approx(found.usd / tokens(c) * 1e9)


def test_the_storys_dollars():
    """90,000 steps for $175 on one A100 at its own speed: batches of about 60 rows of 2,048 tokens, at our price an hour."""
    assert cost(load(), A100, devices=1, hosts=1).usd == pytest.approx(175, rel=0.1)


def test_more_devices_take_less_time_for_the_same_dollars():
    one, eight = (cost(load(), A100, devices=n, hosts=1) for n in (1, 8))
    assert eight.hours == pytest.approx(one.hours / 8)
    assert eight.usd == pytest.approx(one.usd)


def test_spot_against_a_simulation():
    """Preemptions at random, each losing what came since the last checkpoint and the restart."""
    c = load("plan.preemptions_per_day=12", "plan.restart_minutes=15", "train.steps=2000", "checkpoint.every_steps=100")
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
    assert slow_down(c, hours, hosts=1) * hours == pytest.approx(np.mean(totals), rel=0.02)


def test_spot_gets_worse_with_hosts_and_rare_checkpoints():
    c = load("plan.preemptions_per_day=1")
    assert slow_down(c, 100, 1) < slow_down(c, 100, 4)
    rare = dataclasses.replace(c, checkpoint=dataclasses.replace(c.checkpoint, every_steps=9000))
    assert slow_down(c, 100, 1) < slow_down(rare, 100, 1)
    assert slow_down(load("plan.preemptions_per_day=0"), 100, 1) == 1
    # To first order: half an interval (90,000 steps of 1,000 in 100 hours) and ten minutes for each preemption.
    assert slow_down(c, 100, 1) == pytest.approx(1 + (100 / 90 / 2 + 1 / 6) / 24, rel=1e-3)
    assert slow_down(load("plan.preemptions_per_day=5000"), 100, 1) == math.inf
    assert cost(load("plan.preemptions_per_day=5000"), A100, 1, 1).usd_spot == math.inf
