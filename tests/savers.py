"""One of several processes that save checkpoints of a small state, without a model: for tests of disks that fail.

    python savers.py PROCESS OF PORT FOLDER STEPS [STEP at which the disk fails [STEP at which it is well again]]

Saves every 10 steps. The disk fails while the file FOLDER/bad exists. Prints what was restored and what is there at the end.
"""

import dataclasses
import os
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxlm import config
from jaxlm.config import RunError, config_files
from jaxlm.host import console
from jaxlm.run.checkpoints.store import Checkpointer
from jaxlm.step import state as states
from jaxlm.train import hooks, loop

process, processes, port, folder, steps = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5])
fails, well = [*map(int, sys.argv[6:]), 10**9, 10**9][:2]
folder = pathlib.Path(folder)


def make(step: int, mesh: jax.sharding.Mesh) -> states.TrainState:
    """A state that follows from its step, its matrices split over the processes."""
    made = states.init({"params": {"a": np.arange(4096.0, dtype=np.float32).reshape(64, 64) + step}}, optax.adam(1e-3))
    made = jax.tree.map(np.asarray, dataclasses.replace(made, step=jnp.int32(step)))
    return jax.tree.map(lambda x: jax.make_array_from_callback(x.shape, place(x, mesh), lambda i: x[i]), made)


def place(x, mesh: jax.sharding.Mesh) -> jax.NamedSharding:
    return jax.NamedSharding(mesh, jax.P("x") if x.ndim == 2 else jax.P())


def main() -> None:
    console.drop_leftovers()
    if processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"localhost:{port}", processes, process)
    mesh = jax.make_mesh((processes,), ("x",))
    keys = ["data.path=x", "checkpoint.every_steps=10", "checkpoint.keep_best=0", "checkpoint.reserve_mb=0.01"]
    keys.append("checkpoint.max_unprotected_minutes=0.01")  # a state that can't be saved in the end is not held
    checkpoint = config.resolve(config_files.load("base", keys)).checkpoint
    checkpointer = Checkpointer(folder / "checkpoints", checkpoint)
    first = 0
    if checkpointer.steps():
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), make(0, mesh))
        shardings = jax.tree.map(lambda x: place(x, mesh), abstract)
        restored, _ = checkpointer.restore_latest(abstract, shardings)
        first = int(restored.step)
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b), local(restored), local(make(first, mesh)))
    save = hooks.Save(checkpointer, checkpoint, 2.0, {"config": {"a": 1}})
    for step in range(first + 1, steps + 1):
        time.sleep(0.1)
        checkpointer.check()
        if process == 0 and step == fails:
            (folder / "bad").touch()
        if process == 0 and step == well:
            (folder / "bad").unlink()
        if step < steps and save.due(step, steps):
            save(loop.Moment(step, make(step, mesh), {}, print))
    code = 0
    try:
        save.close(loop.Moment(steps, make(steps, mesh), {}, print), loop.Ending(loop.DONE))
    except RunError as error:
        print(error, file=sys.stderr)
        code = 1
    print(f"from {first}, there: {sorted(int(p.name) for p in checkpointer.directory.iterdir() if p.name.isdigit())}")
    sys.stdout.flush()
    if checkpointer.left_behind:
        os._exit(code)
    sys.exit(code)


def local(tree):
    return jax.tree.map(lambda x: np.asarray(x.addressable_data(0)), tree)


if __name__ == "__main__":
    main()
