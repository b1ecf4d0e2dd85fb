"""Tries the run's own code for checkpoints on a tiny state, in the run's own folder."""

import contextlib
import dataclasses
import pathlib
import shutil
import time

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxlm.devices.processes import together
from jaxlm.plan.doctor.findings import FAIL, OK, Finding
from jaxlm.run.checkpoints.store import Checkpointer
from jaxlm.step import state as states

_FOLDER = ".doctor-checkpoint"


def trial(workdir: str, mesh: Mesh) -> Finding:
    """Saves, verifies, restores and removes a checkpoint. Returns what failed. All processes call it.

    Args:
      workdir: the run's folder; "" for the current one. If it has to be made, it is removed again.
      mesh: the devices.

    Raises:
      RunError: what was saved can't be restored.
    """
    folder = pathlib.Path(workdir).absolute() / _FOLDER
    made = [path for path in folder.parents if not path.exists()]
    state = states.init({"params": {"a": jnp.arange(1024.0)}}, optax.adam(1e-3))
    state = jax.device_put(dataclasses.replace(state, step=jnp.int32(1)), NamedSharding(mesh, PartitionSpec()))
    began = time.monotonic()

    def remove() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # not empty
            for path in made:
                path.rmdir()

    try:
        together(lambda: shutil.rmtree(folder, ignore_errors=True), first_only=True)  # of a doctor that was killed
        checkpoints = Checkpointer(folder / "checkpoints")
        why = checkpoints.save_last(1, state, {})
        checkpoints.close()
        if why:
            return Finding("checkpoint", FAIL, f"{why}; take another config.workdir")
        checkpoints.restore(1, state, jax.tree.map(lambda x: x.sharding, state))
    finally:
        together(remove, first_only=True)
    seconds = time.monotonic() - began
    text = f"a tiny one was saved, read back, restored and removed in {folder.parent} in {seconds:.1f} s"
    return Finding("checkpoint", OK, text, {"seconds": seconds})
