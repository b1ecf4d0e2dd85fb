"""Says in plain words what goes wrong while a model learns from preferences.

A policy that does not begin as its reference ends the run. Everything else is said once, and the run goes on.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np

from jaxlm.config import Config, DpoConfig
from jaxlm.host.console import Say
from jaxlm.step.objectives import dpo
from jaxlm.train.loop import REFUSED, Ending, Watch
from jaxlm.train.watches import WINDOW, Row, SaysOnce, Steps

_PINNED = 0.01  # of the loss that the run begins with
_MOVED = 1e-3  # of rewards and scores: below it the policy counts as unchanged
_FALLEN = 0.1  # of the chosen answers' log-probability
_ONLY_LENGTH = 0.9  # correlation of margin and length
_NOTICED = 0.05  # smaller margins don't show what they depend on
_OFF = {"float32": 1e-4, "bfloat16": 5e-3}  # share of a log-probability that two programs may differ by rounding


def of_dpo(config: Config, say: Say) -> list[Watch]:
    """Returns the watches of `objectives.dpo`."""
    c, own = config.dpo, dpo.at_start(config.dpo)
    rows = [falling(c), ONLY_LENGTH, SWAPPED]
    first = []
    if own is not None:
        first = [FirstStep(c, _OFF[config.model.dtype])]
        rows = [pinned(own, ("chosen_reward", "rejected_reward"), config.train.steps, c.nll_weight), *rows]
    return [*first, *(SaysOnce(row, say) for row in rows)]


def of_reward(config: Config, say: Say) -> list[Watch]:
    stays = pinned(math.log(2), ("score", "margin"), config.train.steps)
    return [SaysOnce(row, say) for row in (stays, ONLY_LENGTH, SWAPPED)]


class FirstStep(Watch):
    """Ends a run whose policy is not its reference at the first step: it would mostly learn the difference.

    If they are equal, every margin is 0, and the loss is `objectives.dpo.at_start`.

    Args:
      off: how much policy and reference may differ by rounding, as a share of a log-probability.
    """

    def __init__(self, config: DpoConfig, off: float):
        self._config, self._off, self._own = config, off, dpo.at_start(config)

    def __call__(self, step: int, record: dict[str, float]) -> Ending | None:
        if step != 1:
            return None
        c = self._config
        size = record["nll"] if dpo.by_token(c) else max(abs(record[name]) for name in ("chosen_logp", "rejected_logp"))
        apart = max(abs(record[name]) for name in ("margin", "chosen_reward", "rejected_reward")) / c.beta
        loss = record["loss"] - c.nll_weight * record["nll"]
        if apart <= self._off * size and abs(loss - self._own) <= 10 * self._off * self._own:
            return None
        unit = "nats a token" if dpo.by_token(c) else "nats an answer"
        why = (
            f"the reference is not the policy: before the first update their log-probabilities are {apart:.3g} {unit} apart, "
            f"not 0, and the loss is {loss:.4f}, not {self._own:.4f}: begin in a new workdir, without what another run left"
        )
        return Ending(REFUSED, why, keep=False)


def pinned(own: float, moves: Sequence[str], steps: int, nll_weight: float = 0.0) -> Row:
    """Returns the row for a loss that stays where it began; its sentence says whether the model moved at all.

    Args:
      own: the loss of a policy that can't tell the answers apart.
    """
    reads = ("loss", "lr", "update_norm", *moves, *(("nll",) if nll_weight else ()))

    def condition(first: Steps, last: Steps) -> dict[str, object] | None:
        loss = last["loss"] - (nll_weight * last["nll"] if nll_weight else 0.0)
        recent, rate = loss[len(loss) // 2 :].mean(), last["lr"].max()
        if abs(recent - own) > _PINNED * own:
            return None
        if not last["update_norm"].any():
            why = f": no update has changed anything (optim.lr is {rate:.2g}, all updates are 0)"
        elif max(np.abs(last[name]).max() for name in moves) < _MOVED:
            why = f": the model has hardly moved; raise optim.lr, which is {rate:.2g}"
        else:
            why = ", though the model moves: it can't tell chosen from rejected answers; look at the data"
        return {"loss": recent, "why": why}

    sentence = "the loss stays at {loss:.4f}, where it began{why}"
    return Row(reads, min(max(steps // 4, 20), 4 * WINDOW), condition, sentence)


def falling(c: DpoConfig) -> Row:
    """Returns the row for chosen answers that become much less likely."""

    def condition(first: Steps, last: Steps) -> dict[str, object] | None:
        began = 0.0 if dpo.has_reference(c) else first["chosen_reward"].mean() / c.beta
        size = last["nll"].mean() if dpo.by_token(c) else abs(last["chosen_logp"].mean())
        fallen = (began - last["chosen_reward"].mean() / c.beta) / size
        return {"fallen": fallen} if fallen >= _FALLEN else None

    return Row(
        ("chosen_reward", "chosen_logp", "nll"),
        WINDOW,
        condition,
        "the chosen answers become less likely too: their log-probability fell by {fallen:.0%}; dpo.nll_weight=0.2, a lower "
        "optim.lr or a higher dpo.beta holds it",
    )


def _length(first: Steps, last: Steps) -> dict[str, object] | None:
    """Tests whether margins follow the difference of lengths and little else."""
    # Changes from step to step: a margin's growth over time would hide that it follows the lengths.
    margin, length = np.diff(last["margin"]), np.diff(last["length_margin"])
    if np.abs(last["margin"]).mean() < _NOTICED or not margin.any() or not length.any():
        return None
    together = np.corrcoef(margin, length)[0, 1]
    which = "longer" if together > 0 else "shorter"
    return {"together": together, "which": which} if abs(together) >= _ONLY_LENGTH else None


def _swapped(first: Steps, last: Steps) -> dict[str, object] | None:
    """Tests whether fewer than half of the pairs are ranked as labelled, by more than chance (three standard errors)."""
    accuracy = last["accuracy"]
    error = accuracy.std(ddof=1) / math.sqrt(len(accuracy))
    return {"accuracy": accuracy.mean(), "pairs": "of the pairs"} if accuracy.mean() + 3 * error < 0.5 else None


_SWAPPED = "{accuracy:.0%} {pairs} are ranked as labelled, fewer than half: are chosen and rejected swapped?"
SWAPPED = Row(("accuracy",), 2 * WINDOW, _swapped, _SWAPPED)
ONLY_LENGTH = Row(
    ("margin", "length_margin"),
    2 * WINDOW,
    _length,
    "the margin is little but length (correlation {together:.2f}): what is learnt is to prefer the {which} answer; "
    "dpo.loss=simpo compares by token, or balance the lengths in the data",
)


class Remarks:
    """Calls `others` on an evaluation's figures, and adds a line if fewer than half of the pairs are ranked as labelled."""

    def __init__(self, pairs: int, others: Callable[[int, dict[str, float]], tuple[dict[str, float], list[str]]]):
        self._pairs, self._others = pairs, others

    def __call__(self, step: int, figures: dict[str, float]) -> tuple[dict[str, float], list[str]]:
        more, lines = self._others(step, figures)
        accuracy = figures.get("val/accuracy", 1.0)
        if step and accuracy + 1.5 / math.sqrt(max(self._pairs, 1)) < 0.5:  # three standard errors
            lines = [*lines, _SWAPPED.format(accuracy=accuracy, pairs="of the held-out pairs")]
        return more, lines
