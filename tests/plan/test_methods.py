"""The ways to fine-tune one model, side by side."""

import dataclasses

import pytest

from jaxlm import config
from jaxlm.config import config_files
from jaxlm.models import hardware
from jaxlm.plan import accelerators, fit

CARDS = accelerators.load().accelerators


@pytest.fixture(scope="module", params=["sft", "dpo"])
def rows(request) -> dict[str, dict]:
    c = config.resolve(config_files.load("gpuburnout_1b", ["workdir=w", f"program={request.param}"]))
    c = dataclasses.replace(c, model=hardware.for_platform(c.model, "gpu"))
    return {row["method"]: row for row in fit.by_method(c, CARDS)}


def test_what_is_frozen_takes_no_gradient_and_no_state(rows):
    bytes_ = {name: row["bytes"]["full"] for name, row in rows.items()}
    assert list(bytes_.values()) == sorted(bytes_.values(), reverse=True)
    parameters = 1.04e9
    assert bytes_["all parameters, adamw"] > 16 * parameters
    assert 2 * parameters < bytes_["LoRA"] < 3.5 * parameters
    assert bytes_["LoRA"] - bytes_["QLoRA (nf4)"] == pytest.approx((2 - 4.5 / 8) * 0.973e9, rel=0.05)
    assert all(row["bytes"]["none"] > row["bytes"]["full"] for row in rows.values())


def test_the_smallest_card_holds_it_and_no_smaller_one_does(rows):
    memory = {card.name: card.memory for card in CARDS}
    for row in rows.values():
        need = row["bytes"]["full"]
        assert memory[row["card"]] == min(m for m in memory.values() if m >= need)


def test_a_model_that_no_card_holds_has_none():
    c = config.resolve(config_files.load("quickstart", ["workdir=w", "program=sft", "optim.name=adamw"]))
    c = dataclasses.replace(c, model=hardware.for_platform(c.model, "gpu"))
    small = [dataclasses.replace(card, memory=1e6) for card in CARDS]
    assert {row["card"] for row in fit.by_method(c, small)} == {None}


def test_a_method_changes_the_config_by_its_own_keys():
    c = config.resolve(config_files.load("gpuburnout_1b", ["workdir=w", "program=sft", "optim.name=adamw8bit"]))
    found = fit.with_method(c, "QLoRA (nf4)")
    assert (found.adapter.kind, found.adapter.quantize, found.optim.name) == ("lora", "nf4", "adamw8bit")
    assert fit.own_microbatch(found, fit.ONE_DEVICE) == 1
    assert fit.with_method(c, "all parameters, adamw").optim.name == "adamw"
