"""The watches, which look at every step's metrics and may end a run."""

from jaxlm.train.checkpoints.store import Checkpointer
from jaxlm.train.loop import STOPPED, Ending, Watch


class NonFinite(Watch):
    """Stops a run if the loss or the gradient of `limit` updates in a row was not finite; 0 means never.

    Saves no checkpoint then, since the state after many skipped updates is no better than the last checkpoint.
    """

    reads = ("skipped_in_a_row",)

    def __init__(self, limit: int):
        self._limit = limit

    def __call__(self, step: int, record: dict[str, float]) -> Ending | None:
        if not self._limit or record["skipped_in_a_row"] < self._limit:
            return None
        why = f"stopped at step {step}: {self._limit} steps in a row had a loss or gradient that is not finite"
        return Ending(STOPPED, why, keep=False)


class SaveInFlight(Watch):
    """Calls `Checkpointer.check` after every step, so that a failed save is noticed at the next step."""

    def __init__(self, checkpointer: Checkpointer):
        self._checkpointer = checkpointer

    def __call__(self, step: int, record: dict[str, float]) -> None:
        self._checkpointer.check()
