"""The order of a run's batches, whatever they hold. Item i is a pure function of the order and of i.

Items count from 0: item i is what step i + 1 trains on. Batches have numbers, and windows name the batches to skip; the
items are the other batches. On disk and in messages, steps and batches count from 1.
"""

import dataclasses
import hashlib
import json
import math
import typing
from collections.abc import Mapping, Sequence

from jaxlm.config import ConfigError
from jaxlm.data.shards import mixture
from jaxlm.data.tokenizer.coder import Encoded

_FINAL = {"final": "data.final.weights", "final_share": "data.final.share"}
_REMOVED = {"without": "data.without"}


class Order:
    """The order of a run's batches.

    Each kind of order is a frozen dataclass with these fields, `parts`, `made`, `passes` and `places`.
    """

    data: Encoded
    passed_over: mixture.Windows  # to skip, (first, last) from 1; may grow after a run's last step

    def __post_init__(self):
        object.__setattr__(self, "passed_over", mixture.merge_windows(self.passed_over))

    def parts(self) -> dict[str, str]:
        """Returns name -> value of all that decides the batches but the skipped windows, which may grow at a rollback."""
        raise NotImplementedError

    def made(self, number: int, rows: Sequence[int] | None) -> typing.Any:
        """Returns these rows (None: all) of the batch `number`, from 0. Thread-safe."""
        raise NotImplementedError

    def passes(self, steps: int) -> dict[str, float]:
        """Returns source -> how many epochs of it a run of `steps` steps is."""
        raise NotImplementedError

    def places(self, step: int) -> list[str]:
        """Returns the ids of the documents in a step's batch, or where its examples are from, for the log."""
        raise NotImplementedError

    def switch(self) -> int | None:
        """Returns the last step before a final mixture, whose losses are not comparable; None if the mixture is constant."""
        return None

    def batch(self, item: int, rows: Sequence[int] | None = None) -> typing.Any:
        return self.made(self.batch_number(int(item) + 1) - 1, rows)

    def batch_number(self, step: int) -> int:
        """Returns the number of a step's batch, both from 1: `step` itself if nothing is skipped; 0 for step 0."""
        return mixture.batch_number(step, self.passed_over)

    def passing_over(self, windows: mixture.Windows) -> typing.Self:
        """Returns the same order, which skips the batches in these windows and no others."""
        return dataclasses.replace(self, passed_over=tuple(windows))

    def fingerprint(self) -> dict[str, str]:
        """Returns `parts` and their "sha256", for a checkpoint. `check_fingerprint` compares two fingerprints."""
        parts = self.parts()
        return {**parts, "sha256": hashlib.sha256(json.dumps(parts).encode()).hexdigest()}


def check_fingerprint(
    saved: Mapping[str, str],
    current: Mapping[str, str],
    done: int = 0,
    passed_over: Sequence[Sequence[int]] = (),
    *,
    branch: bool = False,
) -> None:
    """Raises ConfigError if this run's batches would differ from those of the run whose checkpoint is of step `done`.

    The final mixture may move, because `train.steps` was raised, as long as none of its batches was trained on. A branch
    may change the final mixture, and begin to do without documents, under the same condition.
    """
    names = {key: key for key in current if key != "sha256" and not key.startswith(("final", "without"))}
    trained = mixture.batch_number(done, windows := mixture.merge_windows(passed_over))
    if not branch:
        names |= _FINAL
    if not branch or "without" in saved or trained >= float(current.get("without_batch", 0)):
        names |= _REMOVED
    if changed := [key for key in names if saved.get(key) != current.get(key)]:
        pairs = ((names[key], saved.get(key, "not set"), current.get(key, "not set")) for key in changed)
        values = "; ".join(f"{name} was {str(was)[:60]}, is {str(now)[:60]}" for name, was, now in pairs)
        differs = "this run's batches would differ from those it was trained on"
        raise ConfigError(f"{differs}: {values}; set them back or use a new workdir")
    was, now = (mixture.begins(fingerprint, windows) for fingerprint in (saved, current))
    moved = was != now or saved.get("final") != current.get("final")
    if moved and min(was, now) < trained:
        began, begins = (f"after batch {at:,.0f}" if at < math.inf else "never" for at in (was, now))
        advice = "set data.final back, and optim.schedule_steps to the steps of the old schedule"
        raise ConfigError(f"data.final can't change at step {done:,}: it was to begin {began}, now {begins}; {advice}")
