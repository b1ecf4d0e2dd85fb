"""Scores a run's checkpoints by the metric `checkpoint.best_metric`, any name in metrics.jsonl. Imports no JAX."""

import difflib
import json
import math
import pathlib
from collections.abc import Mapping, Sequence

from jaxlm.config import CheckpointConfig
from jaxlm.host.files import is_number
from jaxlm.run import ledger, metrics

_EVALUATIONS = ("val/", "eval/")  # prefixes of metrics that are not measured at every logged step


class Scores(dict[int, float]):
    """Step -> score of a checkpoint; the lowest is best. It is the metric, or its negative if `best_is` is "highest".

    `losses`: step -> held-out loss, NaN if it was not finite.
    """

    def __init__(self, config: CheckpointConfig):
        super().__init__()
        self._config, self._sign = config, -1.0 if config.best_is == "highest" else 1.0
        self._names: set[str] = set()  # of the metrics seen so far
        self.losses: dict[int, float] = {}

    def note(self, step: int, figures: Mapping[str, object]) -> None:
        """Sets the score of `step` from its record for metrics.jsonl, if that has the metric. The last value counts."""
        self._names |= figures.keys()
        if self._config.best_metric in figures:
            figure = figures[self._config.best_metric]
            self[step] = self._sign * float(figure) if is_number(figure) else math.nan

    def read(self, folder: pathlib.Path) -> "Scores":
        """Adds the scores in a run's metrics.jsonl, without those that a rollback undid; returns itself."""
        path, rollbacks = folder / "metrics.jsonl", ledger.read(folder)["rollbacks"]
        for record in metrics.valid(path, json.dumps(self._config.best_metric), rollbacks):
            self.note(record["step"], record)
        self.losses |= metrics.held_out_losses(path, rollbacks)
        return self

    def pairs(self) -> list[list[list[float]]]:
        """Returns [scores, losses], each a list of [step, value], for processes that can't read the run's files; see `take`."""
        return [list(map(list, figures.items())) for figures in (self, self.losses)]

    def take(self, scores: Sequence[Sequence[float]], losses: Sequence[Sequence[float]]) -> None:
        self.update({int(step): score for step, score in scores})
        self.losses.update({int(step): loss for step, loss in losses})

    def forget(self, first_bad: int) -> None:
        for figures in (self, self.losses):
            for undone in [step for step in figures if step >= first_bad]:
                del figures[undone]

    def missing(self) -> str:
        """Returns a line if there was an evaluation, and no metric is called `checkpoint.best_metric`; else "".

        The default, `val/loss`, may be missing, since a run may have no held-out text.
        """
        name = self._config.best_metric
        kind = next((kind for kind in _EVALUATIONS if name.startswith(kind)), "")
        due = any(seen.startswith(kind) for seen in self._names)
        if not self._config.keep_best or not due or name in self._names or name == metrics.HELD_OUT:
            return ""
        near = difflib.get_close_matches(name, self._names, n=1)
        plain = [seen for seen in self._names if seen.startswith(("train/", *_EVALUATIONS)) and seen.count("/") < 3]
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(plain))}"
        return f"config.checkpoint.best_metric={name}: metrics.jsonl has no such name, so no checkpoint is the best; {hint}"
