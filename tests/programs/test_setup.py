"""What programs do before the first step."""

import dataclasses
import json
import types

import jax
import pytest

from jaxlm import config, config_files
from jaxlm.config import ConfigError
from jaxlm.programs import setup


def resolve(*overrides: str) -> config.Config:
    return config.resolve(config_files.load("quickstart", ["workdir=w", *overrides]))


@pytest.mark.parametrize(
    ("overrides", "platform", "expected"),
    [
        ((), "cpu", ("blocked", "float32")),
        ((), "gpu", ("cudnn", "bfloat16")),
        ((), "tpu", ("pallas", "bfloat16")),
        (("model.dtype=float32",), "gpu", ("xla", "float32")),
        (("model.attention=xla", "model.dtype=bfloat16"), "cpu", ("xla", "bfloat16")),
    ],
)
def test_auto_follows_the_platform(overrides, platform, expected):
    m = setup.for_platform(resolve(*overrides), platform).model
    assert (m.attention, m.dtype) == expected


def test_what_the_platform_cannot_run_is_refused():
    with pytest.raises(ConfigError, match="'cudnn' runs on gpu, not on cpu"):
        setup.for_platform(resolve("model.attention=cudnn"), "cpu")
    with pytest.raises(ConfigError, match=r"needs model\.dtype=bfloat16"):
        setup.for_platform(resolve("model.attention=cudnn", "model.dtype=float32"), "gpu")


@pytest.mark.parametrize(
    ("overrides", "platform", "capability", "message"),
    [
        ((), "gpu", (8, 0), "needs an NVIDIA GPU of Ada, Hopper or newer .*capability 8.0"),
        ((), "tpu", None, "here is a tpu"),
        (("model.dtype=float32",), "gpu", (9, 0), r"model.fp8 is for model\.dtype=bfloat16"),
    ],
)
def test_float8_where_it_is_none_is_refused(overrides, platform, capability, message, monkeypatch):
    monkeypatch.setattr(setup, "_cuda_capability", lambda platform: capability)
    with pytest.raises(ConfigError, match=message):
        setup.for_platform(resolve("model.fp8=True", *overrides), platform)
    setup.for_platform(resolve("model.fp8=True"), "cpu")
    monkeypatch.setattr(setup, "_cuda_capability", lambda platform: (8, 9))
    assert setup.for_platform(resolve("model.fp8=True"), "gpu").model.fp8


@pytest.mark.parametrize("backend", ["cudnn_packed", "tokamax"])
def test_attention_for_hopper_is_refused_below(backend, monkeypatch):
    monkeypatch.setattr(setup, "_cuda_capability", lambda platform: (8, 0))
    with pytest.raises(ConfigError, match=rf"{backend} needs Hopper or newer .* has 8\.0: use cudnn"):
        setup.for_platform(resolve(f"model.attention={backend}"), "gpu")
    assert setup.for_platform(resolve(), "gpu").model.attention == "cudnn"
    monkeypatch.setattr(setup, "_cuda_capability", lambda platform: (9, 0))
    assert setup.for_platform(resolve(f"model.attention={backend}"), "gpu").model.attention == backend


def test_a_machine_is_asked_for_its_memory_only_where_something_is_left_open(monkeypatch):
    """Off Linux it may not know."""

    def unknown(*_):
        raise FileNotFoundError("/proc/meminfo")

    monkeypatch.setattr(setup.tune, "memory_limit", unknown)
    settled = setup.for_platform(resolve(), "cpu")
    assert setup.fit(settled, None) is settled
    with pytest.raises(FileNotFoundError):
        setup.fit(dataclasses.replace(settled, model=dataclasses.replace(settled.model, remat="auto")), None)


def test_offload_is_refused_where_the_host_is_out_of_reach():
    asked, here = resolve("optim.offload=True"), jax.devices()[0]
    setup.check_offload(asked, here)
    alone = types.SimpleNamespace(device_kind="abacus", addressable_memories=lambda: here.addressable_memories()[:1])
    setup.check_offload(resolve(), alone)
    with pytest.raises(ConfigError, match=r"optim\.offload: JAX has no pinned_host memory for abacus"):
        setup.check_offload(asked, alone)


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="can't be made"):
        setup.workdir(resolve(f"workdir={tmp_path / 'file'}"))


def test_a_folder_without_checkpoints_takes_another_model(tmp_path):
    c = resolve(f"workdir={tmp_path}")
    (tmp_path / "config.json").write_text(config.to_json(c))
    other = dataclasses.replace(c, model=dataclasses.replace(c.model, d_ff=64))
    setup.check_same_model(tmp_path, other)
    (tmp_path / "checkpoints" / "5").mkdir(parents=True)
    setup.check_same_model(tmp_path, dataclasses.replace(c, model=dataclasses.replace(c.model, remat="full")))
    with pytest.raises(ConfigError, match=r"holds a model with d_ff=704, now model\.d_ff=64"):
        setup.check_same_model(tmp_path, other)


@pytest.mark.parametrize(("key", "value"), [("name", "muon"), ("mu_dtype", "bfloat16")])
def test_checkpoints_of_another_optimizer_are_not_called_damaged(tmp_path, key, value):
    c = resolve(f"workdir={tmp_path}")
    (tmp_path / "config.json").write_text(config.to_json(c))
    (tmp_path / "checkpoints" / "5").mkdir(parents=True)
    setup.check_same_optimizer(tmp_path, dataclasses.replace(c, optim=dataclasses.replace(c.optim, lr=1.0)))
    with pytest.raises(ConfigError, match=rf"holds an optimizer with {key}=\w+, now optim\.{key}={value}: set it back"):
        setup.check_same_optimizer(tmp_path, dataclasses.replace(c, optim=dataclasses.replace(c.optim, **{key: value})))


def test_an_old_run_has_the_defaults_of_newer_keys(tmp_path):
    c = resolve(f"workdir={tmp_path}")
    saved = json.loads(config.to_json(c))
    del saved["log"]["wandb"]
    (tmp_path / "config.json").write_text(json.dumps(saved))
    assert config.resolve(config_files.from_run(tmp_path / "config.json")).log.wandb == ""
    (tmp_path / "config.json").write_text("{broken")
    with pytest.raises(ConfigError, match="is not the config of a run"):
        config_files.from_run(tmp_path / "config.json")
