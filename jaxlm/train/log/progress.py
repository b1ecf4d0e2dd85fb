"""Shows a run's progress: a permanent line at each logged step, and in a terminal a live line below it."""

import contextlib
import math
import time
from collections.abc import Callable, Mapping

from jaxlm.host import screen
from jaxlm.host.console import AGAIN_S, WORKING_S, dollars, duration, human
from jaxlm.host.screen import BOLD, CYAN, DIM, GREEN, Part

SMOOTHED = 20  # steps over which the shown loss is smoothed
_BAR = 20  # columns


class Progress:
    """Shows progress on standard error. See `screen` for a lost terminal.

    The shown loss is an exponential mean over about the last 20 steps, with Adam's bias correction (Kingma and Ba 2015,
    section 3), without non-finite losses. Of earlier starts it knows only the logged losses: each stands for all steps
    since the previous logged step.
    """

    stands = True

    def __init__(self, total: int, done: int, doing: Callable[[], str], losses: Mapping[int, float] | None = None):
        self._total, self._step, self._doing = total, done, doing
        self._sum, self._weight = 0.0, 0.0  # of losses
        for before, (step, loss) in zip([0, *(losses or {})], (losses or {}).items(), strict=False):
            self._average(loss, step - before)
        self._ends_at: float | None = None  # by the last estimate
        # The first step of this start, when it began, and how many lines were said about that step.
        self._first, self._began, self._said = done + 1, time.monotonic(), 0
        self._shown = contextlib.ExitStack()
        self._shown.enter_context(screen.shown(self))

    def stepped(self, step: int, loss: float) -> None:
        """Takes the loss of a step; called after every step."""
        self._step = step
        if math.isfinite(loss):
            self._average(loss, 1)

    def _average(self, loss: float, steps: int) -> None:
        keep = (1 - 1 / SMOOTHED) ** steps
        self._sum, self._weight = keep * self._sum + (1 - keep) * loss, keep * self._weight + (1 - keep)

    @property
    def loss(self) -> float:
        return self._sum / self._weight if self._weight else math.nan

    def update(self, record: dict, best: float | None) -> None:
        """Shows a logged step's record as a permanent line; `best`: the lowest held-out loss."""
        loss, left = record["train/loss"], record.get("eta_s")
        self._ends_at = None if left is None else time.monotonic() + left
        speed, mfu, skipped = record.get("tokens_per_second"), record.get("mfu_palm"), record.get("train/skipped")
        rate, usd, reward = record.get("train/lr"), record["cost_usd"], record.get("train/reward")
        screen.say_parts(
            [
                Part(f"step {record['step']}/{self._total}", 0),
                Part(_percent(record["step"], self._total), 5),
                Part(f"loss {self.loss if math.isfinite(loss) else loss:.4f}", 1, BOLD),
                Part("" if best is None else f"best held-out {best:.4f}", 7, GREEN),
                Part("" if reward is None else f"reward {reward:.3f}", 1, BOLD),
                Part("" if rate is None else f"lr {rate:.2e}", 8, DIM),
                Part(f"{human(speed)} tokens/s" if speed else "", 4),
                Part(f"MFU {100 * mfu:.1f}%" if mfu else "", 9, DIM),
                Part(dollars(usd) if usd else "", 6),
                Part(f"skipped {skipped:.0f}" if skipped else "", 3),
                Part(f"elapsed {duration(record['wall_s'])}", 10, DIM),
                Part("" if left is None else f"left {duration(left)}", 2),
            ]
        )

    def close(self) -> None:
        self._shown.close()

    def parts(self, alone: bool) -> list[Part]:
        """Returns the parts of the live line; with the current activity only if `alone`: else a newer line shows its own."""
        known = self._ends_at is not None
        left = f"left {duration(max(0.0, self._ends_at - time.monotonic()))}" if known else ""
        filled = _BAR * self._step // max(self._total, 1)
        waited = self._waited_s()
        first = f"step {self._first} for {duration(waited)}" if waited > WORKING_S else ""
        return [
            Part(f"step {self._step}/{self._total}", 1),
            Part(f"[{'#' * filled}{'.' * (_BAR - filled)}]", 9, DIM),
            Part(_percent(self._step, self._total), 5),
            Part(f"loss {self.loss:.4f}" if self._weight else "", 4),
            Part(left, 3),
            Part(self._doing() if alone else "", 0, CYAN),
            Part(first if alone else "", 2, DIM),
        ]

    def line(self) -> str:
        """Returns a line on the wait for this start's first step, if one is due; else ""."""
        waited = self._waited_s()
        if waited < (self._said + 1) * AGAIN_S:
            return ""
        self._said += 1
        return f"step {self._first}/{self._total}: {duration(waited)} so far"

    def _waited_s(self) -> float:
        return time.monotonic() - self._began if self._step < self._first else 0.0


def _percent(step: int, total: int) -> str:
    return f"{100 * step / max(total, 1):.{0 if total < 2000 else 1}f}%"
