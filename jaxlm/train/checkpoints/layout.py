"""Turns a train state into the items of a checkpoint, and back. Orbax restores no other tree than it saved.

Each trained collection is an item of its own name, such as `params`. The item `train` holds the optimizer's state and the
counters, and `running` if the objective has any.
"""

import dataclasses

from jaxlm.step.state import TrainState

_COUNTERS = ("step", "skipped", "skipped_in_a_row")


def to_items(state: TrainState) -> dict[str, dict]:
    """Returns the items of a checkpoint by name. The state's leaves may be arrays, shapes or shardings."""
    train = {"opt_state": state.opt_state} | {name: getattr(state, name) for name in _COUNTERS}
    if state.running:
        train["running"] = state.running
    return {**state.params, "train": train}


def from_items(items: dict[str, dict], like: TrainState) -> TrainState:
    """Returns the state that these items hold, with the collections that `like` has."""
    train = items["train"]
    return dataclasses.replace(
        like,
        params={name: items[name] for name in like.params},
        opt_state=train["opt_state"],
        running=train.get("running", {}),
        **{name: train[name] for name in _COUNTERS},
    )
