"""Turns a train state into the items of a checkpoint, and back. Orbax restores only a tree with the saved structure.

Each trained collection is an item with the collection's name, such as `params`. The item `train` holds the optimizer's
state and the counters, and `running` if the objective adapts scalars.
"""

import dataclasses

from jaxlm.step.state import TrainState

_COUNTERS = ("step", "skipped", "skipped_in_a_row")


def to_items(state: TrainState) -> dict[str, dict]:
    """Returns name -> item, the items of a checkpoint. The state's leaves may be arrays, shapes or shardings."""
    train = {"opt_state": state.opt_state} | {name: getattr(state, name) for name in _COUNTERS}
    if state.running:
        train["running"] = state.running
    if taken := {"train", "meta"} & state.params.keys():
        raise ValueError(f"a collection of variables is called {taken.pop()}, as an item of every checkpoint is")
    return {**state.params, "train": train}


def from_items(items: dict[str, dict], like: TrainState) -> TrainState:
    """Returns the state that `items` hold, with the same collections as `like`."""
    train = items["train"]
    return dataclasses.replace(
        like,
        params={name: items[name] for name in like.params},
        opt_state=train["opt_state"],
        running=train.get("running", {}),
        **{name: train[name] for name in _COUNTERS},
    )
