"""Sets XLA's flags, and how much of a GPU's memory JAX takes, before the first device is touched.

XLA reads its flags once, when the first backend starts, and ends the process if it does not know a flag. Flags in the
environment win over those set here, because the user set them.
"""

import os
import subprocess
import sys

from jax._src import xla_bridge

from jaxlm.config import ConfigError

# Flag -> (value, why). A flag is here if it was measured (dev/LEADERBOARD.md) or mends a defect. Names that begin with
# xla_gpu_ matter on GPUs alone. scripts/bench_gpu.py tries candidates beside these.
FLAGS: dict[str, tuple[str, str]] = {}

# Share of a GPU's memory that JAX's allocator takes at the start. With JAX's own default, 0.75, runs that fit would run
# out of memory. The rest is for CUDA, cuBLAS, cuDNN and NCCL, which allocate for themselves.
MEMORY_FRACTION = 0.92
_MEMORY_KEYS = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")


def apply(asked: tuple[str, ...]) -> None:
    """Writes jaxlm's flags and those in `hardware.xla_flags` to XLA_FLAGS, and sets the memory fraction.

    If a flag has two values, the later one counts. The order is: jaxlm's own flags, `asked`, the flags already in
    XLA_FLAGS.

    Args:
      asked: the flags in `hardware.xla_flags`, each NAME=VALUE, with or without leading dashes. VALUE may be empty
        (xla_gpu_enable_command_buffer=).

    Raises:
      ConfigError: XLA does not know a flag or can't read its value, or this process has started its devices already.
    """
    if not any(os.environ.get(key) for key in _MEMORY_KEYS):
        os.environ[_MEMORY_KEYS[0]] = str(MEMORY_FRACTION)
    theirs = os.environ.get("XLA_FLAGS", "").split()
    wanted = [f"--{name}={value}" for name, (value, _) in FLAGS.items()] + [_flag(text) for text in asked]
    new = [flag for flag in wanted if flag not in theirs]
    if not new:
        return
    if xla_bridge.backends_are_initialized():
        if asked:
            raise ConfigError(
                f"config.hardware.xla_flags={' '.join(asked)} comes too late: JAX has started its devices"
            )
        return
    flags = " ".join(new + theirs)
    if asked:
        _check(flags)
    os.environ["XLA_FLAGS"] = flags


def _flag(text: str) -> str:
    name, equals, value = text.strip().lstrip("-").partition("=")
    if not name.startswith("xla_") or not equals or " " in text.strip():
        raise ConfigError(
            f"config.hardware.xla_flags: {text!r} is not xla_NAME=VALUE, such as xla_gpu_autotune_level=4"
        )
    return f"--{name}={value}"


def _check(flags: str) -> None:
    """Tries the flags in a process of its own, since XLA ends the process on a bad one. Raises ConfigError with XLA's words."""
    env = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    tried = subprocess.run(
        [sys.executable, "-c", "import jax; jax.jit(lambda: 0)()"], env=env, capture_output=True, text=True
    )
    if tried.returncode:
        said = [line for line in tried.stderr.splitlines() if "flag" in line.lower()] or tried.stderr.splitlines()
        reason = said[0].split("] ")[-1].strip() if said else f"exit code {tried.returncode}"
        raise ConfigError(f"config.hardware.xla_flags: XLA does not take {flags}: {reason}")
