"""Chooses the checkpoints to delete, and finds the best one."""

import math
import typing

from jaxlm.config import CheckpointConfig


def obsolete(steps: typing.Sequence[int], losses: typing.Mapping[int, float], config: CheckpointConfig) -> list[int]:
    """Returns the steps to delete: all but the newest `keep_last`, the best `keep_best` and multiples of `keep_every`.

    Args:
      steps: the steps of the checkpoints on disk.
      losses: step -> held-out loss. A step that is absent, or whose loss is not finite, is never among the best.
      config: `config.checkpoint`.
    """
    newest = sorted(steps)[-config.keep_last :]
    every = [step for step in steps if config.keep_every and step % config.keep_every == 0]
    lowest = ranked(steps, losses)[: config.keep_best]
    return sorted(set(steps) - {*newest, *every, *lowest})


def best(steps: typing.Sequence[int], losses: typing.Mapping[int, float]) -> int | None:
    """Returns the step with the lowest held-out loss; None if no step has a finite one."""
    return next(iter(ranked(steps, losses)), None)


def ranked(steps: typing.Iterable[int], losses: typing.Mapping[int, float]) -> list[int]:
    """Returns the steps with a finite held-out loss, the lowest loss first; of equals the earliest step first."""
    return [step for _, step in sorted((losses[s], s) for s in steps if math.isfinite(losses.get(s, math.nan)))]
