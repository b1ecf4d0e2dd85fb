"""Phases of a run: each ends with a bill, and with a gate that may stop the run before the next phase costs anything.

A phase's budget counts only its own dollars; `stop.usd` and `stop.hours` count those of the whole run. The rows of the bill
are in run.json. A phase has several rows if it was stopped and resumed; the last row counts.
"""

import math
import pathlib
import shlex
from collections.abc import Callable, Mapping, Sequence

import jax

from jaxlm.config import Config, ConfigError, RunError, milestones
from jaxlm.devices.processes import from_first, together
from jaxlm.host import console
from jaxlm.host.files import is_number
from jaxlm.run import ledger, metrics
from jaxlm.train.loop import STOPPED, Ending, Hook, Moment

SMOOTHED = 10  # logged steps whose mean is the training loss at the end of a phase
Records = Mapping[int, Mapping[str, float | None]]  # step -> metrics, as `metrics.read` returns them
_NUMBERS = ("first_step", "last_step", "hours", "usd", "wall_s", "cost_usd", "nonfinite_steps", "tokens")
_MAY_BE_MISSING = ("loss_begin", "loss_end", "usd_per_point", "val_loss", "tokens_per_second")


# ---------------------------------------------------------------------------------------------------------------------
# The bill


def point(records: Records, step: int, spent: tuple[float, float] | None = None, at_least: int = 0) -> dict:
    """Returns where the run stood after `step`, by its metrics: step, wall_s, cost_usd, val_loss, train_loss, skipped.

    The training loss is the mean of the last logged losses, from step `at_least` on; None if unknown, as `val_loss`. `spent`:
    (seconds, dollars) of all starts, by default of the last record.
    """
    ordered = sorted(records.items())
    until = [record for number, record in ordered if number <= step]
    wall_s, cost_usd = spent or (_last(until, name) or 0.0 for name in ("wall_s", "cost_usd"))
    losses = [record.get("train/loss") for number, record in ordered if at_least <= number <= step]
    losses = [loss for loss in losses if loss is not None]
    if not step:
        losses = [record["train/loss"] for _, record in ordered if record.get("train/loss")][:1]
    smoothed, val_loss = losses[-SMOOTHED:], _finite(records.get(step, {}).get(metrics.HELD_OUT))
    train_loss = _finite(sum(smoothed) / len(smoothed)) if smoothed else None
    standing = {"step": step, "wall_s": wall_s, "cost_usd": cost_usd, "val_loss": val_loss, "train_loss": train_loss}
    return standing | {"skipped": int(_last(until, "train/skipped") or 0)}


def _last(records: Sequence[Mapping[str, float | None]], name: str) -> float | None:
    return next((record[name] for record in reversed(records) if record.get(name) is not None), None)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def row(
    phase: milestones.Phase, before: dict, now: dict, tokens_per_step: int, tokens_per_second: float | None = None
) -> dict:
    """Returns a phase's row in the bill, for run.json: its tokens, losses, hours and dollars from `before` to `now`.

    The loss is the held-out loss if both points have one, else the training loss. `usd_per_point`: the cost of one nat.
    """
    kind = "train" if None in (before["val_loss"], now["val_loss"]) else "val"
    begin, end = (point[f"{kind}_loss"] for point in (before, now))
    drop = None if begin is None or end is None else begin - end
    usd = now["cost_usd"] - before["cost_usd"]
    return {
        "phase": phase.name,
        "ended": now["step"] == phase.last,
        "first_step": phase.first,
        "last_step": now["step"],
        "tokens": (now["step"] - before["step"]) * tokens_per_step,
        "loss": kind,
        "loss_begin": begin,
        "loss_end": end,
        "hours": (now["wall_s"] - before["wall_s"]) / 3600,
        "usd": usd,
        "usd_per_point": usd / drop if drop and drop > 0 else None,
        "val_loss": now["val_loss"],
        "tokens_per_second": tokens_per_second,
        "nonfinite_steps": now["skipped"] - before["skipped"],
        "wall_s": now["wall_s"],
        "cost_usd": now["cost_usd"],
        "accepted": "",
    }


def sound(rows: Sequence[dict]) -> list[dict]:
    """Returns the rows that have all fields that `row` writes, with right types: somebody may have edited run.json."""

    def whole(r: dict) -> bool:
        flags = isinstance(r.get("ended"), bool) and r.get("accepted") in ("", "budget", "gate") and "loss" in r
        optional = all(r.get(name, "") is None or is_number(r.get(name)) for name in _MAY_BE_MISSING)
        return flags and optional and isinstance(r.get("phase"), str) and all(is_number(r.get(n)) for n in _NUMBERS)

    return [r for r in rows if isinstance(r, dict) and whole(r)]


def table(rows: Sequence[dict]) -> str:
    """Returns the bill as lines of text: the last row of each phase, and the sum."""
    latest = {r["phase"]: r for r in rows}.values()
    head = ["phase", "last step", "tokens", "loss", "drop", "hours", "cost", "a point", ""]
    cells = [head] + [_cells(r) for r in sorted(latest, key=lambda r: r["last_step"])]
    hours, usd = (sum(r[name] for r in latest) for name in ("hours", "usd"))
    cells.append(["all", "", "", "", "", f"{hours:.3g}", console.dollars(usd), "", ""])
    return console.table(cells, right=range(1, 8))


def _cells(r: dict) -> list[str]:
    begin, end = r["loss_begin"], r["loss_end"]
    known = begin is not None and end is not None
    words = [] if r["ended"] else ["not at its end"]
    words += ["training loss"] * (r["loss"] == "train") + ["accepted"] * bool(r["accepted"])
    return [
        r["phase"],
        console.count(r["last_step"]),
        console.human(r["tokens"]),
        f"{begin:.3f} to {end:.3f}" if known else "",
        f"{begin - end:.3f}" if known else "",
        f"{r['hours']:.3g}",
        console.dollars(r["usd"]),
        console.dollars(r["usd_per_point"]) if r["usd_per_point"] is not None else "",
        ", ".join(words),
    ]


# ---------------------------------------------------------------------------------------------------------------------
# Gates and budgets


def judge(phase: milestones.Phase, r: dict, run: str = "RUN") -> tuple[str, str] | None:
    """Returns (cause, why) if the phase's row says that the run must stop: cause "gate" or "budget"; None if it may go on.

    A budget stops a phase before its end; at its end, overspending is only shown in the bill.
    """
    c, key = phase.config, f"phases.plan.{phase.name}"
    ended, at = f"phase {phase.name} ended at step {r['last_step']:,} with", r["last_step"]
    speed, loss = r["tokens_per_second"], r["val_loss"]
    cause, why = "gate", ""
    if not r["ended"]:
        if c.usd and r["usd"] >= c.usd:
            spent = f"phase {phase.name} has spent {console.dollars(r['usd'])} of its {console.dollars(c.usd)}"
            cause, why = "budget", f"{spent} at step {at:,} of {phase.last:,} ({key}.usd)"
    elif c.max_val_loss and (loss is None or loss > c.max_val_loss):
        measured = "no finite held-out loss" if loss is None else f"a held-out loss of {loss:.4f}"
        why = f"{ended} {measured}; its gate is at most {c.max_val_loss:g} ({key}.max_val_loss)"
    elif c.max_nonfinite_steps >= 0 and r["nonfinite_steps"] > c.max_nonfinite_steps:
        measured = f"{r['nonfinite_steps']} non-finite steps"
        why = f"{ended} {measured}; its gate is at most {c.max_nonfinite_steps} ({key}.max_nonfinite_steps)"
    elif c.min_tokens_per_second and speed is not None and speed < c.min_tokens_per_second:
        gate = f"at least {console.human(c.min_tokens_per_second)} ({key}.min_tokens_per_second)"
        why = f"{ended} {console.human(speed)} tokens/s; its gate is {gate}"
    go_on = f"--config.phases.accept={phase.name} goes on"
    finish = f"jaxlm train {shlex.quote(run)} --branch=decay --steps=N finishes the model from here"
    return (cause, f"{why}: {go_on}, {finish}") if why else None


class Phases(Hook):
    """Closes each phase with a row in the bill. Stops the run if the phase's gate fails, or its budget or the run's is spent.

    Only the first process reads and writes files and knows the dollars: it decides for all. A single process checks the
    budget after every step, several only every `log.every_steps`, since all wait for the decision. Raises ConfigError if
    two phases end at the same step.

    Args:
      spent: () -> (seconds, dollars) of all starts of the run so far.

    Attributes:
      milestones: the last steps of all phases: the run evaluates, samples and saves for good after them.
    """

    name = "phases"
    vital = True  # without the gate the next phase would begin and cost money

    def __init__(self, config: Config, folder: pathlib.Path, spent: Callable[[], tuple[float, float]]):
        self._config, self._folder, self.spent = config, folder, spent
        self._plan = milestones.planned(config.phases, config.train)
        self._rows = sound(together(self.rows, first_only=True) or ())
        self._before: dict[str, dict] = {}  # phase -> where the run stood when it began
        self.milestones = frozenset(phase.last for phase in self._plan)

    def rows(self) -> Sequence[dict]:
        """Returns the rows that earlier starts wrote into run.json. First process only, like `append` and `records`."""
        return ledger.read(self._folder)["phases"]

    def append(self, entry: dict) -> None:
        ledger.append(self._folder, "phases", entry)

    def records(self) -> Records:
        return metrics.read(self._folder / "metrics.jsonl")

    def checked(self, evaluate: Callable | None) -> Callable | None:
        """Returns `evaluate`. Raises ConfigError if it is None (no text is held out) but a gate needs it."""
        blind = [phase.name for phase in self._plan if phase.config.max_val_loss and evaluate is None]
        if blind:
            raise ConfigError(f"phases.plan.{blind[0]}.max_val_loss is a gate on held-out text, but data.dir has none")
        return evaluate

    def begin(self) -> Ending | None:
        """Returns an Ending if a gate or budget still stops the run, else None. Records a cause that the user accepts."""
        verdict = from_first(self._held_back)
        return verdict and Ending(STOPPED, verdict[1], cause=verdict[0])

    def _held_back(self) -> tuple[str, str] | None:
        last = self._rows[-1] if self._rows else None
        phase = next((p for p in self._plan if last and p.name == last["phase"]), None)
        if phase is None or last["accepted"] or not (verdict := judge(phase, last, str(self._folder))):
            return self._over()
        if phase.name != self._config.phases.accept:
            return verdict
        self._write({**last, "accepted": verdict[0]})
        return self._over()

    def due(self, step: int, end: int) -> bool:
        phase = self._at(step)
        if not step or (phase and step == phase.last):
            return bool(step)
        stop = self._config.stop
        if 0 < stop.steps <= step:
            return True
        limited = stop.usd or stop.hours or (phase and phase.config.usd)
        if not limited or (jax.process_count() > 1 and step % self._config.log.every_steps):
            return False
        return from_first(lambda: bool(self._over(step)) or (phase is not None and self._spent(phase)))

    def done(self, step: int) -> bool:
        return any(r["ended"] and r["last_step"] == step for r in self._rows)

    def __call__(self, moment: Moment) -> Ending | None:
        lines, verdict = from_first(lambda: self._close(moment.step))
        if lines:
            moment.say(lines)
        return Ending(STOPPED, verdict[1], cause=verdict[0]) if verdict else None

    def _close(self, step: int) -> tuple[str, tuple[str, str] | None]:
        """Writes the row of the step's phase. Returns the bill as text, and (cause, why) if the run must stop."""
        phase, records = self._at(step), self.records()
        if phase is None:
            return table(self._rows) if self._rows else "", self._over(step)
        now = point(records, step, self.spent(), at_least=phase.first)
        if step == phase.last and phase.config.max_val_loss and metrics.HELD_OUT not in records.get(step, {}):
            raise RunError(f"phase {phase.name} can't be closed: there is no held-out loss of step {step}")
        speeds = [r.get("tokens_per_second") for n, r in sorted(records.items()) if phase.first <= n <= step]
        latest = [speed for speed in speeds if speed][-5:]
        speed = sorted(latest)[len(latest) // 2] if latest else None  # the median: one pause is no slow machine
        train = self._config.train
        closed = row(phase, self._begun(phase, records), now, train.batch_size * train.seq_len, speed)
        verdict = judge(phase, closed, str(self._folder))
        accepted = bool(verdict) and self._accepted(phase, verdict[0])
        self._write(closed | {"accepted": verdict[0] if accepted else ""})
        return table(self._rows), self._over(step) if accepted or not verdict else verdict

    def _over(self, step: int | None = None) -> tuple[str, str] | None:
        """Returns (cause, why) if the run's budget is spent with steps left after `step` (None: the last logged); else None."""
        (seconds, usd), stop, steps = self.spent(), self._config.stop, self._config.train.steps
        took = {"usd": usd, "hours": seconds / 3600, "steps": step or (stop.steps and max(self.records(), default=0))}
        spent = [key for key, amount in took.items() if 0 < getattr(stop, key) <= amount]
        step = max(self.records(), default=0) if spent and step is None else step
        if not spent or step >= steps:
            return None
        key, at = spent[0], f"at step {step:,} of {steps:,}"
        why = f"the run has taken {took[key]:.4g} of config.stop.{key}={getattr(stop, key):g} {at}: raise it to go on"
        why += f", jaxlm train {self._folder} --branch=decay --steps=N finishes the model from here" * bool(step)
        return "budget", why

    def _at(self, step: int) -> milestones.Phase | None:
        return next((phase for phase in self._plan if phase.first <= step <= phase.last), None)

    def _spent(self, phase: milestones.Phase) -> bool:
        """True if the phase has spent its budget, unless the user accepted that."""
        if not phase.config.usd or self._accepted(phase, "budget"):
            return False
        if phase.name not in self._before:
            self._before[phase.name] = self._begun(phase, self.records())
        return self.spent()[1] - self._before[phase.name]["cost_usd"] >= phase.config.usd

    def _begun(self, phase: milestones.Phase, records: Records) -> dict:
        """Returns where the run stood when the phase began; seconds and dollars by the previous phase's row, if it is there."""
        nothing = (0.0, 0.0)  # the first phase pays for the start too
        start = point(records, phase.first - 1, nothing if phase.first == 1 else None)
        before = [r for r in self._rows if r["ended"] and r["last_step"] == phase.first - 1]
        return start | {name: row[name] for row in before[-1:] for name in ("wall_s", "cost_usd")}

    def _accepted(self, phase: milestones.Phase, cause: str) -> bool:
        """True if the user accepts this cause. Once run.json has accepted causes of the phase, no others are accepted."""
        causes = {r["accepted"] for r in self._rows if r["phase"] == phase.name} - {""}
        return cause in causes if causes else phase.name == self._config.phases.accept

    def _write(self, entry: dict) -> None:
        self._rows.append(entry)
        self.append(entry)
