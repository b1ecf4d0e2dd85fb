"""Chooses the checkpoints to delete, and finds the best one."""

import math
import pathlib
import typing

from jaxlm.config import CheckpointConfig
from jaxlm.files import is_step


def obsolete(
    steps: typing.Sequence[int],
    scores: typing.Mapping[int, float],
    config: CheckpointConfig,
    whole: typing.Collection[int] | None = None,
    pinned: typing.Collection[int] = (),
) -> list[int]:
    """Returns the steps to delete: all but the newest `keep_last`, the best `keep_best`, multiples of `keep_every`, `pinned`.

    Args:
      steps: the steps of the checkpoints on disk.
      scores: step -> score, the lowest of which is best. A step that is absent, or whose score is not finite, is never
        among the best.
      config: `config.checkpoint`.
      whole: the verified steps; None if all count as verified. Only these count as the newest and the best. An unverified
        checkpoint is deleted once `keep_last` verified ones are newer. So on a disk that garbles what is written the last
        whole ones stay.
      pinned: steps that are never deleted.
    """
    counted = sorted(steps if whole is None else set(steps) & set(whole))
    newest = counted[-config.keep_last :]
    enough = len(newest) == config.keep_last
    unproven = [step for step in set(steps) - set(counted) if not enough or step > newest[0]]
    every = [step for step in steps if config.keep_every and step % config.keep_every == 0]
    lowest = ranked(counted, scores)[: config.keep_best]
    return sorted(set(steps) - {*newest, *unproven, *every, *lowest, *pinned})


def need(checkpoints: pathlib.Path, step: int, run: pathlib.Path) -> None:
    """Keeps a checkpoint for good, since another run needs it: the base of an adapter. Deleting STEP.needed lets it go.

    Raises:
      OSError: the folder can't be written.
    """
    file, line = checkpoints / f"{step}.needed", f"{run.resolve()}\n"
    if not file.is_file() or line not in file.read_text("utf-8"):
        with file.open("a", encoding="utf-8") as out:
            out.write(line)


def needed(checkpoints: pathlib.Path) -> set[int]:
    """Returns the steps that other runs need."""
    return {int(file.stem) for file in checkpoints.glob("*.needed") if is_step(file.stem)}


def most(config: CheckpointConfig, steps: int, pinned: int) -> int:
    """Returns how many checkpoints a run of `steps` steps has at once, at most, with `pinned` ones that are never deleted.

    The one that is being written counts: it is verified before an old one is deleted.
    """
    every = steps // config.keep_every if config.keep_every else 0
    return config.keep_last + config.keep_best + every + pinned + 1


def best(steps: typing.Sequence[int], scores: typing.Mapping[int, float]) -> int | None:
    """Returns the step with the lowest score; None if no step has a finite one."""
    return next(iter(ranked(steps, scores)), None)


def ranked(steps: typing.Iterable[int], scores: typing.Mapping[int, float]) -> list[int]:
    """Returns the steps with a finite score, the lowest first; of equals the earliest step first."""
    return [step for _, step in sorted((scores[s], s) for s in steps if math.isfinite(scores.get(s, math.nan)))]
