"""Writes and reads metrics.jsonl, one JSON object a line.

It is append-only. After a resume a step may have two lines, since the steps after the last checkpoint are done again. The
later line counts. Only process 0 writes. Readers skip what is no record: a line that a crash cut short, or a damaged one. What
is no number in a record is None to them.
"""

import json
import math
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence

from jaxlm.files import is_number, json_of, whole
from jaxlm.train.appender import Appender

START = "start"  # the machine and price of a start, in the record with which it opens: no metric
HELD_OUT = "val/loss"  # the best checkpoint is the one that has this lowest


class JsonLines:
    """Appends JSON objects to a file, one a line. If the disk does not take a line, it waits in memory: see `Appender`.

    Opening the file removes a last line that a crash cut short.
    """

    def __init__(self, path: pathlib.Path, on_full: Callable[[], None] | None = None):
        _mend(path)
        self._file = Appender(path, on_full)

    def write(self, record: dict) -> None:
        """Writes one object. NaN and infinities become null, since JSON has neither."""
        clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        self._file.append((json.dumps(clean) + "\n").encode())

    def close(self) -> None:
        """Flushes to disk and closes the file."""
        self._file.close()


def _mend(path: pathlib.Path) -> None:
    """Cuts off an unfinished last line."""
    if path.exists():
        data = path.read_bytes()
        if not data.endswith(b"\n"):
            os.truncate(path, data.rfind(b"\n") + 1)


def records(path: pathlib.Path, containing: str = "") -> Iterator[dict]:
    """Yields the records of metrics.jsonl in their order; none if there is no file. Skips lines that are no records.

    Args:
      containing: yield only the lines that contain this text, which is faster than to parse them all.
    """
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


def read(path: pathlib.Path) -> dict[int, dict]:
    """Returns step -> metrics. Merges all lines of a step; if two lines have the same metric, the later value counts."""
    steps: dict[int, dict] = {}
    for record in records(path):
        steps.setdefault(record["step"], {}).update({name: v for name, v in record.items() if name != START})
    return steps


def held_out_losses(path: pathlib.Path, rollbacks: Sequence[Mapping] = ()) -> dict[int, float]:
    """Returns step -> the last `val/loss` of each step that was evaluated, NaN if it was not finite; {} without a file.

    Args:
      rollbacks: the entries of run.json. What was measured in their steps before them is no more true.
    """
    losses = {}
    for record in records(path, containing='"val/'):
        if not is_void(record["step"], record.get("time") or 0.0, rollbacks):
            loss = record.get(HELD_OUT)
            losses[record["step"]] = math.nan if loss is None else loss
    return losses


def train_losses(path: pathlib.Path, done: int, rollbacks: Sequence[Mapping] = ()) -> dict[int, float]:
    """Returns step -> training loss of the logged steps up to `done`, ascending, without those that are not finite."""
    losses = {}
    for record in records(path, containing='"train/loss"'):
        if record["step"] <= done and not is_void(record["step"], record.get("time") or 0.0, rollbacks):
            losses[record["step"]] = record["train/loss"]
    return {step: losses[step] for step in sorted(losses) if is_number(losses[step])}


def benchmarked(path: pathlib.Path, rollbacks: Sequence[Mapping] = ()) -> set[int]:
    """Returns the steps after which a run answered benchmarks, without those that a rollback undid; none without a file."""
    return {
        record["step"]
        for record in records(path, containing='"eval/')
        if any(name.startswith("eval/") for name in record)
        and not is_void(record["step"], record.get("time") or 0.0, rollbacks)
    }


def is_void(step: int, time: float, rollbacks: Sequence[Mapping]) -> bool:
    """True if what was found after `step`, at `time` in Unix seconds, was undone by a rollback since."""
    return any(step >= r["steps"][0] and time < r["time"] for r in rollbacks)
