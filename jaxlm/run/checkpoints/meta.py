"""Defines the content of a checkpoint: the items with its arrays, and its metadata (config, fingerprint of the data, digests).

Each trained collection is an item with the collection's name, such as `params`. The item `train` holds the optimizer's
state and the counters, and `running` if the objective adapts scalars. Orbax restores only a tree with the saved structure.
"""

import dataclasses
import json
import pathlib
from collections.abc import Mapping

from jaxlm.config import Config
from jaxlm.data.batches.order import Order
from jaxlm.host.files import json_of
from jaxlm.host.redact import redact
from jaxlm.run.checkpoints.damage import CorruptCheckpointError
from jaxlm.run.checkpoints.verify import seal
from jaxlm.step.state import TrainState

_FILE = pathlib.Path("meta", "metadata")  # as Orbax lays it out
_SEAL = "sha256"
MOMENTS = "moments"  # the item with the optimizer's state that `jaxlm grow` adds to the weights of checkpoint 0
_COUNTERS = ("step", "skipped", "skipped_in_a_row")  # of a train state
AVERAGE = "train/average/"  # how the names of a moving average's arrays begin


def of_run(config: Config, data: Order, base: Mapping[str, str | int]) -> dict:
    """Returns the metadata that a run adds to each checkpoint, without secrets, since checkpoints are given to others.

    `base` identifies the checkpoint or model from which frozen variables come; it is empty if no variables are frozen.
    """
    return {
        "config": redact(dataclasses.asdict(config)),
        "fingerprint": data.fingerprint(),
        "passed_over": [list(window) for window in data.passed_over],
    } | ({"base": base} if base else {})


def sealed(meta: dict, step: int, digests: dict[str, int]) -> dict:
    content = json.loads(json.dumps({**meta, "step": step, "digests": digests}))  # lists for tuples, as JSON reads back
    return {**content, _SEAL: seal(content)}


def read(folder: pathlib.Path, must_be_sealed: bool = False) -> dict:
    """Returns the metadata of the checkpoint in `folder`, without their seal. Raises CorruptCheckpointError, OSError.

    Args:
      must_be_sealed: if True, metadata without a seal count as damaged; older checkpoints have no seal.
    """
    step = int(folder.name)
    try:
        meta = json_of((folder / _FILE).read_bytes())
    except (ValueError, FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise CorruptCheckpointError(f"checkpoint {step} is damaged: {_FILE} can't be read as JSON") from None
    seal_there = meta.pop(_SEAL, None)
    # A text of 64 characters under another name is a seal whose name is damaged: older checkpoints have no such text.
    must_be_sealed |= any(isinstance(value, str) and len(value) == 64 for value in meta.values())
    if (must_be_sealed or seal_there is not None) and seal_there != seal(meta):
        raise CorruptCheckpointError(f"checkpoint {step} is damaged: {_FILE} differs from what was saved")
    digests = meta.get("digests")
    good = isinstance(digests, dict) and digests and all(isinstance(value, int) for value in digests.values())
    if not good or meta.get("step") != step:
        raise CorruptCheckpointError(f"checkpoint {step} is damaged: {_FILE} lacks its step or its digests")
    return meta


def to_items(state: TrainState) -> dict[str, dict]:
    """Returns the items of a state's checkpoint by their names. The state's leaves may be arrays, shapes or shardings."""
    train = {"opt_state": state.opt_state} | {name: getattr(state, name) for name in _COUNTERS}
    if state.running:
        train["running"] = state.running
    if state.average:
        train["average"] = state.average
    if taken := {"train", "meta"} & state.params.keys():
        raise ValueError(f"a collection of variables is called {taken.pop()}, as an item of every checkpoint is")
    return {**state.params, "train": train}


def from_items(items: dict[str, dict], like: TrainState) -> TrainState:
    """Returns `like` with all but its form replaced by what is in `items`."""
    train = items["train"]
    return dataclasses.replace(
        like,
        params={name: items[name] for name in like.params},
        opt_state=train["opt_state"],
        running=train.get("running", {}),
        average=train.get("average", {}),
        **{name: train[name] for name in _COUNTERS},
    )
