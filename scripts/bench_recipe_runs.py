"""The runs of scripts/bench_recipe.py: reads and writes the lines of finished runs, trains and measures a run.

runs.jsonl has a line for each finished run and is only appended to. A line that was cut off is skipped, and its run repeated.
One process at a time works on the file: its lock is passed on to the run that it trains.
"""

import dataclasses
import datetime
import fcntl
import hashlib
import json
import math
import os
import pathlib
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import time
import typing
from collections.abc import Callable, Mapping, Sequence

from jaxlm.config import ConfigError
from jaxlm.data.batches import document_rows
from jaxlm.data.shards import shards
from jaxlm.run import metrics

LOADED = 0.15  # cores that other processes may keep busy; with more, times are useless

Fields = dict[str, typing.Any]


@dataclasses.dataclass(frozen=True, order=True)
class Run:
    """A run of the plan.

    Attributes:
      arm: a name of `bench_recipe.ARMS`, or of a peer.
      shape: a name of `bench_recipe.SHAPES`.
      tokens: the budget.
      seed: of weights and batches.
      factor: the learning rate over the rate of the arm's rule.
    """

    arm: str
    shape: str
    tokens: int
    seed: int
    factor: float = 1.0

    def __str__(self) -> str:
        rate = "" if self.factor == 1 else f", rate x {self.factor:g}"
        return f"{self.arm} {self.shape} {self.tokens / 1e6:g}M seed {self.seed}{rate}"


def read(path: pathlib.Path) -> list[Fields]:
    """Returns the objects in a file of JSON lines; skips lines that were cut off or are not objects."""
    found = []
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return [line for line in found if isinstance(line, dict)]


def append(path: pathlib.Path, line: Mapping[str, typing.Any]) -> None:
    """Appends a line in one write, after a line break if the last line was cut off. Returns when it is on the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(0, end - 1))
        cut = end > 0 and file.read(1) != b"\n"
        file.write(b"\n" * cut + json.dumps(line).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def finished(
    lines: Sequence[Fields],
    asked: Callable[[Run], Fields],
    data: str = "",
    defaults: Mapping[str, typing.Any] | None = None,
) -> dict[Run, Fields]:
    """Returns run -> its newest line, for the runs whose settings are the same today.

    A key that a line lacks is newer than the line, and must have its default today, with which runs stay as they were. Keys
    that were removed since are ignored.

    Args:
      lines: of runs.jsonl.
      asked: run -> key -> value, the settings that the script wants today; empty for an unknown run.
      data: the digest of the data that the runs must have had; "" for any.
      defaults: key -> default value.
    """
    usual = json.loads(json.dumps(defaults or {}))
    found = {}
    for line in lines:
        try:
            run = Run(**{field.name: line[field.name] for field in dataclasses.fields(Run)})
            now = json.loads(json.dumps(asked(run)))  # tuples become lists, as in the file
            told = line["asked"]
            same = all(now.get(key, value) == value for key, value in told.items())
            newer = all(key in usual and value == usual[key] for key, value in now.items() if key not in told)
            if now and told and same and newer and data in ("", line["data"]):
                found[run] = line
        except (KeyError, TypeError, AttributeError):
            continue
    return found


def loss(line: Fields) -> float:
    """Returns a run's held-out loss; inf if it diverged."""
    return math.inf if line["loss"] is None else line["loss"]


def short(line: Fields) -> str:
    """Returns a short text with the figures of a finished run."""
    if line["loss"] is None:
        return f"diverged ({line.get('failed', '')})"
    loaded = {True: ", LOADED", None: ", load unknown"}.get(line.get("loaded"), "")
    speed = f"{line['tokens_per_second']:,} tokens/s" if line.get("tokens_per_second") else "speed unknown"
    return f"loss {line['loss']:.4f}, {line['bits_per_byte']:.4f} bits a byte, {line['seconds']:.0f} s, {speed}{loaded}"


def lock(path: pathlib.Path) -> typing.IO[bytes]:
    """Locks runs.jsonl for this process and the runs that inherit the file. Raises ConfigError if another process has it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.with_name(f".{path.name}.lock").open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ConfigError(f"another process works on {path} (or a run that it left behind): wait for its end") from None
    return file


def digest(value: object) -> str:
    """Returns a short hash of plain values."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


# ---------------------------------------------------------------------------------------------------------------------
# The machine


def machine() -> str:
    """Returns the processor's name and the number of cores that this process may use."""
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text()
        name = next(line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{name}, {cores} cores"


def commit() -> str:
    """Returns the last commit of the code (not of dev/), with a + if files were changed; "" outside a checkout."""

    def ask(*words: str) -> str:
        command = ["git", *words, "--", "jaxlm", "configs", "scripts"]
        root = pathlib.Path(__file__).resolve().parents[1]
        return subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return ask("log", "-1", "--format=%h") + "+" * bool(ask("status", "--porcelain"))
    except (OSError, subprocess.CalledProcessError):
        return ""


class Watch:
    """Measures how many cores other processes keep busy, from its creation until `others` is called."""

    def __init__(self) -> None:
        self._start = self._now()

    @staticmethod
    def _now() -> tuple[float, float | None, float]:
        """Returns seconds (by the clock, busy on all cores, of this process and the children that it waited for)."""
        own = sum(
            used.ru_utime + used.ru_stime
            for used in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        )
        try:
            cpu = [int(n) for n in pathlib.Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
            busy = (sum(cpu) - cpu[3] - cpu[4]) / os.sysconf("SC_CLK_TCK")  # all but idle and iowait
        except (OSError, ValueError, IndexError):
            busy = None
        return time.monotonic(), busy, own

    def others(self) -> float | None:
        """Returns the mean number of cores that other processes kept busy; None if the system does not tell."""
        (began, busy, own), (now, busy_now, own_now) = self._start, self._now()
        if busy is None or busy_now is None or now == began:
            return None
        return round(max(0.0, (busy_now - busy) - (own_now - own)) / (now - began), 2)

    def told(self) -> Fields:
        """Returns `others`, and whether that load makes times useless."""
        others = self.others()
        return {"others": others, "loaded": None if others is None else others > LOADED}


def stamp(began: float, watch: Watch) -> Fields:
    """Returns the fields of every line on where and when it was measured. `began`: by time.monotonic."""
    found = {"seconds": round(time.monotonic() - began, 1), "machine": machine(), **watch.told()}
    return found | {"commit": commit(), "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")}


# ---------------------------------------------------------------------------------------------------------------------
# Data and runs


def jaxlm(words: Sequence[str], log: pathlib.Path, held: typing.IO[bytes] | None = None) -> int:
    """Runs a verb with its output in a file; returns the exit code. `held` stays locked while the verb runs."""
    root = str(pathlib.Path(__file__).resolve().parents[1])
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH", ""))))}
    with log.open("wb") as said:
        command = [sys.executable, "-m", "jaxlm.cli.cli", *words]
        descriptors = (held.fileno(),) if held else ()
        return subprocess.run(command, stdout=said, stderr=said, env=env, pass_fds=descriptors, check=False).returncode


def make_data(folder: pathlib.Path, settings: Sequence[str], held: typing.IO[bytes]) -> shards.DataDir:
    """Opens the data, and prepares it first if it is missing; a second process waits. Raises ConfigError if that fails."""
    folder.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f".{folder.name}.lock").open("ab") as one:
        fcntl.flock(one, fcntl.LOCK_EX)
        if not (folder / shards.MANIFEST).is_file():
            print(f"making the data in {folder} (once, a minute or two)", flush=True)
            words = ["tokenize", "quickstart", *_flags(settings), f"--config.data.dir={folder}"]
            if jaxlm(words, folder / "log.txt", held):
                raise ConfigError(
                    f"the data could not be made: {last_line(folder / 'log.txt')} (all in {folder}/log.txt)"
                )
    return shards.open_data(folder)


def about(data: shards.DataDir, weights: Mapping[str, float], seq_len: int, tokens: int) -> Fields:
    """Returns fields on the data: its digest, its training and held-out tokens, and a budget's epochs by source."""
    order = document_rows.Rows(data, weights, 0, seq_len, 1)
    epochs = order.passes(tokens // seq_len)
    return {
        "data": data.sha256[:12],
        "train_tokens": sum(data.token_counts("train").values()),
        "held_out_tokens": sum(data.token_counts("val").values()),
        "epochs": {name: round(times, 2) for name, times in epochs.items()},
    }


def train(settings: Sequence[str], steps: int, folder: pathlib.Path, held: typing.IO[bytes]) -> Fields:
    """Trains one run to its end and measures it on all held-out rows.

    Args:
      settings: overrides KEY=VALUE of configs/base.py.
      steps: the steps that the run must finish.
      folder: of the run; emptied first, and removed afterwards.

    Returns:
      The line's figures: loss (None if the run diverged: exit code 3), bits_per_byte, sources, seconds, tokens_per_second, ...

    Raises:
      ConfigError: the run did not finish.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    log, watch, began = folder / "said.txt", Watch(), time.monotonic()
    code = jaxlm(["train", "base", *_flags(settings), f"--config.workdir={folder / 'run'}"], log, held)
    found = stamp(began, watch)
    lines = list(metrics.records(folder / "run" / "metrics.jsonl"))
    speeds = [line["tokens_per_second"] for line in lines if line.get("tokens_per_second")]
    found["tokens_per_second"] = round(statistics.median(speeds)) if speeds else None
    last = next((line for line in reversed(lines) if "val/loss" in line and line["step"] == steps), None)
    if code == 3:
        found |= {"loss": None, "bits_per_byte": None, "failed": last_line(log)}
    elif code or last is None:
        raise ConfigError(f"exit code {code}: {last_line(log)} (all in {log})")
    else:
        found |= _measured(last)
    shutil.rmtree(folder, ignore_errors=True)
    return found


def _measured(line: Fields) -> Fields:
    """Returns the held-out figures of a line of metrics.jsonl. Bits per byte are the unweighted mean over the sources."""
    sources = {key.split("/")[1]: line[key] for key in line if key.startswith("val/") and key[4:].endswith("/loss")}
    bits = {name: line[f"val/{name}/bits_per_byte"] for name in sources}
    return {"loss": line["val/loss"], "bits_per_byte": statistics.fmean(bits.values()), "sources": sources}


def _flags(settings: Sequence[str]) -> list[str]:
    return [f"--config.{setting}" for setting in settings]


def last_line(log: pathlib.Path) -> str:
    """Returns the last line of a process's output."""
    said = [line for line in log.read_text(errors="replace").splitlines() if line.strip()] if log.is_file() else []
    return said[-1].strip()[:300] if said else "nothing said"
