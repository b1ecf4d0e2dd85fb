"""Lets the threads of several processes, which save one checkpoint together, learn that one of them failed.

Orbax's own barrier waits for a process that failed until a time-out of 20 minutes. Here each process writes into the
store of the cluster's coordinator what became of its part, and reads what the others wrote.
"""

import itertools

import jax
from jax._src import distributed  # the only way to the coordinator's store, which Orbax takes too

from jaxlm.train.checkpoints.disk import ToldError

_ALIKE = itertools.count()  # all processes make their votes in the same order
_OK = "ok"


class Votes:
    """The votes on one save. All processes make it at the same step."""

    def __init__(self):
        self._number = next(_ALIKE)
        self._stages = 0

    def barrier(self, *, key: str = "", timeout_ms: int) -> None:
        """Says that this process came so far, and waits for the others. In the place of Orbax's barrier.

        Raises:
          ToldError: another process failed; its message is that process's.
        """
        del key
        if jax.process_count() == 1:
            return
        stage, self._stages = self._stages, self._stages + 1
        self._write(stage, _OK)
        for process in range(jax.process_count()):
            vote = distributed.global_state.client.blocking_key_value_get(self._key(stage, process), timeout_ms)
            if vote != _OK:
                raise ToldError(vote)

    def fail(self, why: str) -> None:
        """Says that this process failed, and will come to no barrier of this save any more."""
        if jax.process_count() > 1:
            told = why if why.startswith("process ") else f"process {jax.process_index()}: {why}"
            self._write(self._stages, told)
            self._write("failed", told)

    def failed(self) -> str:
        """Returns why another process failed; "" if none did so far."""
        if jax.process_count() == 1:
            return ""
        said = distributed.global_state.client.key_value_dir_get(f"jaxlm/save/{self._number}/failed/")
        return next((vote for _, vote in said), "")

    def _write(self, stage: int | str, vote: str) -> None:
        distributed.global_state.client.key_value_set(self._key(stage, jax.process_index()), vote, allow_overwrite=True)

    def _key(self, stage: int | str, process: int) -> str:
        return f"jaxlm/save/{self._number}/{stage}/{process}"
