"""Opens the mirror of a run: the training does it, and after a crash the process that ends last. Imports no JAX."""

import pathlib
from collections.abc import Callable

from jaxlm.config import Config
from jaxlm.plan import milestones
from jaxlm.train.checkpoints.mirror import Mirror
from jaxlm.train.scores import Scores


def of_run(
    config: Config, folder: pathlib.Path, scores: Scores, alive: Callable[[], None] = lambda: None
) -> Mirror | None:
    """Returns the mirror, from which the run has come back if its folder was lost; None without one.

    Milestones and the best checkpoints are safe from its rotation.

    Args:
      scores: by which the best checkpoints are chosen. Gets those of metrics.jsonl; the caller may add later ones.
      alive: called while files come back.

    Raises:
      ConfigError, RunError: as `Mirror` and `Mirror.restore` do.
    """
    c = config.checkpoint
    if not c.mirror:
        return None
    pinned = {phase.last for phase in milestones.planned(config.phases, config.train)}
    mirror = Mirror(c.mirror, c, folder, pinned=pinned, scores=scores)
    mirror.restore(alive)
    scores.read(folder)
    return mirror
