"""Notices non-finite steps, spikes of the loss and overfitting, and decides which batches a rollback skips.

A rollback is a start like any other: run.json says which batches it skips and from which step on checkpoints are
spoiled. So a crash in the middle of a rollback changes nothing.
"""

import collections
import contextlib
import dataclasses
import json
import math
import pathlib
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax
import numpy as np

from jaxlm.config import Config, ConfigError, RunError, StabilityConfig
from jaxlm.host import files
from jaxlm.host.console import Say, say
from jaxlm.run import ledger
from jaxlm.train.loop import ROLL_BACK, STOPPED, Ending, Watch

Hold = Callable[[int], None]
Window = tuple[int, int]  # the numbers, in the order, of the first and the last batch to skip
WINDOW = 256  # earlier losses that the z-score of a loss is computed from
_FEWEST = 16  # earlier losses that a z-score needs
_MOST_ROLLBACKS = 3  # the most rollbacks to one checkpoint
_SHOWN = 5  # documents of a spike in the terminal


@dataclasses.dataclass(eq=False)
class NonFinite(Watch):
    """Ends a run if the loss or the gradient of `limit` updates in a row was not finite; 0 = never. Does not save the state."""

    reads = ("skipped_in_a_row",)

    limit: int
    config: StabilityConfig
    hold: Hold = lambda first: None

    def __call__(self, step: int, record: dict[str, float]) -> Ending | None:
        in_a_row = int(record["skipped_in_a_row"])
        if in_a_row == 1:
            self.hold(step)
        if not self.limit or in_a_row < self.limit:
            return None
        why = f"stopped at step {step}: {self.limit} steps in a row had a loss or gradient that is not finite"
        return _ending(self.config, why, "nonfinite", step - self.limit + 1)


@dataclasses.dataclass(eq=False)
class Spikes(Watch):
    """Notices steps whose loss is far above that of earlier steps, and ends a run whose loss stays there.

    The score of a loss is (loss - median) / (1.4826 MAD) over the last WINDOW losses that were no spike (Iglewicz
    and Hoaglin 1993). The scale is at least 1% of the median, else noise on a very smooth curve would be spikes. Until
    there are enough losses, a loss above twice the first one, and above 2, is a spike.

    Args:
      tell: (step, loss, score) -> None; called for the first spike of each series.
      hold: called with the first step of a series, so that the last checkpoint before it stays until the next series.
      switch: the last step before the final mixture, whose losses are only compared with each other; None without one.
    """

    reads = ("loss",)

    config: StabilityConfig
    tell: Callable[[int, float, float], None]
    hold: Hold = lambda first: None
    switch: int | None = None
    _first: int = 0  # the first step of the current series of spikes; 0 = none

    def __post_init__(self):
        self._losses: collections.deque[float] = collections.deque(maxlen=WINDOW)

    def __call__(self, step: int, record: dict[str, float]) -> Ending | None:
        loss = record["loss"]
        if self.switch is not None and step == self.switch + 1:
            self._losses.clear()
            self._first = 0
        if not self.config.spike_z or not math.isfinite(loss):
            return None
        score = self.score(loss)
        if score < self.config.spike_z:
            self._losses.append(loss)
            self._first = 0
            return None
        if not self._first:
            self._first = step
            self.hold(step)
            self.tell(step, loss, score)
        in_a_row = step - self._first + 1
        if not self.config.spike_steps or in_a_row < self.config.spike_steps:
            return None
        usual = float(np.median([*self._losses][-_FEWEST:]))
        why = f"stopped at step {step}: the loss is {loss:.4g} and was {usual:.4g} before step {self._first}"
        return _ending(self.config, f"{why}, a spike of {in_a_row} steps", "spike", self._first)

    def score(self, loss: float) -> float:
        """Returns how far a loss is above the earlier ones, in robust standard deviations."""
        if not self._losses:
            return 0.0
        if len(self._losses) < _FEWEST:
            return math.inf if loss > 2 * max(self._losses[0], 1.0) else 0.0
        losses = np.asarray(self._losses)
        median = float(np.median(losses))
        spread = 1.4826 * float(np.median(np.abs(losses - median)))
        return (loss - median) / max(spread, 0.01 * abs(median), 1e-6)


class Overfit(Watch):
    """Says when the held-out loss rose `evaluations` times in a row while the training loss fell; 0 = never."""

    reads = ("loss",)

    def __init__(self, evaluations: int, switch: int | None = None):
        self._evaluations, self._switch = evaluations, switch
        self._since: list[float] = []  # training losses since the last evaluation
        self._points: list[tuple[float, float]] = []  # (training, held-out)

    def __call__(self, step: int, record: dict[str, float]) -> None:
        if self._switch is not None and step == self._switch + 1:
            self._since, self._points = [], []
        if self._evaluations and math.isfinite(record["loss"]):
            self._since.append(record["loss"])

    def evaluated(self, held_out: float) -> str:
        """Takes a new held-out loss. Returns a line for the user; "" if there is nothing to say."""
        if not self._evaluations or not self._since or not math.isfinite(held_out):
            return ""
        self._points.append((float(np.mean(self._since)), held_out))
        self._since = []
        last = self._points[-self._evaluations - 1 :]
        if len(last) <= self._evaluations:
            return ""
        train, validation = np.diff(np.asarray(last), axis=0).T
        if not (np.all(validation > 0) and np.all(train < 0)):
            return ""
        return (
            f"overfitting: the held-out loss rose {self._evaluations} times in a row, {last[0][1]:.4f} -> {last[-1][1]:.4f}, "
            "while the training loss fell; the best checkpoint is kept; more data or fewer steps would do better"
        )


def _ending(config: StabilityConfig, why: str, cause: str, first_bad: int) -> Ending:
    return Ending(ROLL_BACK if config.roll_back else STOPPED, why, keep=False, cause=cause, first_bad=first_bad)


def roll_back(ending: Ending, step: int, checkpoints: Iterable[int], rollbacks: Sequence[Mapping]) -> tuple[int, str]:
    """Returns (the checkpoint to which a ROLL_BACK goes back, ""), or (0, the reason why the run must stop instead).

    The run stops if it was rolled back before for these steps, or too often to this checkpoint: other batches did not help.
    """
    to = max((saved for saved in checkpoints if saved < ending.first_bad), default=0)
    again = any(r["steps"][0] <= step and ending.first_bad <= r["steps"][1] for r in rollbacks)
    if not again and sum(r["to"] == to for r in rollbacks) < _MOST_ROLLBACKS:
        return to, ""
    return 0, (
        f"{ending.why}; it was rolled back to step {to} before and other batches did not help: lower optim.lr, or set "
        "optim.clip_norm"
    )


def carry_out(
    folder: pathlib.Path, ending: Ending, step: int, batches: list[int], checkpoints: Iterable[int], settings: str
) -> str:
    """Writes a rollback into run.json, and deletes the samples and benchmarks that it undoes. The next start does the rest.

    Only the first process calls it. Returns "", or the reason why the run must stop instead. Even then it writes the rollback,
    since the checkpoints of these steps are spoiled.
    """
    to, why = roll_back(ending, step, checkpoints, ledger.read(folder)["rollbacks"])
    if not why:
        say(f"{ending.why}; going back to step {to}, past batches {batches[0]} to {batches[1]}")
    entry = {"steps": [ending.first_bad, step], "to": to, "why": why or ending.why, "batches": batches}
    ledger.roll_back(folder, entry | ({"stopped": settings} if why else {}))
    for path in (folder / "samples").glob("*.jsonl"):
        if files.is_step(path.stem) and int(path.stem) >= ending.first_bad:
            path.unlink(missing_ok=True)
    for path in (folder / "eval").glob("*"):
        if files.is_step(path.name) and int(path.name) >= ending.first_bad:
            shutil.rmtree(path, ignore_errors=True)
    return why


def settings(config: Config) -> str:
    """Returns as one text the settings whose change makes another try of a diverged run worthwhile."""
    train = config.train
    return repr((config.optim, config.stability, train.batch_size, train.microbatch_size, train.seq_len))


def held_back(rollbacks: Sequence[Mapping], config: Config) -> Ending | None:
    """Returns the Ending of an earlier start if it refused another rollback and `settings` is the same now; else None."""
    last = rollbacks[-1] if rollbacks else {}
    # Until 28 November 2026 `settings` contained the key `window`; `older.check_goes_on` refuses other values than WINDOW.
    if str(last.get("stopped", "")).replace(f" window={WINDOW},", "") != settings(config):
        return None
    why = f"{last['why']}; nothing has changed since: set a key of optim or stability to try again"
    return Ending(STOPPED, why, keep=False, cause="spike")


def spoiled(metas: Mapping[int, Mapping], rollbacks: Sequence[Mapping]) -> list[int]:
    """Returns the steps, ascending, of checkpoints at or after a rollback's first step that did not skip its batches."""
    return sorted(
        step
        for step, meta in metas.items()
        if any(step >= r["steps"][0] and not _covers(meta.get("passed_over", ()), r["batches"]) for r in rollbacks)
    )


def _covers(windows: Iterable[Sequence[int]], window: Sequence[int]) -> bool:
    return any(first <= window[0] and window[1] <= last for first, last in windows)


def passed_over(
    saved: Iterable[Sequence[int]], wanted: Iterable[Sequence[int]], last_batch: int
) -> tuple[list[Window], list[Window]]:
    """Returns (`saved` with the `wanted` windows after `last_batch`, the `wanted` windows up to there, which are too late)."""
    windows, late = [tuple(window) for window in saved], []
    for first, last in wanted:
        if last <= last_batch and not _covers(windows, (first, last)):
            late.append((first, last))
        elif last > last_batch:
            windows.append((max(first, last_batch + 1), last))
    return windows, late


def teller(
    path: pathlib.Path, documents: Callable[[int], Sequence[str]], number: Callable[[int], int], say: Say
) -> Callable[[int, float, float], None]:
    """Returns a function (step, loss, score) that reports a spike with its batch's documents, also to the file `path`."""

    def tell(step: int, loss: float, score: float) -> None:
        if jax.process_index():
            return
        try:
            sources = list(dict.fromkeys(documents(step)))
        except (ConfigError, RunError, OSError, RuntimeError) as error:
            sources = [f"unknown: {error}"]
        far = f" ({score:.1f} deviations)" if math.isfinite(score) else ""
        shown = ", ".join(sources[:_SHOWN]) + (f" and {len(sources) - _SHOWN} more" if len(sources) > _SHOWN else "")
        say(f"step {step}: the loss {loss:.4g} is a spike{far}; its batch, {number(step)}, holds {shown}")
        line = {"step": step, "batch": number(step), "loss": loss, "score": score if math.isfinite(score) else None}
        with contextlib.suppress(OSError), open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line | {"documents": sources}, ensure_ascii=False) + "\n")

    return tell
