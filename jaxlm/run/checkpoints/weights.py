"""The checkpoint of an imported model: parameters alone, as step 0. A run that goes on from it makes a new optimizer."""

import pathlib
import shutil
from collections.abc import Callable

import jax

from jaxlm.config import RunError
from jaxlm.devices.processes import together, working
from jaxlm.run.checkpoints import digest, keep, meta
from jaxlm.run.checkpoints.saving import Saving, remove_partial

_PARAMS = "params"


def save(checkpoints: pathlib.Path, make: Callable[[], dict], config: dict) -> None:
    """Saves parameters as the checkpoint 0, reads it back and seals it with checksums. All processes call it.

    Args:
      checkpoints: `WORKDIR/checkpoints`.
      make: returns the parameters, on the devices. They are let go before the checkpoint is read back.
      config: the resolved config of the run, without secrets.

    Raises:
      RunError: a number is not finite, or the checkpoint can't be written or differs on disk.
    """
    checkpoints = checkpoints.absolute()
    together(lambda: _clear(checkpoints), first_only=True)
    params = make()
    digests, bad = digest.look({_PARAMS: params})
    if bad:
        raise RunError(f"{bad[0].removeprefix('params/')} has a number that is not finite: the model is not imported")
    sealed = meta.sealed({"config": config}, 0, digests)
    with working("writing the checkpoint and reading it back"):
        saving = Saving(checkpoints / "0", {_PARAMS: params}, sealed)
        del params
        saving.done.wait()
    if saving.failed or saving.differs:
        mend = "; free some room and run the same command again" if saving.full else ""
        raise RunError(f"the checkpoint in {checkpoints} is not whole: {saving.failed or saving.differs}{mend}")


def _clear(checkpoints: pathlib.Path) -> None:
    """Deletes what an import that was cut short left."""
    checkpoints.mkdir(parents=True, exist_ok=True)
    remove_partial(checkpoints, 0)
    shutil.rmtree(checkpoints / "0", ignore_errors=True)


def imported(checkpoints: pathlib.Path) -> bool:
    """True if there is nothing but the weights of an imported model: no step was saved since."""
    first = checkpoints / "0"
    return keep.steps(checkpoints) == [0] and (first / _PARAMS).is_dir() and not (first / "train").is_dir()


def begun(checkpoints: pathlib.Path) -> bool:
    """True if the run saved a step of its own, on which it goes on."""
    return bool(keep.steps(checkpoints)) and not imported(checkpoints)


def bytes_of(params: dict) -> int:
    """Returns the bytes of all leaves, arrays or shapes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))
