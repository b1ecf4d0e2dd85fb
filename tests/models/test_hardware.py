"""What a platform can run of a model."""

import pytest

from jaxlm import config
from jaxlm.config import ConfigError, ModelConfig, config_files
from jaxlm.models import hardware


def model(*overrides: str) -> ModelConfig:
    return config.resolve(config_files.load("quickstart", ["workdir=w", *overrides])).model


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
    m = hardware.for_platform(model(*overrides), platform)
    assert (m.attention, m.dtype) == expected


def test_what_the_platform_cannot_run_is_refused():
    with pytest.raises(ConfigError, match="'cudnn' runs on gpu, not on cpu"):
        hardware.for_platform(model("model.attention=cudnn"), "cpu")
    with pytest.raises(ConfigError, match=r"needs model\.dtype=bfloat16"):
        hardware.for_platform(model("model.attention=cudnn", "model.dtype=float32"), "gpu")


def test_backends_are_those_that_the_platform_runs():
    assert hardware.backends(model(), "cpu") == ["xla", "blocked"]
    assert "cudnn" in hardware.backends(model(), "gpu")
    assert "cudnn" not in hardware.backends(model("model.dtype=float32"), "gpu")


@pytest.mark.parametrize(
    ("overrides", "platform", "capability", "message"),
    [
        ((), "gpu", (8, 0), "needs an NVIDIA GPU of Ada, Hopper or newer .*capability 8.0"),
        ((), "tpu", None, "not a tpu"),
        (("model.dtype=float32",), "gpu", (9, 0), r"model.fp8 needs model\.dtype=bfloat16"),
    ],
)
def test_float8_where_it_is_none_is_refused(overrides, platform, capability, message, monkeypatch):
    monkeypatch.setattr(hardware, "_cuda_capability", lambda platform: capability)
    with pytest.raises(ConfigError, match=message):
        hardware.for_platform(model("model.fp8=True", *overrides), platform)
    hardware.for_platform(model("model.fp8=True"), "cpu")
    monkeypatch.setattr(hardware, "_cuda_capability", lambda platform: (8, 9))
    assert hardware.for_platform(model("model.fp8=True"), "gpu").fp8


@pytest.mark.parametrize("backend", ["cudnn_packed", "tokamax"])
def test_attention_for_hopper_is_refused_below(backend, monkeypatch):
    monkeypatch.setattr(hardware, "_cuda_capability", lambda platform: (8, 0))
    with pytest.raises(ConfigError, match=rf"{backend} needs Hopper or newer .* has 8\.0: use cudnn"):
        hardware.for_platform(model(f"model.attention={backend}"), "gpu")
    assert hardware.for_platform(model(), "gpu").attention == "cudnn"
    monkeypatch.setattr(hardware, "_cuda_capability", lambda platform: (9, 0))
    assert hardware.for_platform(model(f"model.attention={backend}"), "gpu").attention == backend


def test_auto_on_hopper_is_the_packed_kernel_unless_rows_are_split(monkeypatch):
    monkeypatch.setattr(hardware, "_cuda_capability", lambda platform: (9, 0))
    assert hardware.for_platform(model(), "gpu").attention == "cudnn_packed"
    assert hardware.for_platform(model(), "gpu", context=2).attention == "cudnn"
    assert hardware.for_platform(model("model.dtype=float32"), "gpu").attention == "xla"
