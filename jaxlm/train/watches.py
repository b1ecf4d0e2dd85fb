"""What looks at every step's metrics and may end a run."""

from jaxlm.train.checkpoints.store import Checkpointer
from jaxlm.train.loop import STOPPED, Ending, Watch


class NonFinite(Watch):
    """Stops a run after `limit` updates in a row whose loss or gradient was not finite; 0 = never.

    The last good checkpoint stays the newest: the state after many skipped steps is not better.
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
    """Has the checkpointer look after the save in flight: a failed one is known at the next step."""

    def __init__(self, checkpointer: Checkpointer):
        self._checkpointer = checkpointer

    def __call__(self, step: int, record: dict[str, float]) -> None:
        self._checkpointer.check()
