"""Writes and reads metrics.jsonl, one JSON object a line.

It is append-only. After a resume a step may have two lines, since the steps after the last checkpoint are done again. The
later line counts. Only process 0 writes. Readers skip lines that are no records (cut short by a crash, damaged), and read
values that are no numbers as None.
"""

import collections
import contextlib
import errno
import json
import math
import os
import pathlib
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence

from jaxlm.config import Config
from jaxlm.host import console
from jaxlm.host.files import is_number, json_of, whole

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
            console.say(f"{self._path} may lack its last lines: {error.strerror}")
        self._shut()
        if self._waiting:
            console.say(f"{self._path} lacks its last {len(self._waiting):,} records: {self._failing}")
            self._waiting.clear()

    def _write(self) -> None:
        error = self._attempt()
        if error and error.errno in _FULL and self._on_full and not self._failing:
            with contextlib.suppress(OSError):
                self._on_full()
            error = self._attempt()
        if error and not self._failing:
            self._failing = error.strerror or str(error)
            console.say(f"{self._path} can't be written ({self._failing}): training goes on, and writing once it can")
        elif not error and self._failing:
            lost = f"{self._dropped:,} records were lost" if self._dropped else "nothing was lost"
            console.say(f"{self._path} is written again; {lost}")
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
    try:
        lines = open(path, encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return
    with lines:
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
