"""Takes a run's figures from the device to metrics.jsonl, the loggers and the terminal: `Meter`, `Recorder`, `Progress`."""

import contextlib
import dataclasses
import math
import pathlib
import time
from collections.abc import Callable, Iterable, Mapping

import jax

from jaxlm.config import Config, HardwareConfig
from jaxlm.host.console import AGAIN_S, WORKING_S, dollars, duration, human
from jaxlm.host.screen import BOLD, CYAN, DIM, GREEN, Part, say, say_parts, shown
from jaxlm.plan import flops
from jaxlm.report import benchmarks
from jaxlm.run import ledger
from jaxlm.run.clock import DATA, REPEATED, ROLLOUT, STEP, Clock
from jaxlm.run.metrics import Scores, Writer
from jaxlm.run.spent import Earlier

_NONE = Earlier()
_TRAINING = (DATA, ROLLOUT, STEP, REPEATED)  # the activities that count for tokens/s


@dataclasses.dataclass
class Meter:
    """Turns finished steps into tokens/s, MFU, the seconds of each activity, dollars and time left.

    Attributes:
      flops_palm, flops_causal: FLOPs a token, by the PaLM convention and with causal attention.
      peak_flops: FLOP/s of all devices together; None if unknown, and then there is no MFU.
    """

    clock: Clock
    earlier: Earlier = _NONE
    _: dataclasses.KW_ONLY
    tokens_per_step: int
    usd_per_hour: float
    flops_palm: float = 0.0
    flops_causal: float = 0.0
    peak_flops: float | None = None
    _mark: tuple[int, float] | None = None  # a step, and the seconds of training until then

    def now(self, step: int) -> dict[str, float]:
        """Returns the fields of every record, for all starts together; `goodput`: the time share of new steps and rollouts."""
        seconds = {name: round(spent, 3) for name, spent in self.clock.seconds().items()}
        wall = sum(seconds.values())
        cost = self.earlier.with_now(wall, self.usd_per_hour)
        return {
            "step": step,
            "tokens": step * self.tokens_per_step,
            "time": round(time.time(), 3),
            "wall_s": round(wall, 3),
            "cost_usd": round(cost, 6),
            "goodput": round((seconds[STEP] + seconds[ROLLOUT]) / wall, 4) if wall else 0.0,
        } | {f"time/{name}_s": spent for name, spent in seconds.items()}

    def measure(self, step: int, total: int) -> dict[str, float]:
        """Returns `now`, and the speed since the last call: tokens/s, MFU, seconds of steps left until step `total`.

        The speed counts steps and the waits for their batches. The first call, whose step may compile, returns no speed.
        """
        record, spent = self.now(step), self.clock.seconds()
        training = sum(spent[name] for name in _TRAINING)
        if self._mark and step > self._mark[0]:
            seconds = max(training - self._mark[1], 1e-9)
            speed = (step - self._mark[0]) * self.tokens_per_step / seconds
            record |= {"tokens_per_second": speed, "eta_s": (total - step) * self.tokens_per_step / speed}
            if self.peak_flops:
                record |= {
                    "mfu_palm": speed * self.flops_palm / self.peak_flops,
                    "mfu_causal": speed * self.flops_causal / self.peak_flops,
                }
        self._mark = (step, training)
        return record

    def of_flops(self, per_token: flops.FlopsPerToken, hardware: HardwareConfig) -> "Meter":
        """Returns a meter that measures MFU too, of all devices of this program."""
        peak = _peak_tflops(hardware)
        peak_flops = peak * 1e12 * jax.device_count() if peak else None
        return dataclasses.replace(
            self, flops_palm=per_token.palm, flops_causal=per_token.causal, peak_flops=peak_flops
        )


def recounted(folder: pathlib.Path, config: Config) -> str:
    """Returns a line if the previous start's MFU counted lookup tables, as older versions did; else ""."""
    starts, parameters = ledger.read(folder)["starts"], flops.count_params(config.model)
    looked_up = parameters - flops.multiplied(config)
    if not starts or "flops_per_token" in starts[-1] or not looked_up or not _peak_tflops(config.hardware):
        return ""
    return (
        f"MFU steps down here, the speed does not: {looked_up:,} of {parameters:,} parameters are only looked up, and no "
        "longer count as matrix products"
    )


def _peak_tflops(hardware: HardwareConfig) -> float | None:
    return hardware.peak_tflops or flops.peak_tflops(jax.devices()[0].device_kind)


@dataclasses.dataclass(eq=False)
class Recorder:
    """Brings the metrics of steps from the device to metrics.jsonl, the loggers and the progress line.

    Args:
      first: the first step of this start. It is always logged, and so is the last.
      between_s: (step, last step) -> seconds that evaluations, saves and other hooks will take between them.
    """

    meter: Meter
    writer: Writer | None
    _: dataclasses.KW_ONLY
    first: int
    steps: int
    every_steps: int
    reads: Iterable[str] = ()
    before: Mapping[int, float] | None = None
    scores: Scores | None = None
    between_s: Callable[[int, int], float] = lambda step, end: 0.0

    def __post_init__(self):
        self._reads = {"skipped_in_a_row", "loss", *self.reads}
        doing, done = self.meter.clock.doing, self.first - 1
        self._progress = Progress(self.steps, done, doing, self.before) if self.writer else None
        self._step = done

    def begin(self) -> None:
        """Writes the first record of a start, so that its time is recorded even if it dies at once."""
        self._note(self._step)

    def fetch(self, step: int, metrics: dict) -> None:
        """Starts copying to the host the metrics that `read` will need. Does not wait for the step to finish."""
        for name in metrics if self._due(step) else self._reads:
            metrics[name].copy_to_host_async()

    def read(self, step: int, metrics: dict) -> dict[str, float]:
        """Waits until a step is done. Returns all metrics of a logged or skipped step, else the loss and those in `reads`."""
        record = {name: float(metrics[name]) for name in self._reads}
        self._step = step
        if self._progress:
            self._progress.stepped(step, record["loss"])
        if not self._due(step) and not record["skipped_in_a_row"] > 0:
            return record
        record |= {name: float(value) for name, value in metrics.items() if name not in record}
        line = self.meter.measure(step, self.steps)
        line |= {f"train/{name}": record[name] for name in metrics if name != "skipped_in_a_row"}
        self._score(step, line)
        if self.writer:
            self.writer.write({name: value for name, value in line.items() if name != "eta_s"})
            if "eta_s" in line:
                line["eta_s"] += self.between_s(step, self.steps)
            losses = [*filter(math.isfinite, self.scores.losses.values())] if self.scores is not None else []
            self._progress.update(line, min(losses) if len(losses) > 1 else None)
        return record

    def add(self, step: int, name: str, figures: dict[str, float]) -> None:
        """Writes and shows more figures of a step, such as held-out losses."""
        self._step = step
        self._score(step, figures)
        self._note(step, figures)
        if self.writer:
            names = [key for key in figures if benchmarks.leads(key)]
            words = [f"{key.removeprefix('val/').removeprefix('eval/')} {figures[key]:.4f}" for key in names]
            # The summary figure comes first, then losses: a narrow terminal leaves out the last ones.
            words.sort(key=lambda word: ("/" in word, "/loss " not in word))
            first, *others = [word.replace("/loss ", " ") for word in words] or [""]
            said = [f"step {step}  {name}: {first}", *others]
            say_parts([Part(word, rank) for rank, word in enumerate(said)])

    def say(self, text: str) -> None:
        if self.writer:
            say(text)

    def close(self) -> None:
        """Ends the live line, and writes the last record of this start, with all its time and dollars."""
        if self._progress:
            self._progress.close()
        self._note(self._step)

    def _score(self, step: int, figures: Mapping[str, float]) -> None:
        if self.scores is not None:
            self.scores.note(step, figures)

    def _note(self, step: int, figures: dict[str, float] | None = None) -> None:
        if self.writer:
            self.writer.write(self.meter.now(step) | (figures or {}))

    def _due(self, step: int) -> bool:
        return step % self.every_steps == 0 or step in (self.first, self.steps)


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
        self._shown.enter_context(shown(self))

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
        say_parts(
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
