"""Writes a run's metrics to metrics.jsonl, TensorBoard, Weights & Biases and a progress line.

metrics.jsonl is append-only. After a resume a step may have two lines, since the steps after the last checkpoint are
done again. The later line counts. Only process 0 writes.
"""

import contextlib
import importlib.util
import json
import math
import os
import pathlib
import secrets
import sys
import time
import typing

import jax

from jaxlm.config import ConfigError, HardwareConfig, LogConfig, ModelConfig, TrainConfig
from jaxlm.console import duration, human
from jaxlm.plan import flops

HELD_OUT = "val/loss"  # the best checkpoint is the one that has this lowest


class JsonLines:
    """Appends JSON objects to a file, one a line, and flushes each.

    Opening the file removes a last line that a crash cut short.
    """

    def __init__(self, path: pathlib.Path):
        self.last = _mend(path)
        self._file = open(path, "a", encoding="utf-8")

    def write(self, record: dict) -> None:
        """Writes one object. NaN and infinities become null, since JSON has neither."""
        clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        self._file.write(json.dumps(clean) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Flushes to disk and closes the file."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


def _mend(path: pathlib.Path) -> dict:
    """Cuts off an unfinished last line. Returns the last whole record; {} if there is none."""
    if not path.exists():
        return {}
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) != len(data):
        os.truncate(path, len(whole))
    for line in reversed(whole.splitlines()):
        with contextlib.suppress(ValueError):
            return json.loads(line)
    return {}


def read(path: pathlib.Path) -> dict[int, dict]:
    """Returns step -> metrics. Merges all lines of a step; if two lines have the same metric, the later value counts."""
    steps: dict[int, dict] = {}
    for line in pathlib.Path(path).read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        steps.setdefault(record["step"], {}).update(record)
    return steps


def held_out_losses(path: pathlib.Path) -> dict[int, float]:
    """Returns step -> the last `val/loss` of each step that was evaluated, NaN if it was not finite; {} without a file.

    Skips lines that are not JSON.
    """
    losses = {}
    with contextlib.suppress(FileNotFoundError), open(path, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            with contextlib.suppress(ValueError):
                record = json.loads(line) if '"val/' in line else {}
                if record:
                    loss = record.get(HELD_OUT)
                    losses[record["step"]] = math.nan if loss is None else loss
    return losses


class Writer:
    """Writes each record to metrics.jsonl, and to TensorBoard and W&B if the config asks for them.

    Args:
      workdir: the run's folder.
      config: `config.log`.
      run_config: the whole resolved config as a dict, for W&B to show.
    """

    def __init__(self, workdir: pathlib.Path, config: LogConfig, run_config: dict):
        self._json = JsonLines(workdir / "metrics.jsonl")
        self._board = _open_tensorboard(workdir) if config.tensorboard else None
        self._wandb = _open_wandb(workdir, config.wandb, run_config) if config.wandb else None

    @property
    def last(self) -> dict:
        """Returns the last record that an earlier start of this run wrote; {} if there is none."""
        return self._json.last

    def write(self, record: dict[str, float]) -> None:
        """Writes one record, which must have `step`."""
        self._json.write(record)
        scalars = {k: v for k, v in record.items() if k != "step" and isinstance(v, (int, float))}
        if self._board:
            for name, value in scalars.items():
                self._board.add_scalar(name, value, record["step"])
        if self._wandb:
            self._wandb.log(scalars, step=record["step"])

    def close(self) -> None:
        """Flushes and closes everything."""
        self._json.close()
        if self._board:
            self._board.close()
        if self._wandb:
            self._wandb.finish()


def check(config: LogConfig) -> None:
    """Raises ConfigError if the config asks for a logger that is not installed. Called before training starts."""
    if config.wandb and importlib.util.find_spec("wandb") is None:
        raise ConfigError(f'config.log.wandb={config.wandb!r} needs Weights & Biases: pip install "jaxlm[wandb]"')


def _open_tensorboard(workdir: pathlib.Path) -> typing.Any:
    # tensorboardX imports PyTorch if it is installed, for the name of a type, which takes seconds. With None in sys.modules
    # that import fails at once.
    without_torch = {} if "torch" in sys.modules else {"torch": None}
    sys.modules.update(without_torch)
    try:
        import tensorboardX
    finally:
        for name in without_torch:
            del sys.modules[name]
    return tensorboardX.SummaryWriter(str(workdir / "tensorboard"))


def _open_wandb(workdir: pathlib.Path, mode: str, run_config: dict) -> typing.Any:
    import wandb  # here, because it is large and seldom asked for

    # One id for all starts of a run: W&B then shows one curve.
    path = workdir / "wandb_id"
    if not path.exists():
        path.write_text(secrets.token_hex(4))
    run_id = path.read_text()
    return wandb.init(
        project="jaxlm", name=workdir.name, id=run_id, resume="allow", dir=str(workdir), mode=mode, config=run_config
    )


class Progress:
    """Shows progress: one line that is rewritten in a terminal, plain lines elsewhere.

    Args:
      total: the number of steps of the run.
      stream: the stream to write to; standard error by default.
    """

    def __init__(self, total: int, stream: typing.TextIO | None = None):
        self._total = total
        self._stream = stream or sys.stderr
        self._live = self._stream.isatty()
        self._width = 0

    def update(self, record: dict) -> None:
        """Shows step, loss, tokens/s, MFU (PaLM convention), dollars and time left."""
        line = self._line(record)
        if self._live:
            self._stream.write("\r" + line.ljust(self._width))
            self._width = len(line)
        else:
            self._stream.write(line + "\n")
        self._stream.flush()

    def message(self, text: str) -> None:
        """Writes a line that stays, above the one that is rewritten."""
        start = "\r" + " " * self._width + "\r" if self._live and self._width else ""
        self._stream.write(f"{start}{text}\n")
        self._stream.flush()
        self._width = 0

    def close(self) -> None:
        """Ends the progress line and leaves it on the screen."""
        if self._live and self._width:
            self._stream.write("\n")
            self._stream.flush()
            self._width = 0

    def _line(self, record: dict) -> str:
        parts = [f"step {record['step']}/{self._total}", f"loss {record['train/loss']:.4f}"]
        if record.get("tokens_per_second"):
            parts.append(f"{human(record['tokens_per_second'])} tokens/s")
            if record.get("mfu_palm"):
                parts.append(f"MFU {100 * record['mfu_palm']:.1f}%")
            if record["cost_usd"]:
                parts.append(f"${record['cost_usd']:.2f}")
            parts.append(f"ETA {duration(record['eta_s'])}")
        if record.get("train/skipped"):
            parts.append(f"skipped {record['train/skipped']:.0f}")
        return "  ".join(parts)


class Meter:
    """Turns finished steps into tokens/s, MFU, wall time, dollars and time left.

    Args:
      tokens_per_step: the number of tokens in a global batch.
      flops_palm, flops_causal: FLOPs a token, counted by the PaLM convention and with causal attention.
      peak_flops: the peak FLOP/s of all devices together; None if unknown, and then there is no MFU.
      usd_per_hour: the price of the machine.
      wall_s: the seconds that earlier starts of this run took; wall time and dollars include them.
    """

    def __init__(
        self,
        *,
        tokens_per_step: int,
        flops_palm: float,
        flops_causal: float,
        peak_flops: float | None,
        usd_per_hour: float,
        wall_s: float = 0.0,
    ):
        self._tokens_per_step = tokens_per_step
        self._flops = {"mfu_palm": flops_palm, "mfu_causal": flops_causal}
        self._peak = peak_flops
        self._usd_per_hour = usd_per_hour
        self._start = time.monotonic() - wall_s
        self._mark: tuple[int, float] | None = None
        self._paused = 0.0

    def pause(self, seconds: float) -> None:
        """Excludes `seconds`, such as those of an evaluation, from the speed. Wall time and dollars still include them."""
        self._paused += seconds

    def clock(self, step: int) -> dict[str, float]:
        """Returns what every record has: the step, and the tokens, seconds and dollars so far in all starts of the run."""
        wall = time.monotonic() - self._start
        cost = round(wall / 3600 * self._usd_per_hour, 6)
        return {"step": step, "tokens": step * self._tokens_per_step, "wall_s": round(wall, 3), "cost_usd": cost}

    def measure(self, step: int, total: int) -> dict[str, float]:
        """Returns the values of `clock`, and the speed since the last call: tokens/s, MFU, seconds left until step `total`.

        The first call returns no speed, since that would include the compilation.
        """
        ended = time.monotonic()
        record = self.clock(step)
        if self._mark and step > self._mark[0]:
            seconds = max(ended - self._mark[1] - self._paused, 1e-9)
            speed = (step - self._mark[0]) * self._tokens_per_step / seconds
            record |= {"tokens_per_second": speed, "eta_s": (total - step) * self._tokens_per_step / speed}
            if self._peak:
                record |= {name: speed * flops / self._peak for name, flops in self._flops.items()}
        self._mark, self._paused = (step, ended), 0.0
        return record


class Recorder:
    """Brings the metrics of steps from the device to metrics.jsonl, the loggers and the progress line.

    Args:
      meter: computes speed, dollars and time left.
      writer: the writer of metrics on the first process, which alone writes and shows anything; None on the others.
      first: the first step of this start. It is always logged, and so is the last.
      steps: the last step of the run.
      every_steps: the number of steps from one logged step to the next.
      reads: the names of metrics to read at every step. The others are read at logged steps only.
    """

    def __init__(
        self,
        meter: Meter,
        writer: Writer | None,
        *,
        first: int,
        steps: int,
        every_steps: int,
        reads: typing.Iterable[str] = (),
    ):
        self._meter, self._writer = meter, writer
        self._always, self._steps, self._every = (first, steps), steps, every_steps
        self._reads = {"skipped_in_a_row", *reads}
        self._progress = Progress(steps)

    def fetch(self, step: int, metrics: dict) -> None:
        """Starts copying to the host the metrics that `read` will need. Does not wait for the step to finish."""
        for name in metrics if self._due(step) else self._reads:
            metrics[name].copy_to_host_async()

    def read(self, step: int, metrics: dict) -> dict[str, float]:
        """Waits until a step is done, and returns its metrics: all if the step is logged, else those in `reads`.

        A step is logged if a log line is due, or if its update was skipped.
        """
        record = {name: float(metrics[name]) for name in self._reads}
        if not self._due(step) and not record["skipped_in_a_row"] > 0:
            return record
        record |= {name: float(value) for name, value in metrics.items() if name not in record}
        line = self._meter.measure(step, self._steps)
        line |= {f"train/{name}": record[name] for name in metrics if name != "skipped_in_a_row"}
        if self._writer:
            self._writer.write({name: value for name, value in line.items() if name != "eta_s"})
            self._progress.update(line)
        return record

    def add(self, step: int, name: str, figures: dict[str, float]) -> None:
        """Writes and shows more figures of a step, such as held-out losses."""
        if self._writer:
            self._writer.write(self._meter.clock(step) | figures)
        parts = [f"{key.removeprefix('val/')} {value:.4f}" for key, value in figures.items()]
        self.say(f"step {step}  {name}: " + "  ".join(parts))

    def say(self, text: str) -> None:
        """Shows a line of text."""
        if self._writer:
            self._progress.message(text)

    def pause(self, seconds: float) -> None:
        """Excludes `seconds` from the speed."""
        self._meter.pause(seconds)

    def close(self) -> None:
        """Ends the progress line."""
        self._progress.close()

    def _due(self, step: int) -> bool:
        return step % self._every == 0 or step in self._always


def make_meter(model: ModelConfig, train: TrainConfig, hardware: HardwareConfig, wall_s: float = 0.0) -> Meter:
    """Returns the meter of a run on all devices of this program. `wall_s`: the seconds that the run's earlier starts took."""
    per_token = flops.flops_per_token(model, train.seq_len)
    peak = hardware.peak_tflops or flops.peak_tflops(jax.devices()[0].device_kind)
    return Meter(
        tokens_per_step=train.batch_size * train.seq_len,
        flops_palm=per_token.palm,
        flops_causal=per_token.causal,
        peak_flops=peak * 1e12 * jax.device_count() if peak else None,
        usd_per_hour=hardware.usd_per_hour,
        wall_s=wall_s,
    )
