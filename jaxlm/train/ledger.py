"""Writes run.json, which records the code, data, packages and hardware of every start of a run."""

import dataclasses
import datetime
import hashlib
import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
import sys
import typing

import jax

from jaxlm import config as config_lib
from jaxlm import files
from jaxlm.config import Config, ConfigError

_PACKAGES = (
    "jaxlm",
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "grain",
    "array-record",
    "sentencepiece",
    "numpy",
)


def record_start(workdir: pathlib.Path, config: Config, *, step: int, manifest_sha256: str, choices: dict) -> None:
    """Writes config.json, and adds this start to run.json.

    Args:
      workdir: the run's folder.
      config: the resolved config.
      step: the number of steps already done.
      manifest_sha256: the sha256 of the data directory's manifest.
      choices: the settings that this start decided (attention backend, mesh, ...).

    Raises:
      ConfigError: run.json is damaged.
    """
    # Absolute, so that the run is found from any folder.
    data = dataclasses.replace(config.data, dir=os.path.abspath(config.data.dir))
    config = dataclasses.replace(config, workdir=os.path.abspath(config.workdir), data=data)
    text = config_lib.to_json(config)
    files.write_atomically(workdir / "config.json", text.encode())
    path = workdir / "run.json"
    try:
        starts = json.loads(path.read_text())["starts"] if path.exists() else []
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} is damaged: move it away and run the same command again; nothing needs it"
        ) from error
    starts.append(
        {
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "step": step,
            "command": sys.argv,
            "git": _git(),
            "config_sha256": hashlib.sha256(text.encode()).hexdigest(),
            "manifest_sha256": manifest_sha256,
            "packages": {name: _version(name) for name in _PACKAGES},
            "python": platform.python_version(),
            "hardware": hardware(),
            "choices": choices,
        }
    )
    files.write_atomically(path, (json.dumps({"starts": starts}, indent=1) + "\n").encode())


def lock(workdir: pathlib.Path) -> typing.IO[str]:
    """Locks the run's folder, so that no other process trains in it, until the returned file is closed; see `files.lock`."""
    return files.lock(workdir, "trains in", "workdir", wait_s=files.ENDING_S)


def hardware() -> dict:
    """Returns the name of the host, the number of its processors and its devices."""
    devices = jax.devices()
    return {
        "host": platform.node(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "platform": devices[0].platform,
        "device_kind": devices[0].device_kind,
        "devices": len(devices),
        "processes": jax.process_count(),
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git() -> dict | None:
    """Returns the code's commit, and whether files differ from it; None outside a checkout."""
    folder = pathlib.Path(__file__).resolve().parents[2]

    def git(*args: str) -> str:
        return subprocess.run(["git", *args], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()

    try:
        if pathlib.Path(git("rev-parse", "--show-toplevel")) != folder:
            return None  # installed inside somebody else's repository
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.CalledProcessError):
        return None
