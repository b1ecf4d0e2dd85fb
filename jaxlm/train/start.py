"""Records a start: its cost, its hardware and settings, and what changed since the previous start."""

import contextlib
import dataclasses
import functools
import os
import pathlib
import platform
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from jaxlm.config import BY_RULE, Config, ConfigError, HardwareConfig, OptimConfig, TrainConfig, config_files, resolve
from jaxlm.data.tokenizer.coder import Encoded
from jaxlm.devices.processes import say, together
from jaxlm.host.redact import redact
from jaxlm.plan import flops, forecast
from jaxlm.plan.settle import Settled
from jaxlm.run import differences, held_out_texts, ledger, metrics, receipt, spent
from jaxlm.run.clock import Clock
from jaxlm.run.metrics import JsonLines, Scores, Writer
from jaxlm.step import optim
from jaxlm.train.loop import Hook, Watch, between_s
from jaxlm.train.recorder import Meter, Recorder, recounted

JUMP = 1.05  # a smaller rise of the rate is not reported: it comes from steps that were added early in a run


class Log(contextlib.ExitStack):
    """The record of one start: its time and dollars, its entry in the ledger, its metrics. Use it in a `with`. Raises OSError.

    Open it as soon as the folder is locked, so that even a start that dies before its first step is recorded. Enter it
    before the checkpoints: then it is closed after them, and includes the time of the last save.
    """

    def __init__(self, folder: pathlib.Path, clock: Clock, train: TrainConfig, hardware: HardwareConfig):
        super().__init__()
        self._folder, self._clock = folder, clock
        earlier = together(lambda: spent.carry_on(folder, clock), first_only=True) or spent.Earlier()
        sizes = {"tokens_per_step": train.batch_size * train.seq_len, "usd_per_hour": hardware.usd_per_hour}
        self._meter = Meter(clock, earlier, **sizes)
        together(self._note, first_only=True)

    def _note(self, refused: bool = False) -> None:
        lines = JsonLines(self._folder / "metrics.jsonl")
        lines.write(spent.opening(self._meter.now(self._clock.redo), self._meter.usd_per_hour, refused))
        lines.close()

    def closed_by(self, kind: type[BaseException] | None, *error) -> None:
        """Records that a ConfigError ended the start before its first step: the run does not pay for the time from then on."""
        if kind and issubclass(kind, ConfigError) and not self._clock.step and jax.process_index() == 0:
            with contextlib.suppress(OSError):
                self._note(refused=True)

    def spent(self) -> tuple[float, float]:
        """Returns (seconds, dollars) of all starts so far, this one at its own price; first process only."""
        wall = sum(self._clock.seconds().values())
        return wall, self._meter.earlier.with_now(wall, self._meter.usd_per_hour)

    def begin(
        self,
        settled: Settled,
        data: Encoded,
        mesh: Mesh,
        done: int,
        scores: Scores,
        between: tuple[Sequence[Hook], Sequence[Watch]] = ((), ()),
        on_full: Callable[[], None] | None = None,
    ) -> Recorder:
        """Writes this start into the ledger and the metrics, and returns the recorder of the steps after `done`.

        `between`: (the hooks, which count in the time left; the watches, whose `reads` are fetched at every step).
        """
        config, (hooks, watches) = settled.runs, between
        writer = together(lambda: self._open(settled, data, mesh, done, on_full), first_only=True)
        meter = self._meter.of_flops(flops.of(config), config.hardware)
        reads = [name for watch in watches for name in watch.reads]
        sizes = {"first": done + 1, "steps": config.train.steps, "every_steps": config.log.every_steps}
        before = together(lambda: self._losses(done), first_only=True)
        left = functools.partial(between_s, hooks, self._clock)
        recorder = Recorder(meter, writer, **sizes, reads=reads, before=before, scores=scores, between_s=left)
        self.callback(recorder.close)
        recorder.begin()
        return recorder

    def _losses(self, done: int) -> dict[int, float]:
        return metrics.train_losses(self._folder / "metrics.jsonl", done, ledger.read(self._folder)["rollbacks"])

    def _open(
        self, settled: Settled, data: Encoded, mesh: Mesh, done: int, on_full: Callable[[], None] | None
    ) -> Writer:
        asked, config = settled.asked, settled.runs
        lines = jump(self._folder, asked, done), recounted(self._folder, config), receipt.gap(self._folder, done)
        for line in filter(None, lines):
            say(line)
        choices = {"attention": config.model.attention, "dtype": config.model.dtype, "mesh": dict(mesh.shape)}
        choices |= {"remat": config.model.remat, "microbatch_size": config.train.microbatch_size}
        choices |= {key: getattr(config.optim, key) for key in BY_RULE}
        facts = {"manifest_sha256": data.sha256, "hardware": hardware(), "choices": choices}
        changed = differences.since_last_start(self._folder, asked, facts)
        if changed:
            say(f"changed since the last start: {'; '.join(differences.words(changed))}")
        texts = held_out_texts.of_data(data, config) if held_out_texts.known(data) else {}
        if done and texts and (line := held_out_texts.differ(held_out_texts.of_run(self._folder), texts, "")):
            say(f"from here on another held-out text is measured, also for the best checkpoint: {line}")
        palm = flops.of(config).palm
        ledger.record_start(
            self._folder, asked, step=done, changed=changed, flops_per_token=palm, held_out=texts, **facts
        )
        shown = redact(dataclasses.asdict(config))
        writer = Writer(self._folder, config.log, shown, first=done + 1, on_full=on_full)
        self.callback(writer.close)
        return writer


def hardware() -> dict:
    """Returns the processors and the devices of this start, for the ledger."""
    devices = jax.devices()
    return {
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "platform": devices[0].platform,
        "device_kind": devices[0].device_kind,
        "devices": len(devices),
        "processes": jax.process_count(),
    }


def jump(folder: pathlib.Path, config: Config, done: int) -> str:
    """Returns a line if the rate jumps after `done` steps, because more `train.steps` stretch a schedule that had decayed."""
    saved = folder / "config.json"
    if not done or not saved.is_file():
        return ""
    before = resolve(config_files.from_run(saved))
    old, new = rate(before.optim, before.train.steps), rate(config.optim, config.train.steps)
    last, following = float(old([done])[0]), float(new([done + 1])[0])
    if config.train.steps <= before.train.steps or not JUMP * last < following:
        return ""
    return (
        f"train.steps was {before.train.steps:,} and is {config.train.steps:,}: {config.optim.schedule} is stretched, and "
        f"the learning rate jumps from {last:.3g} to {following:.3g}{_rise(folder, old, new, done, config.train.steps)}. "
        "optim.schedule=wsd can be prolonged without a jump before its decay; jaxlm train RUN --branch=decay --steps=N "
        "finishes from any milestone"
    )


def rate(config: OptimConfig, steps: int) -> forecast.Rate:
    each = jax.vmap(optim.rates(config, steps))
    return lambda numbers: np.asarray(each(np.asarray(numbers)))


def _rise(folder: pathlib.Path, old: forecast.Rate, new: forecast.Rate, done: int, end: int) -> str:
    """Returns words on the loss that is forecast with the new rates; "" if it is too early for a forecast."""
    logged = [(r["step"], r["train/loss"]) for r in metrics.records(folder / "metrics.jsonl") if r.get("train/loss")]
    if not logged:
        return ""
    fitted = forecast.fit(*map(np.array, zip(*logged, strict=True)), old, done, done)
    if isinstance(fitted, forecast.TooEarly):
        return ""
    rise = forecast.predicted_rise(fitted, new, end)
    back = f"is back at step {rise['back_step']:,}" if rise["back_step"] else "does not come back"
    losses = f"rises from {rise['now']:.3f} to {rise['peak']:.3f}, {back} and ends at {rise['end']:.3f}"
    return f"; by the forecast the loss {losses}"
