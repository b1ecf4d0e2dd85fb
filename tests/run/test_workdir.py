"""The run's folder, and what is refused before a run starts in it."""

import dataclasses
import re
import types
import typing

import jax
import pytest

from jaxlm import config
from jaxlm.cli import cli
from jaxlm.config import ConfigError, config_files
from jaxlm.devices import sharding
from jaxlm.plan import accelerators, settle
from jaxlm.run import workdir


def resolve(*overrides: str) -> config.Config:
    return config.resolve(config_files.load("quickstart", ["workdir=w", *overrides]))


def test_offload_is_refused_where_the_host_is_out_of_reach():
    asked, here = resolve("optim.offload=True"), jax.devices()[0]
    workdir.check_offload(asked.optim, asked.model, here)
    alone = types.SimpleNamespace(device_kind="abacus", addressable_memories=lambda: here.addressable_memories()[:1])
    plain = resolve()
    workdir.check_offload(plain.optim, plain.model, alone)
    with pytest.raises(ConfigError, match=r"optim\.offload: JAX has no pinned_host memory for abacus"):
        workdir.check_offload(asked.optim, asked.model, alone)


def test_a_run_has_begun_once_there_is_a_checkpoint(tmp_path):
    assert not workdir.has_checkpoints(tmp_path)
    (tmp_path / "checkpoints/8.restoring").mkdir(parents=True)
    assert not workdir.has_checkpoints(tmp_path)
    (tmp_path / "checkpoints/8").mkdir()
    assert workdir.has_checkpoints(tmp_path)


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="can't be made"):
        workdir.workdir(str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="no folder for this run"):
        workdir.workdir("")


def test_a_folder_without_checkpoints_takes_another_model(tmp_path):
    c = resolve(f"workdir={tmp_path}")
    (tmp_path / "config.json").write_text(config.to_json(c))
    other = dataclasses.replace(c.model, d_ff=64)
    workdir.check_same_model(tmp_path, other)
    (tmp_path / "checkpoints" / "5").mkdir(parents=True)
    workdir.check_same_model(tmp_path, dataclasses.replace(c.model, remat="full"))
    with pytest.raises(ConfigError, match=r"holds a model with d_ff=512, now model\.d_ff=64"):
        workdir.check_same_model(tmp_path, other)


@pytest.mark.parametrize(("key", "value"), [("name", "adamw"), ("mu_dtype", "bfloat16")])
def test_checkpoints_of_another_optimizer_are_not_called_damaged(tmp_path, key, value):
    c = resolve(f"workdir={tmp_path}")
    (tmp_path / "config.json").write_text(config.to_json(c))
    (tmp_path / "checkpoints" / "5").mkdir(parents=True)
    workdir.check_same_optimizer(tmp_path, dataclasses.replace(c.optim, lr=1.0))
    with pytest.raises(ConfigError, match=rf"holds an optimizer with {key}=\w+, now optim\.{key}={value}: set it back"):
        workdir.check_same_optimizer(tmp_path, dataclasses.replace(c.optim, **{key: value}))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.microbatch_size=4", "train.microbatch_size=4 is not divisible by the mesh's data x fsdp = 8 devices"),
        ("mesh.tensor=8", r"mesh\.tensor=8 does not divide model\.n_heads"),
        ("mesh.context=8", r"train\.seq_len=\d+ is not divisible by the mesh's context=8"),
        ("model.d_ff=96", r"now model\.d_ff=96"),
        ("optim.name=adamw", r"now optim\.name=adamw"),
    ],
)
def test_a_start_is_refused_before_anything_is_read(tmp_path, override, message):
    same = [f"workdir={tmp_path}", "train.batch_size=16", "train.microbatch_size=8", "eval.batch_size=8", "mesh.data=1"]
    same += ["mesh.fsdp=-1", "train.seq_len=60", "optim.warmup_steps=1"]
    c = resolve(*same)
    (tmp_path / "config.json").write_text(config.to_json(c))
    (tmp_path / "checkpoints" / "5").mkdir(parents=True)
    assert workdir.check(c, sharding.make_mesh(c.mesh)) == tmp_path
    other = resolve(*same, override)
    with pytest.raises(ConfigError, match=message):
        workdir.check(other, sharding.make_mesh(other.mesh))


def test_the_rates_that_a_run_goes_on_with_are_its_own_or_its_trunks(tmp_path):
    trunk, run = tmp_path / "trunk", tmp_path / "run"
    for folder, lr in ((trunk, "0.25"), (run, "0.5")):
        folder.mkdir()
        (folder / "config.json").write_text(config.to_json(resolve(f"workdir={folder}", f"optim.lr={lr}")))
    new = resolve(f"workdir={run}")
    branch = resolve(f"workdir={run}", f"origin={trunk}", "origin_state=True")
    weights_alone = resolve(f"workdir={run}", f"origin={trunk}")
    assert settle.rates_so_far(run, new) is None  # it has no checkpoint
    assert settle.rates_so_far(run, weights_alone) is None
    assert settle.rates_so_far(run, branch) == {"lr": 0.25, "matrix_lr_ratio": 1.0, "b2": 0.994}
    (run / "checkpoints" / "5").mkdir(parents=True)
    assert (
        settle.rates_so_far(run, new)
        == settle.rates_so_far(run, branch)
        == {"lr": 0.5, "matrix_lr_ratio": 1.0, "b2": 0.994}
    )


BUDGETS = ("phases.plan.smoke.usd", "stop.usd", "stop.usd_per_centinat", "checkpoint.max_unprotected_usd")
FLAG = "--config.hardware.usd_per_hour="
CARDS = {
    "NVIDIA A100-SXM4-80GB": f"{FLAG}1.1 (A100 40GB) or {FLAG}1.6 (A100 80GB)",
    "NVIDIA H200 NVL": f"{FLAG}3.3 (H200 NVL)",
    "NVIDIA H200": f"{FLAG}3.5 (H200)",
    "TPU v5 lite": f"{FLAG}1.2 (TPU v5e)",
    "NVIDIA H100 NVL": f"{FLAG}PRICE (NVIDIA H100 NVL)",
    "cpu": f"{FLAG}PRICE (cpu)",
}


@pytest.mark.parametrize("key", BUDGETS)
@pytest.mark.parametrize("card", CARDS)
def test_a_budget_without_a_price_is_refused_with_the_flags_to_type(key, card):
    story = config_files.load("gpuburnout_1b", ["workdir=w", "hardware.usd_per_hour=0"])
    for phase in story.phases.plan:
        story.phases.plan[phase].usd = 0.0
    accelerators.check_price(config.resolve(story), card, 1)
    config_files.apply_override(story, f"{key}=.01")
    c = config.resolve(story)
    with pytest.raises(ConfigError) as error:
        accelerators.check_price(c, card, 1)
    assert str(error.value) == (
        f"config.{key}=0.01 is a limit in dollars, which needs the machine's price: give {CARDS[card]}, or what an "
        "hour of this machine costs you"
    )
    accelerators.check_price(
        dataclasses.replace(c, hardware=dataclasses.replace(c.hardware, usd_per_hour=1.0)), card, 1
    )


def test_training_refuses_it_before_it_makes_data(tmp_path, capsys):
    keys = {"workdir": tmp_path, "stop.usd": 9, "train.batch_size": 8, "train.microbatch_size": 8}
    assert cli.main(["train", "quickstart", *(f"--config.{key}={value}" for key, value in keys.items())]) == 2
    assert re.search(r"stop\.usd=9 is a limit in dollars, .*usd_per_hour=PRICE \(8 x cpu\)", capsys.readouterr().err)
    assert not (tmp_path / "data").exists()


def test_the_price_is_that_of_all_devices():
    c = resolve("stop.usd=9")
    with pytest.raises(ConfigError, match=r"=21\.6 \(8 x H100\)"):
        accelerators.check_price(c, "NVIDIA H100 80GB HBM3", 8)
    with pytest.raises(ConfigError, match=r"PRICE \(2 x cpu\)"):
        accelerators.check_price(c, "cpu", 2)


def test_every_key_that_counts_dollars_needs_a_price():
    """All keys with usd in their names, but the price itself."""

    def keys(section: type, path: str = "") -> set[str]:
        found = set()
        for field in dataclasses.fields(section):
            inner = (field.type, *typing.get_args(field.type))
            parts = [part for part in inner if isinstance(part, type) and dataclasses.is_dataclass(part)]
            found |= keys(parts[0], f"{path}{field.name}.") if parts else {f"{path}{field.name}"}
        return {key for key in found if "usd" in key}

    known = {key.replace(".smoke", "") for key in BUDGETS}
    assert keys(config.Config) == known | {"hardware.usd_per_hour"}
