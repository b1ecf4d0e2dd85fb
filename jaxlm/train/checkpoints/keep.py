"""Chooses the checkpoints to delete, and finds the best one."""

import typing

from jaxlm.config import CheckpointConfig


def obsolete(steps: typing.Sequence[int], losses: typing.Mapping[int, float], config: CheckpointConfig) -> list[int]:
    """Returns the steps to delete: all but the newest `keep_last`, the best `keep_best` and multiples of `keep_every`.

    Args:
      steps: the steps of the checkpoints on disk.
      losses: step -> held-out loss. A step that is absent is never among the best.
      config: `config.checkpoint`.
    """
    newest = sorted(steps)[-config.keep_last :]
    every = [step for step in steps if config.keep_every and step % config.keep_every == 0]
    ranked = sorted((losses[step], step) for step in steps if step in losses)
    lowest = [step for _, step in ranked[: config.keep_best]]
    return sorted(set(steps) - {*newest, *every, *lowest})


def best(steps: typing.Sequence[int], losses: typing.Mapping[int, float]) -> int | None:
    """Returns the step with the lowest held-out loss (the earliest if several are equal); None if no step was evaluated."""
    return min((losses[step], step) for step in steps if step in losses)[1] if losses.keys() & set(steps) else None
