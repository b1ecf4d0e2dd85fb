"""Which part of the train state is which item of a checkpoint, both ways. Orbax restores no other tree than it saved.

`params` holds the collection "params" itself, without its name, and any other trained collection is an item beside it.
`train` holds the optimizer's state and the counters; `running` only where the objective has any.
"""

import dataclasses

from jaxlm.step.state import TrainState

_COUNTERS = ("step", "skipped", "skipped_in_a_row")


def to_items(state: TrainState) -> dict[str, dict]:
    """Item -> tree. Works for arrays, shapes and shardings alike."""
    train = {"opt_state": state.opt_state} | {name: getattr(state, name) for name in _COUNTERS}
    if state.running:
        train["running"] = state.running
    return {**state.params, "train": train}


def from_items(items: dict[str, dict], like: TrainState) -> TrainState:
    """The state of these items; `like` says which collections it has."""
    train = items["train"]
    return dataclasses.replace(
        like,
        params={name: items[name] for name in like.params},
        opt_state=train["opt_state"],
        running=train.get("running", {}),
        **{name: train[name] for name in _COUNTERS},
    )
