"""Writes a run's records to metrics.jsonl, TensorBoard and Weights & Biases, reads metrics.jsonl, and scores checkpoints by it.

No writer can stop or delay training. No JAX is imported here.

metrics.jsonl has one JSON object a line, and is append-only. After a resume a step may have two lines, since the steps after
the last checkpoint are done again. The later line counts. Only process 0 writes. Readers skip lines that are no records (cut
short by a crash, damaged), and read values that are no numbers as None.
"""

import collections
import contextlib
import errno
import importlib.util
import json
import math
import os
import pathlib
import platform
import re
import secrets
import statistics
import struct
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from jaxlm.config import CheckpointConfig, Config, ConfigError, LogConfig, nearest, pip_install
from jaxlm.host.console import say
from jaxlm.host.files import is_number, json_of, whole, write_atomically
from jaxlm.host.redact import redact
from jaxlm.run import ledger

START = "start"  # the machine and price of a start, in its first record: no metric
HELD_OUT = "val/loss"  # by default its lowest value is the best checkpoint's
AVERAGE = "val_average/loss"  # that of the moving average of the weights
KEEP = 10_000  # records that wait in memory at most
_FULL = (errno.ENOSPC, errno.EDQUOT)


class Appender:
    """Appends records to a file, each whole or not at all, and never raises.

    A record that can't be written waits in memory, and is tried again at every later call. If more than `keep` wait, the
    oldest are dropped. One line says when writing begins to fail, and one when it works again.
    """

    def __init__(self, path: pathlib.Path, on_full: Callable[[], None] | None = None, keep: int = KEEP):
        self._path, self._on_full = path, on_full
        self._waiting: collections.deque[bytes] = collections.deque(maxlen=keep)
        self._descriptor, self._size = -1, -1  # _size: where the last whole record ends; -1 = wherever the file ends
        self._failing, self._dropped = "", 0

    def append(self, record: bytes) -> None:
        """Writes the waiting records, then this one. Never raises."""
        self._dropped += len(self._waiting) == self._waiting.maxlen
        self._waiting.append(record)
        self._write()

    def close(self) -> None:
        """Writes the waiting records, flushes them to disk and closes the file. Says what was lost."""
        self._write()
        try:
            if self._descriptor >= 0:
                os.fsync(self._descriptor)
        except OSError as error:
            say(f"{self._path} may lack its last lines: {error.strerror}")
        self._shut()
        if self._waiting:
            say(f"{self._path} lacks its last {len(self._waiting):,} records: {self._failing}")
            self._waiting.clear()

    def _write(self) -> None:
        error = self._attempt()
        if error and error.errno in _FULL and self._on_full and not self._failing:
            with contextlib.suppress(OSError):
                self._on_full()
            error = self._attempt()
        if error and not self._failing:
            self._failing = error.strerror or str(error)
            say(f"{self._path} can't be written ({self._failing}): training goes on, and writing once it can")
        elif not error and self._failing:
            lost = f"{self._dropped:,} records were lost" if self._dropped else "nothing was lost"
            say(f"{self._path} is written again; {lost}")
            self._failing, self._dropped = "", 0

    def _attempt(self) -> OSError | None:
        """Writes the waiting records until one fails; returns its error, or None."""
        try:
            if self._waiting and self._descriptor < 0:
                self._open()
            while self._waiting:
                left = memoryview(self._waiting[0])
                while left:
                    left = left[os.write(self._descriptor, left) :]
                self._size += len(self._waiting.popleft())
        except OSError as error:
            with contextlib.suppress(OSError):  # removes a partly written record, for readers
                if self._descriptor >= 0:
                    os.ftruncate(self._descriptor, self._size)
            self._shut()  # a file handle that failed once may never work again (ESTALE)
            return error
        return None

    def _open(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        size = os.fstat(self._descriptor).st_size
        if 0 <= self._size < size:  # a partly written record could not be removed before
            os.ftruncate(self._descriptor, self._size)
        else:
            self._size = size

    def _shut(self) -> None:
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
        self._descriptor = -1


class JsonLines(Appender):
    """Appends JSON objects to a file, one a line. Opening it removes a last line that a crash cut short."""

    def __init__(self, path: pathlib.Path, on_full: Callable[[], None] | None = None):
        if path.exists() and not (data := path.read_bytes()).endswith(b"\n"):
            os.truncate(path, data.rfind(b"\n") + 1)
        super().__init__(path, on_full)

    def write(self, record: dict) -> None:
        clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        self.append((json.dumps(clean) + "\n").encode())


def records(path: pathlib.Path, containing: str = "") -> Iterator[dict]:
    """Yields the records of metrics.jsonl, none without a file; only from lines that contain the text `containing`."""
    with contextlib.suppress(FileNotFoundError), open(path, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                record = json_of(line, object) if containing in line else None
            except ValueError:
                continue
            if isinstance(record, dict) and whole(0).holds(record.get("step")):
                yield {name: v if is_number(v) or name == START else None for name, v in record.items()}


def read(path: pathlib.Path, rollbacks: Sequence[Mapping] = ()) -> dict[int, dict]:
    """Returns step -> metrics that no rollback undid. Merges all lines of a step; the later value of a metric counts."""
    steps: dict[int, dict] = {}
    for record in valid(path, "", rollbacks):
        steps.setdefault(record["step"], {}).update({name: v for name, v in record.items() if name != START})
    return steps


def step_s(path: pathlib.Path, config: Config) -> float:
    """Returns the seconds that a step took, by the median of the logged speeds; 0 if none is logged."""
    speeds = [record["tokens_per_second"] for record in records(path) if record.get("tokens_per_second")]
    return config.train.batch_size * config.train.seq_len / statistics.median(speeds) if speeds else 0.0


def held_out_losses(path: pathlib.Path, rollbacks: Sequence[Mapping] = (), metric: str = HELD_OUT) -> dict[int, float]:
    """Returns step -> its last `metric` that no rollback undid, NaN if it was not finite; {} without a file."""
    records = valid(path, f'"{metric.partition("/")[0]}/', rollbacks)
    losses = {r["step"]: r.get(metric) for r in records if metric in r or metric == HELD_OUT}
    return {step: math.nan if loss is None else loss for step, loss in losses.items()}


def train_losses(path: pathlib.Path, done: int, rollbacks: Sequence[Mapping] = ()) -> dict[int, float]:
    """Returns step -> training loss of the logged steps up to `done`, ascending, without those that are not finite."""
    losses = {r["step"]: r["train/loss"] for r in valid(path, '"train/loss"', rollbacks) if r["step"] <= done}
    return {step: losses[step] for step in sorted(losses) if is_number(losses[step])}


def benchmarked(path: pathlib.Path, rollbacks: Sequence[Mapping] = ()) -> set[int]:
    """Returns the steps after which benchmarks were run, without steps that a rollback undid; empty without a file."""
    records = valid(path, '"eval/', rollbacks)
    return {record["step"] for record in records if any(name.startswith("eval/") for name in record)}


def valid(path: pathlib.Path, containing: str, rollbacks: Sequence[Mapping]) -> Iterator[dict]:
    """Returns the `records` that no later rollback undid."""
    return (record for record in records(path, containing) if not undone(record, rollbacks))


def undone(record: Mapping, rollbacks: Sequence[Mapping]) -> bool:
    """True if a later rollback undid the record, which has a `step` and perhaps a `time`."""
    step, time = record["step"], record.get("time") or 0.0
    return any(step >= rollback["steps"][0] and time < rollback["time"] for rollback in rollbacks)


_FINISH_S = 60.0  # how long the end of a run waits for W&B's servers


class Writer:
    """Writes each record to metrics.jsonl, and to TensorBoard and W&B if the config asks for them.

    A logger of others that fails stops nothing: one line says so, and the run goes on.
    """

    def __init__(
        self,
        workdir: pathlib.Path,
        config: LogConfig,
        run_config: dict,
        first: int = 1,
        on_full: Callable[[], None] | None = None,
    ):
        self._json = JsonLines(workdir / "metrics.jsonl", on_full)
        self._others: dict[str, TensorBoard | WandB] = {}
        self._failed: set[str] = set()  # names of loggers whose failure was said
        if config.tensorboard:
            with self._guarded("TensorBoard", "can't be used"):
                self._others["TensorBoard"] = TensorBoard(workdir / "tensorboard", first, on_full)
        if config.wandb:
            with self._guarded("W&B", "can't be used"):
                self._others["W&B"] = WandB(workdir, config.wandb, run_config)

    def write(self, record: dict[str, float]) -> None:
        """Writes one record, which must have `step`. Does not raise."""
        self._json.write(record)
        scalars = {k: v for k, v in record.items() if k not in ("step", "time") and isinstance(v, int | float)}
        for name, other in self._others.items():
            with self._guarded(name, "can't be written to"):
                other.write(record["step"], scalars)

    def close(self) -> None:
        try:
            for name, other in self._others.items():
                left = " (`wandb sync` sends what is left)" * (name == "W&B")
                with self._guarded(name, f"did not finish{left}"):
                    other.close()
        finally:
            self._json.close()

    @contextlib.contextmanager
    def _guarded(self, name: str, problem: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # it may raise anything, from its own errors to a broken pipe
            if name not in self._failed:
                why = str(error).strip() or type(error).__name__
                say(f"{name} {problem}: {why}; training goes on".replace("\n", " "))
            self._failed.add(name)


def check(config: LogConfig) -> None:
    if config.wandb and importlib.util.find_spec("wandb") is None:
        raise ConfigError(f"config.log.wandb={config.wandb!r} needs Weights & Biases: {pip_install('wandb')}")


class TensorBoard:
    """Writes an event file for TensorBoard, one for each start. tensorboardX creates the events.

    tensorboardX's writer is not used: once the disk was full its thread is dead, and writing an eleventh scalar hangs.
    """

    def __init__(self, folder: pathlib.Path, first: int, on_full: Callable[[], None] | None = None):
        # tensorboardX imports PyTorch if it is installed, for the name of a type, which takes seconds. With None in
        # sys.modules that import fails at once.
        absent = "torch" not in sys.modules
        if absent:
            sys.modules["torch"] = None
        try:
            from tensorboardX import record_writer, summary
            from tensorboardX.proto import event_pb2
        finally:
            if absent:
                del sys.modules["torch"]
        self._event, self._scalar, self._crc = event_pb2.Event, summary.scalar, record_writer.masked_crc32c
        # TensorBoard reads the files in the order of their names.
        self._file = Appender(folder / f"events.out.tfevents.{time.time():.6f}.{platform.node()}", on_full)
        self._append(file_version="brain.Event:2")
        self._append(step=first, session_log=event_pb2.SessionLog(status=event_pb2.SessionLog.START))

    def write(self, step: int, scalars: dict[str, float]) -> None:
        # Non-finite values are no points of a curve, and tensorboardX would warn each time.
        summaries = [self._scalar(name, value) for name, value in scalars.items() if math.isfinite(value)]
        if summaries:
            for other in summaries[1:]:
                summaries[0].MergeFrom(other)
            self._append(step=step, summary=summaries[0])

    def close(self) -> None:
        self._file.close()

    def _append(self, **parts) -> None:
        """Appends an event as a TFRecord: its length and its bytes, each with a checksum."""
        data = self._event(wall_time=time.time(), **parts).SerializeToString()
        length = struct.pack("<Q", len(data))
        self._file.append(length + struct.pack("<I", self._crc(length)) + data + struct.pack("<I", self._crc(data)))


class WandB:
    """Writes to Weights & Biases, which drops records of steps before its latest step.

    So `step` is a metric, the x axis of the others: after a resume, the repeated steps appear twice.
    """

    def __init__(self, workdir: pathlib.Path, mode: str, run_config: dict):
        import wandb  # here, because it is large and seldom used

        settings = {"finish_timeout": _FINISH_S, "finish_timeout_raises": True}
        if redact(sys.argv) != sys.argv:
            settings["x_disable_meta"] = True  # W&B would send the command line
        self._run = wandb.init(
            project="jaxlm",
            name=workdir.name,
            id=_wandb_id(workdir / "wandb_id"),
            resume="allow",
            dir=str(workdir),
            mode=mode,
            config=run_config,
            settings=wandb.Settings(**settings),
        )
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, scalars: dict[str, float]) -> None:
        self._run.log({"step": step} | scalars)

    def close(self) -> None:
        """Ends W&B's run; waits up to a minute for its servers."""
        self._run.finish()


def _wandb_id(path: pathlib.Path) -> str:
    """Returns one id for all starts of a run, so that W&B shows one curve."""
    saved = path.read_text(errors="replace") if path.exists() else ""
    if not re.fullmatch(r"[0-9a-z]{8}", saved):
        saved = secrets.token_hex(4)
        write_atomically(path, saved.encode())
    return saved


_EVALUATIONS = ("val/", "eval/")  # prefixes of metrics that are not measured at every logged step


class Scores(dict[int, float]):
    """Step -> score of a checkpoint; the lowest is best. It is the metric, or its negative if `best_is` is "highest".

    `losses`: step -> held-out loss, NaN if it was not finite.
    """

    def __init__(self, config: CheckpointConfig):
        super().__init__()
        self._config, self._sign = config, -1.0 if config.best_is == "highest" else 1.0
        self._names: set[str] = set()  # of the metrics seen so far
        self.losses: dict[int, float] = {}

    def note(self, step: int, figures: Mapping[str, object]) -> None:
        """Sets the score of `step` from its record for metrics.jsonl, if that has the metric. The last value counts."""
        self._names |= figures.keys()
        if self._config.best_metric in figures:
            figure = figures[self._config.best_metric]
            self[step] = self._sign * float(figure) if is_number(figure) else math.nan

    def read(self, folder: pathlib.Path) -> "Scores":
        """Adds the scores in a run's metrics.jsonl, without those that a rollback undid; returns itself."""
        path, rollbacks = folder / "metrics.jsonl", ledger.read(folder)["rollbacks"]
        for record in valid(path, json.dumps(self._config.best_metric), rollbacks):
            self.note(record["step"], record)
        self.losses |= held_out_losses(path, rollbacks)
        return self

    def pairs(self) -> list[list[list[float]]]:
        """Returns [scores, losses], each a list of [step, value], for processes that can't read the run's files; see `take`."""
        return [list(map(list, figures.items())) for figures in (self, self.losses)]

    def take(self, scores: Sequence[Sequence[float]], losses: Sequence[Sequence[float]]) -> None:
        self.update({int(step): score for step, score in scores})
        self.losses.update({int(step): loss for step, loss in losses})

    def forget(self, first_bad: int) -> None:
        for figures in (self, self.losses):
            for undone in [step for step in figures if step >= first_bad]:
                del figures[undone]

    def missing(self) -> str:
        """Returns a line if there was an evaluation, and no metric is called `checkpoint.best_metric`; else "".

        The default, `val/loss`, may be missing, since a run may have no held-out text.
        """
        name = self._config.best_metric
        kind = next((kind for kind in _EVALUATIONS if name.startswith(kind)), "")
        due = any(seen.startswith(kind) for seen in self._names)
        if not self._config.keep_best or not due or name in self._names or name == HELD_OUT:
            return ""
        plain = [n for n in self._names if n.startswith(("train/", "samples/", *_EVALUATIONS)) and n.count("/") < 3]
        why = "metrics.jsonl has no such name, so no checkpoint is the best"
        return f"config.checkpoint.best_metric={name}: {why}; {nearest(name, plain)}"
