"""Which checkpoints stay."""

import typing

from jaxlm.config import CheckpointConfig


def obsolete(steps: typing.Sequence[int], losses: typing.Mapping[int, float], config: CheckpointConfig) -> list[int]:
    """The steps to delete: all but the newest `keep_last`, multiples of `keep_every`, and the `keep_best`.

    Args:
      steps: of the checkpoints on disk.
      losses: step -> held-out loss; steps without one are never among the best.
    """
    newest = sorted(steps)[-config.keep_last :]
    every = [step for step in steps if config.keep_every and step % config.keep_every == 0]
    ranked = sorted((losses[step], step) for step in steps if step in losses)
    lowest = [step for _, step in ranked[: config.keep_best]]
    return sorted(set(steps) - {*newest, *every, *lowest})


def best(steps: typing.Sequence[int], losses: typing.Mapping[int, float]) -> int | None:
    """The step with the lowest held-out loss, the earliest of equals; None if none was evaluated."""
    return min((losses[step], step) for step in steps if step in losses)[1] if losses.keys() & set(steps) else None
