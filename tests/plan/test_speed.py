"""The speed of a plan: what was measured comes out, smaller models and remat make it less."""

import dataclasses

import jax
import pytest

from jaxlm import config
from jaxlm.config import config_files
from jaxlm.devices import sharding
from jaxlm.models import hardware
from jaxlm.plan import accelerators, cost, lower
from jaxlm.plan.memory import KEPT

CARDS = accelerators.load()


def load(name: str, *overrides: str) -> config.Config:
    return config.resolve(config_files.load(name, ["workdir=w", *overrides]))


@pytest.mark.parametrize(("card", "measured"), [("A100 80GB", 28.3e3), ("H100", 80_165), ("H200 NVL", 72.8e3)])
def test_the_measured_speeds_of_one_billion(card, measured):
    assert cost.speed(load("gpuburnout_1b"), CARDS.named(card), 1) == pytest.approx(measured, rel=0.02)


def test_mfu_falls_with_the_model():
    a100 = CARDS.named("A100 80GB")
    found = [cost.mfu(load("gpuburnout_1b", f"model.d_model={d}").model, a100) for d in (256, 768, 1024, 2048, 4096)]
    assert found == sorted(found)
    assert found[1] == pytest.approx(0.49, abs=0.01)  # GPT-2 124M in PyTorch
    assert found[3] == found[4] == a100.mfu
    h100 = CARDS.named("H100")  # more FLOPs a byte: small products suffer more
    assert cost.mfu(load("quickstart").model, h100) / h100.mfu < found[0] / a100.mfu


def test_a_tiny_step_is_as_long_as_its_launches():
    c = load("quickstart")
    a100, b200 = CARDS.named("A100 80GB"), CARDS.named("B200")
    assert cost.speed(c, a100, 1) == cost.speed(c, b200, 1) < 2e6
    assert cost.speed(load("gpuburnout_1b"), b200, 1) > 3 * cost.speed(load("gpuburnout_1b"), a100, 1)


def test_remat_takes_the_flops_that_xla_counts():
    """Before XLA optimises, its own count of the lowered step. What is no product (norms, masks) is in it, and not in ours."""
    small = ("train.batch_size=2", "train.microbatch_size=2", "train.seq_len=128", "model.n_layers=1")
    small += ("model.attention=xla", "optim.name=adamw", "model.vocab_size=256", "model.scan_layers=False")
    c = load("quickstart", *small, "loss.tile_tokens=0")
    c = dataclasses.replace(c, model=hardware.for_platform(c.model, "cpu"))
    mesh, counted = sharding.make_mesh(c.mesh, jax.devices()[:1]), {}
    for remat in KEPT:
        changed = dataclasses.replace(c, model=dataclasses.replace(c.model, remat=remat))
        counted[remat] = lower.parts_of(changed, mesh).lower().cost_analysis()["flops"]
    for remat in KEPT:
        assert cost.remat_factor(c, remat) == pytest.approx(counted[remat] / counted["none"], abs=0.025), remat
    assert cost.remat_factor(c, "full") > 1.2


def test_a_lora_is_faster_than_full_training_and_a_quantised_one_slower_than_that():
    a100, rows = CARDS.named("A100 80GB"), "train.microbatch_size=1"
    keys = ("program=sft", rows), ("program=sft", rows, "adapter.kind=lora")
    quantised = (*keys[1], "adapter.quantize=nf4")
    full, lora, qlora = (cost.speed(load("gpuburnout_1b", *k), a100, 1) for k in (*keys, quantised))
    assert 1.3 * full < lora < 1.5 * full
    assert 0.8 * lora < qlora < lora


def test_launches_of_factors_and_of_a_reference_bound_small_models():
    a100 = CARDS.named("A100 80GB")
    kinds = ("program=sft",), ("program=sft", "adapter.kind=lora"), ("program=dpo", "adapter.kind=lora")
    found = [cost.speed(load("quickstart", "optim.name=adamw", *kind), a100, 1) for kind in kinds]
    assert found == sorted(found, reverse=True)
