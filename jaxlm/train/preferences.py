"""Says in plain words what goes wrong while a model learns from preferences.

A policy that does not begin as its reference ends the run. Everything else is said once, and the run goes on.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from jaxlm.config import Config, DpoConfig
from jaxlm.objectives import dpo
from jaxlm.train.loop import REFUSED, Ending, Watch
from jaxlm.train.told import WINDOW, Say, Told

_PINNED = 0.01  # of the loss that the run begins with
_MOVED = 1e-3  # of rewards and scores: below it the policy is what it was
_FALLEN = 0.1  # of the chosen answers' log-probability
_ONLY_LENGTH = 0.9  # correlation of margin and length
_NOTICED = 0.05  # margins below it say nothing of what they depend on
_OFF = {"float32": 1e-4, "bfloat16": 5e-3}  # of a log-probability: how far two programs' rounding may part


def of_dpo(config: Config, say: Say) -> list[Watch]:
    """Returns the watches of `objectives.dpo`."""
    c, steps = config.dpo, config.train.steps
    own, moves = dpo.at_start(c), ("chosen_reward", "rejected_reward")
    with_own = [FirstStep(c, _OFF[config.model.dtype]), Pinned(own, moves, steps, say, c.nll_weight)] if own else []
    return [*with_own, Falling(c, say), OnlyLength(say), Swapped(say)]


def of_reward(config: Config, say: Say) -> list[Watch]:
    """Returns the watches of `objectives.reward`."""
    return [Pinned(math.log(2), ("score", "margin"), config.train.steps, say), OnlyLength(say), Swapped(say)]


class FirstStep(Watch):
    """Ends a run whose policy is not its reference at the first step: all it would learn is the difference.

    Then every margin is 0, and the loss has the value of `objectives.dpo.at_start`.

    Args:
      config: `config.dpo`.
      off: by which share of a log-probability policy and reference may part by rounding.
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


class Pinned(Told):
    """Says that the loss stays where it began, and whether anything moved at all.

    Args:
      own: the loss of a policy that can't tell the answers apart.
      moves: the metrics that are 0 as long as nothing moved.
      steps: the last step of the run; a quarter of it is waited for, within bounds.
      nll_weight: the weight of `nll`, which is a part of the loss.
    """

    def __init__(self, own: float, moves: Sequence[str], steps: int, say: Say, nll_weight: float = 0.0):
        super().__init__(say, min(max(steps // 4, 20), 4 * WINDOW))
        self._own, self._moves, self._nll_weight = own, tuple(moves), nll_weight
        self.reads = ("loss", "lr", "update_norm", *self._moves, *(("nll",) if nll_weight else ()))

    def line(self) -> str:
        loss = self.every("loss") - (self._nll_weight * self.every("nll") if self._nll_weight else 0.0)
        recent = loss[len(loss) // 2 :].mean()
        if abs(recent - self._own) > _PINNED * self._own:
            return ""
        pinned, rate = f"the loss stays at {recent:.4f}, where it began", float(self.every("lr").max())
        if not self.every("update_norm").any():
            return f"{pinned}: no update has changed anything (optim.lr is {rate:.2g}, all updates are 0)"
        if max(np.abs(self.every(name)).max() for name in self._moves) < _MOVED:
            return f"{pinned}: the model has hardly moved; raise optim.lr, which is {rate:.2g}"
        return f"{pinned}, though the model moves: it can't tell chosen from rejected answers; look at the data"


class Falling(Told):
    """Says that the chosen answers become much less likely too."""

    reads = ("chosen_reward", "chosen_logp", "nll")

    def __init__(self, config: DpoConfig, say: Say):
        super().__init__(say)
        self._config, self._began = config, None if not dpo.has_reference(config) else 0.0

    def line(self) -> str:
        c = self._config
        now = self.mean("chosen_reward") / c.beta
        if self._began is None:
            self._began = now
        size = self.mean("nll") if dpo.by_token(c) else abs(self.mean("chosen_logp"))
        fallen = (self._began - now) / size
        if fallen < _FALLEN:
            return ""
        return (
            f"the chosen answers become less likely too: their log-probability fell by {fallen:.0%}; dpo.nll_weight=0.2, a "
            "lower optim.lr or a higher dpo.beta holds it"
        )


class OnlyLength(Told):
    """Says that margins follow the difference of lengths and little else."""

    reads = ("margin", "length_margin")

    def __init__(self, say: Say):
        super().__init__(say, 2 * WINDOW)

    def line(self) -> str:
        # From step to step, so that a margin that grows over time is not taken for one that depends on nothing.
        margin, length = (np.diff(self.every(name)) for name in self.reads)
        if np.abs(self.every("margin")).mean() < _NOTICED or not margin.any() or not length.any():
            return ""
        together = float(np.corrcoef(margin, length)[0, 1])
        if abs(together) < _ONLY_LENGTH:
            return ""
        which = "longer" if together > 0 else "shorter"
        return (
            f"the margin is little but length (correlation {together:.2f}): what is learnt is to prefer the {which} answer; "
            "dpo.loss=simpo compares by token, or balance the lengths in the data"
        )


class Swapped(Told):
    """Says that fewer than half of the pairs are ranked as they are labelled, by more than chance."""

    reads = ("accuracy",)

    def __init__(self, say: Say):
        super().__init__(say, 2 * WINDOW)

    def line(self) -> str:
        accuracy = self.every("accuracy")
        error = accuracy.std(ddof=1) / math.sqrt(len(accuracy))
        return _swapped("of the pairs", accuracy.mean()) if accuracy.mean() + 3 * error < 0.5 else ""


class Remarks:
    """Looks at the figures of evaluations: `(step, figures) -> (more figures, lines for the user)`.

    Args:
      pairs: how many pairs are held out.
      others: what else is said of the same figures.
    """

    def __init__(self, pairs: int, others: Callable[[int, dict[str, float]], tuple[dict[str, float], list[str]]]):
        self._pairs, self._others = pairs, others

    def __call__(self, step: int, figures: dict[str, float]) -> tuple[dict[str, float], list[str]]:
        more, lines = self._others(step, figures)
        return more, [*lines, *self._lines(step, figures)]

    def _lines(self, step: int, figures: Mapping[str, float]) -> list[str]:
        accuracy = figures.get("val/accuracy", 1.0)
        likely = accuracy + 1.5 / math.sqrt(max(self._pairs, 1)) < 0.5  # three standard errors
        return [_swapped("of the held-out pairs", accuracy)] if step and likely else []


def _swapped(what: str, accuracy: float) -> str:
    return f"{accuracy:.0%} {what} are ranked as labelled, fewer than half: are chosen and rejected swapped?"
