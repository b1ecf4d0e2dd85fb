"""What fits: the largest microbatch, the fewest devices, what would help; and the ways to fine-tune, side by side."""

import dataclasses

import pytest

from jaxlm import config
from jaxlm.config import ConfigError, MeshConfig, config_files
from jaxlm.models import hardware
from jaxlm.plan import accelerators, fit

ONE = MeshConfig(**{field.name: 1 for field in dataclasses.fields(MeshConfig)})


def load(name: str = "gpuburnout_1b", *overrides: str) -> config.Config:
    c = config.resolve(config_files.load(name, ["workdir=w", *overrides]))
    return dataclasses.replace(c, model=hardware.for_platform(c.model, "gpu"))


def test_meshes_are_parsed():
    assert fit.parse_mesh("data:4, fsdp:64") == dataclasses.replace(ONE, data=4, fsdp=64)
    assert fit.devices_of(fit.parse_mesh("data:4,fsdp:64")) == 256


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *(
            (text, "must be axes")
            for text in ("fdsp:8", "fsdp", "fsdp:0", "fsdp:-1", "fsdp:two", "fsdp:2,fsdp:4", "64")
        ),
        ("fsdp:7", "train.batch_size=64 is not divisible by the mesh's data x fsdp = 7 devices"),
        ("tensor:100000", "at most 4,096"),
        ("tensor:7", "mesh.tensor=7 does not divide model.n_heads=32"),
        ("context:3", "train.seq_len=2048 is not divisible by the mesh's context=3 devices"),
    ],
)
def test_bad_meshes_are_one_line(text, message):
    with pytest.raises(ConfigError) as error:
        fit.check_mesh(load("gpuburnout_1b", f"plan.mesh={text}"), fit.parse_mesh(text))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("override", ["model.attention=cudnn_packed", "model.fp8=True"])
def test_what_does_not_split_rows_over_context_is_one_line(override):
    with pytest.raises(ConfigError, match=r"does not split rows over mesh\.context=2"):
        fit.check_mesh(load("gpuburnout_1b", override), fit.parse_mesh("context:2"))


def test_the_largest_microbatch_fits_and_the_next_does_not():
    planner = fit.Planner(load())
    for limit in (24e9, 40e9, 79e9):
        found = planner.largest(ONE, limit)
        assert found.memory.total <= limit < planner.memory(ONE, microbatch=2 * found.microbatch).total
    assert planner.largest(ONE, 1e9) is None
    assert planner.largest(dataclasses.replace(ONE, fsdp=8), 79e9).microbatch % 8 == 0


def test_the_fewest_devices():
    planner = fit.Planner(load("domain_7b"))
    found = planner.fewest(79e9)
    assert found.devices > 1
    half = dataclasses.replace(ONE, fsdp=found.devices // 2)
    assert planner.largest(half, 79e9) is None


def test_remedies_are_tried_from_the_cheapest():
    planner = fit.Planner(load("gpuburnout_1b", "train.batch_size=16"))
    least = {remat: planner.memory(ONE, remat=remat, microbatch=1).total for remat in ("none", "full")}
    assert planner.remedy(ONE, least["none"]).remat == "none"
    assert planner.remedy(ONE, least["full"]).remat == "full"
    below = planner.remedy(ONE, least["full"] - 1)
    assert below.optimizer == "adamw8bit"
    assert planner.remedy(ONE, 1e9) is None


@pytest.mark.engines
def test_the_shipped_configs_fit_what_they_are_meant_for():
    """80 GB cards: 1B and 3B on one, 7B on eight; 134M on 24 GB."""
    on_one = dict.fromkeys(
        ("gpuburnout_1b", "gpuburnout_1b_h128", "speed_1b", "gpuburnout_3b", "pilot_400m"), (78.6e9, 1)
    )
    for name, (limit, devices) in (on_one | {"domain_7b": (78.6e9, 8), "gpuburnout_134m": (23.6e9, 1)}).items():
        c = load(name)
        assert fit.Planner(c).memory(dataclasses.replace(ONE, fsdp=devices)).total < limit, name


CARDS = accelerators.load().accelerators


@pytest.fixture(scope="module")
def rows() -> dict[str, dict]:
    return {row["method"]: row for row in fit.by_method(load("gpuburnout_1b", "program=dpo"), CARDS)}


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
    c = load("quickstart", "program=sft", "optim.name=adamw")
    small = [dataclasses.replace(card, memory=1e6) for card in CARDS]
    assert {row["card"] for row in fit.by_method(c, small)} == {None}


def test_a_method_changes_the_config_by_its_own_keys():
    c = load("gpuburnout_1b", "program=sft", "optim.name=adamw8bit")
    found = fit.with_method(c, "QLoRA (nf4)")
    assert (found.adapter.kind, found.adapter.quantize, found.optim.name) == ("lora", "nf4", "adamw8bit")
    assert fit.own_microbatch(found, fit.ONE_DEVICE) == 1
    assert fit.with_method(c, "all parameters, adamw").optim.name == "adamw"
