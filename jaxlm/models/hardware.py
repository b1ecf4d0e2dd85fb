"""Adapts a model's config to a platform: replaces `auto`, and raises ConfigError for what the platform can't run."""

import contextlib
import dataclasses
import re

import jax

from jaxlm.config import ConfigError, ModelConfig
from jaxlm.ops import attention


def for_platform(model: ModelConfig, platform: str, context: int = 1) -> ModelConfig:
    """Returns the model's config for a platform: `attention` and `dtype` are chosen for it if they are "auto".

    Args:
      platform: "cpu", "gpu" or "tpu"; it need not be the platform of this machine.
      context: `mesh.context`. If it is 1 and this machine's GPU is Hopper or newer, "auto" becomes `cudnn_packed`, which can't
        split rows, and takes half the time of `cudnn` on an H100 (dev/LEADERBOARD.md).

    Raises ConfigError if the platform can't run the attention backend or the fp8 that the config asks for.
    """
    dtype = model.dtype
    if dtype == "auto":
        dtype = "float32" if platform == "cpu" else "bfloat16"
    backend = attention.resolve_backend(model.attention, platform)
    capability = _cuda_capability(platform)
    if backend.startswith("cudnn") and (dtype == "float32" or model.head_dim % 8 or model.head_dim > 128):
        if model.attention != "auto":
            raise ConfigError(
                f"model.attention={model.attention} needs model.dtype=bfloat16, and head_dim=8, 16, ... 128"
            )
        backend = "xla"
    if model.attention == "auto" and backend == "cudnn" and context == 1 and capability and capability >= (9, 0):
        backend = "cudnn_packed"
    if backend in ("cudnn_packed", "tokamax") and capability and capability < (9, 0):
        has = ".".join(map(str, capability))
        raise ConfigError(f"model.attention={model.attention} needs Hopper or newer (9.0), GPU has {has}: use cudnn")

    if model.fp8:
        _check_fp8(platform, dtype, capability)
    return dataclasses.replace(model, attention=backend, dtype=dtype)


def backends(model: ModelConfig, platform: str) -> list[str]:
    """Returns the names of the attention backends that this platform can run for this model."""
    names = []
    for name in attention.BACKENDS:
        with contextlib.suppress(ConfigError):
            names.append(for_platform(dataclasses.replace(model, attention=name), platform).attention)
    return names


def _cuda_capability(platform: str) -> tuple[int, int] | None:
    """Returns the compute capability of this machine's GPU, (9, 0) for Hopper; None without a GPU, or for other platforms."""
    if platform not in ("gpu", "cuda") or jax.default_backend() != "gpu":
        return None
    name = getattr(jax.devices()[0], "compute_capability", "")
    return tuple(int(part) for part in name.split("."))[:2] if re.fullmatch(r"\d+\.\d+", name) else None


def _check_fp8(platform: str, dtype: str, capability: tuple[int, int] | None) -> None:
    if platform == "cpu":
        return  # slow, but the same numbers: for tests
    if platform not in ("gpu", "cuda") or (capability and capability < (8, 9)):
        have = f"a GPU of compute capability {capability[0]}.{capability[1]}" if capability else f"a {platform}"
        raise ConfigError(f"model.fp8 needs an NVIDIA GPU of Ada, Hopper or newer (8.9), not {have}: set it to False")
    if dtype == "float32":
        raise ConfigError("model.fp8 needs model.dtype=bfloat16: set it, or model.fp8=False")
