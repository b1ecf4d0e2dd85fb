"""The page of a plan: its lines are within 100 columns, and say what to do."""

import dataclasses
import math
import os
import sys
import termios
import time

import pytest

from jaxlm import config
from jaxlm.config import config_files
from jaxlm.models import hardware
from jaxlm.plan import accelerators, cost, summary, text

HERE = {"kind": "NVIDIA GeForce RTX 4090", "count": 1, "microbatch": 16, "memory": 23e9, "needed": 61.5e9, "by": "plan"}
HERE |= {"tokens_per_second": 18765.0, "what": "2 of 16 layers, 4 x 2,048 tokens", "time": time.time(), "fits": False}
HERE |= {"load": 3.0, "hours": 174.6, "usd": 279.4, "mfu": 0.412}


def planned(name: str, *overrides: str) -> dict:
    c = config.resolve(config_files.load(name, ["workdir=w", *overrides]))
    c = dataclasses.replace(c, model=hardware.for_platform(c.model, "gpu"))
    return summary.summarise(c) | {"data": None, "here": {"why": ""}}


@pytest.fixture(scope="module")
def plan() -> dict:
    return planned("gpuburnout_1b", "model.remat=full")


def lines(plan: dict) -> list[str]:
    return text.render(plan).splitlines()


@pytest.fixture(scope="module")
def giant() -> dict:
    """Figures with more digits than a shipped config has, from two layers: a summary takes its time for each layer."""
    sizes = {"n_layers": 2, "d_model": 32768, "n_heads": 256, "n_kv_heads": 64, "d_ff": 131072, "vocab_size": 1048576}
    return planned("domain_7b", *(f"model.{key}={size}" for key, size in sizes.items()))


@pytest.mark.parametrize("name", ["quickstart", "plan", "giant"])
def test_a_page_is_100_columns_wide(name, request):
    sources = {f"a_source_with_a_long_name_{n}": 10**9 for n in range(9)}
    data = {"dir": "data/some/where/deep", "tokens": sources, "epochs": {name: 17.23 for name in sources}}
    found = planned(name) if name == "quickstart" else request.getfixturevalue(name)
    page = lines(found | {"data": data, "here": HERE})
    assert [line for line in page if len(line) > text.WIDTH == 100] == []


def test_both_mixtures_are_told_and_the_sources_keep_their_names(plan):
    data = {"dir": "d", "tokens": {"Web": 10**9}, "epochs": {"Web": 2.0}, "mixture": "Web 1 to step 80, then Best 1"}
    assert "\n  Mixture: Web 1 to step 80, then Best 1.\n" in "\n".join(lines(plan | {"data": data}))
    assert "Mixture" not in "\n".join(lines(plan | {"data": {k: v for k, v in data.items() if k != "mixture"}}))


def test_a_forecast_far_beyond_its_ladder_is_called_a_guess(plan):
    found = {"dir": "runs/x/ladder", "loss": 4.2, "low": 4.0, "high": 4.3}

    def page(parameters: float, tokens: float) -> str:
        ladder = found | {"beyond": {"parameters": parameters, "tokens": tokens}}
        return " ".join("\n".join(lines(plan | {"ladder": ladder})).split())

    near = page(8.0, 2.0)
    assert "LADDER 4.200 held-out nats a token at the end, 80% in 4.000 to 4.300, by the runs in runs/x/ladder" in near
    assert "a guess" not in near
    assert "runs/x/ladder; a guess, since it has 12 times their tokens" in page(3.3, 11.8)
    assert "since it has 40 times their parameters, 12 times their tokens" in page(40.0, 11.8)


def test_this_machine_has_a_row_and_a_note(plan):
    page = " ".join("\n".join(lines(plan | {"here": HERE})).split())
    assert "this machine 23 no 1 16 18.8k 7.27 days $279.40 - 41% measured" in page
    assert "other programs" not in page  # a GPU is not slower for them
    cpu = " ".join("\n".join(lines(plan | {"here": HERE | {"kind": "cpu"}})).split())
    assert "while other programs kept it busy" in cpu
    assert "1 x NVIDIA GeForce RTX 4090, measured by plan on" in page
    assert "from 2 of 16 layers, 4 x 2,048 tokens, scaled by FLOPs" in page


def test_a_machine_without_a_row_says_why(plan):
    page = "\n".join(lines(plan | {"here": {"why": "its GPU is in use (process 7)"}}))
    assert "this machine has no row: its GPU is in use (process 7)." in page
    assert "this machine" not in "\n".join(lines(plan)).partition("NOTES")[0]


def test_one_boolean_and_what_it_costs(plan):
    """The first story trained with remat for weeks, and would have been a fifth faster without it."""
    page = " ".join("\n".join(lines(plan)).split())
    assert "none 61.5 GB and 0.81 x the time" in page
    told = "model.remat=none fits too, and takes 0.81 x the time of full: 28.4k tokens/s in place of 22.9k on A100"
    assert told in page
    (row,) = (row for row in plan["accelerators"] if row["name"] == "A100 80GB")
    assert row["tokens_per_second"] == pytest.approx(row["faster"]["tokens_per_second"] / 1.24, rel=0.01)


def test_a_remedy_says_what_it_costs():
    page = " ".join("\n".join(lines(planned("gpuburnout_1b", "plan.accelerator='TPU v5e'"))).split())
    remedy = "optim.name=adamw8bit, model.remat=full, train.microbatch_size=4"
    assert f"one device would do with {remedy}: 9.04k tokens/s" in page
    assert "recomputing counted (1.24 x the time)" in page


def test_spot_that_does_not_pay_is_a_sentence():
    rare = ("plan.accelerator='A100 80GB'", "checkpoint.every_steps=45000", "checkpoint.every_minutes=0")
    page = lines(planned("gpuburnout_1b", *rare))
    (row,) = (line for line in page if line.startswith("A100 80GB"))
    assert row.split()[-3:] == ["more", "64%", "[1]"]
    assert "It pays with a checkpoint at least every 11.3 h" in " ".join(" ".join(page).split())
    never = planned("gpuburnout_1b", *rare[:1], "plan.preemptions_per_day=5000")
    assert math.isinf(never["accelerators"][0]["usd_spot"])
    assert "spot can't pay with so many preemptions" in " ".join(" ".join(lines(never)).split())


def resolved(name: str, *overrides: str) -> config.Config:
    c = config.resolve(config_files.load(name, ["workdir=w", "model.vocab_size=32768", *overrides]))
    return dataclasses.replace(c, model=hardware.for_platform(c.model, "gpu"))


def row_of(card: str, c: config.Config) -> dict:
    """A row of the table, as far as the phases read it."""
    device = accelerators.load().named(card)
    fast = cost.speed(c, device, 1)
    return {"name": card, "fits": True, "devices": 1, "usd": 1.0, "usd_per_hour": device.usd, "tokens_per_second": fast}


@pytest.mark.parametrize("name", config_files.shipped_configs())
def test_every_shipped_limit_holds_at_the_shipped_price(name):
    c = resolved(name)
    if any(phase.usd for phase in c.phases.plan.values()) or c.stop.usd or c.stop.hours:
        cards = (card for card in accelerators.load().accelerators if "40" not in card.name)
        device = next(card for card in cards if card.usd == c.hardware.usd_per_hour)
        found = summary.phases(c, [row_of(device.name, c)])
        assert found["below"] == []
        assert {row["name"] for row in found["rows"]} == {*c.phases.plan, "all"}
        assert all(row["limit_usd"] > row["usd"] > 0 for row in found["rows"][:-1])


@pytest.mark.parametrize(
    ("keys", "only", "words"),
    [
        ([], "", "on 1 x A100 80GB, by its price, at $1.60 an hour (hardware.usd_per_hour);"),
        (["hardware.usd_per_hour=2.7"], "", "on 1 x H100, by its price, at $2.70 an hour"),
        (["hardware.usd_per_hour=0"], "", "on 1 x H100, the cheapest that fits, at $2.70 an hour (its price above:"),
        ([], "H200 NVL", "on 1 x H200 NVL at $1.60 an hour (hardware.usd_per_hour);"),
    ],
)
def test_the_phases_are_priced_on_an_accelerator_that_is_named(plan, keys, only, words):
    rows = [row for row in plan["accelerators"] if row["name"].startswith(only)]
    found = summary.phases(resolved("gpuburnout_1b", *keys), rows)
    page = lines(plan | {"accelerators": rows, "phases": found})
    assert f"PHASES {words}" in " ".join(" ".join(page).split())
    assert max(map(len, page)) <= 100
    assert summary.phases(resolved("gpuburnout_1b"), [row | {"fits": False, "devices": None} for row in rows]) is None


def test_a_phase_takes_its_steps_evaluations_and_saves_and_limits_below_that_are_named(plan):
    old = ("phases.plan.main.usd=100", "phases.plan.finish.usd=50", "stop.hours=100", "stop.usd=500")
    c = resolved("gpuburnout_1b", "model.vocab_size=32005", *old)
    found = summary.phases(c, [row_of("A100 80GB", c)])
    assert [row["key"] for row in found["below"]] == ["phases.plan.main.usd", "phases.plan.finish.usd", "stop.hours"]
    rows = {row["name"]: row for row in found["rows"]}
    everything = rows.pop("all")
    steps = {"smoke": 200, "pilot": 9_800, "main": 50_000, "finish": 30_000}
    assert {name: row["steps"] for name, row in rows.items()} == steps
    held_out, fast = cost.held_out_tokens(c), row_of("A100 80GB", c)["tokens_per_second"]
    evaluations = {"smoke": 2, "pilot": 10, "main": 50, "finish": 30}  # every 1000 steps; at the start, and at each end
    for name, row in rows.items():
        hours = (steps[name] * 64 * 2048 + evaluations[name] * held_out / 3) / fast / 3600
        saves = row["hours"] - hours - (name == "smoke") * cost.START_HOURS
        assert 0 < saves < 0.01 * row["hours"], name
    assert steps["main"] * 64 * 2048 / fast / 3600 * 1.60 == pytest.approx(102.7, abs=0.1)
    assert everything["usd"] == pytest.approx(sum(row["usd"] for row in rows.values()))
    page = " ".join(text.render(plan | {"phases": found}).split())
    assert "config.phases.plan.main.usd=100 is below the 103.6 of the plan: the run would stop there" in page
    assert "config.stop.hours=100 is below the 116.7 of the plan" in page
    assert everything["limit_usd"] == 500


def test_rates_by_part_are_a_table():
    page = lines(planned("quickstart", "optim.rates=('embed/.* 0.5',)"))
    first = [line.split() for line in page].index(["RATES", "parameters", "peak"])
    assert page[first + 1].split() == ["embed/.*", "1,048,576", "0.005"]
    assert not any(line.startswith("RATES") for line in lines(planned("quickstart")))


def test_a_narrow_terminal_folds_words_at_its_width(monkeypatch):
    ours, theirs = os.openpty()
    with os.fdopen(ours), os.fdopen(theirs, "w") as terminal:
        termios.tcsetwinsize(terminal, (40, 60))
        monkeypatch.setattr(sys, "stdout", terminal)
        folded = text.wrapped("word " * 50)
    assert max(map(len, folded.splitlines())) <= 60
    assert len(folded.split()) == 50
