"""Remembers what machines were measured to do: tokens per second of each model and setting, by device kind and number.

The one home is ~/.cache/jaxlm/machines.json: {"NVIDIA H200 x 1": {KEY: [{"tokens_per_second", "by", "time", "host"}, ...]}}.
Its key "plans" keeps what `jaxlm plan` found out about each host: {"plans": {HOST: {KEY: {...}}}}.
It is a cache: losing it loses a comparison, so a file that can't be read or written is never an error.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import math
import pathlib
import platform
import statistics
import time
from collections.abc import Callable, Mapping

from jaxlm.config import Config
from jaxlm.host import files

MOST = 20  # measurements of one setting that are kept
MOST_PLANS = 100  # of a host
_PLANS = "plans"
_ROW = {"tokens_per_second": files.NUMBER, "time": files.NUMBER, "by": files.TEXT}
# As `this_machine.row` reads it.
_PLAN = dict.fromkeys(("kind", "setting", "by", "what"), files.TEXT) | {"count": files.whole(1)}
_PLAN |= dict.fromkeys(("microbatch", "memory", "time", "load"), files.NUMBER)
_PLAN |= dict.fromkeys(("needed", "tokens_per_second"), files.NUMBER_OR_NONE)


@dataclasses.dataclass(frozen=True)
class Known:
    """What is known of one setting on one kind of machine: the median speed of all devices; who measured last, and when."""

    tokens_per_second: float
    measurements: int
    by: str
    time: float


def path() -> pathlib.Path:
    return pathlib.Path("~/.cache/jaxlm/machines.json").expanduser()


def key(config: Config, mesh: Mapping[str, int]) -> str:
    """Returns a hash of all that decides how fast a step is, but for the device and the versions of packages."""
    t = config.train
    parts = {
        "model": dataclasses.asdict(config.model),
        "train": [t.batch_size, t.seq_len, t.microbatch_size],
        "loss": config.loss.tile_tokens,
        "optim": [config.optim.name, config.optim.mu_dtype, config.optim.offload],
        "mesh": dict(mesh),
        "xla_flags": config.hardware.xla_flags,
    }
    if config.program != "pretrain":
        parts |= {"program": config.program, "adapter": dataclasses.asdict(config.adapter), "dpo": config.dpo.loss}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def known(kind: str, count: int, setting: str) -> Known | None:
    """Returns what `count` devices of a kind did with a setting (`key`); None if nothing is known."""
    rows = _rows(files.json_there(path()), kind, count, setting)
    rows = [row for row in rows if row["by"] != "plan"] or rows  # its few steps, only where nobody took more
    if not rows:
        return None
    newest = rows[-1]
    return Known(statistics.median(row["tokens_per_second"] for row in rows), len(rows), newest["by"], newest["time"])


def record(kind: str, count: int, setting: str, tokens_per_second: float, by: str) -> None:
    """Adds a measurement by "train", "tune", "doctor" or "plan", for which the oldest or plan's last goes. Never raises."""
    if not (math.isfinite(tokens_per_second) and tokens_per_second > 0):
        return
    row = {"tokens_per_second": tokens_per_second, "by": by, "time": time.time(), "host": platform.node()}

    def add(content: dict) -> None:
        before = [r for r in _rows(content, kind, count, setting) if by != "plan" or r["by"] != "plan"]
        _part(content, _machine(kind, count))[setting] = [*before, row][-MOST:]

    _change(add)


def planned(asked: str) -> dict | None:
    """Returns what `remember` kept for this host under the same key; None if there is nothing, or it is not whole."""
    plan = _part(_part(_part(files.json_there(path()), _PLANS), platform.node()), asked)
    return None if files.problem(plan, {"why": files.TEXT} if "why" in plan else _PLAN) else plan


def remember(asked: str, found: dict) -> None:
    """Keeps what `jaxlm plan` found out about this host (see `this_machine.measure`), under any key. Never raises."""

    def add(content: dict) -> None:
        host = _part(_part(content, _PLANS), platform.node())
        host.pop(asked, None)
        host[asked] = found
        for old in list(host)[:-MOST_PLANS]:
            del host[old]

    _change(add)


def _change(edit: Callable[[dict], None]) -> None:
    """Reads the file, edits its content and writes it, while no other process does. Never raises."""
    with contextlib.suppress(OSError):  # a home that is read-only or full
        file = path()
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(file.with_name(".machines.lock"), "w") as lock:  # two runs on one host may end together
            with contextlib.suppress(OSError):  # some network file systems have no locks
                fcntl.flock(lock, fcntl.LOCK_EX)
            content = files.json_there(path())
            edit(content)
            files.write_atomically(file, (json.dumps(content, indent=1) + "\n").encode())


def _part(content: dict, name: str) -> dict:
    """The dict under `name`, which is put there if there is none."""
    if not isinstance(content.get(name), dict):
        content[name] = {}
    return content[name]


def _machine(kind: str, count: int) -> str:
    return f"{kind} x {count}"


def _rows(content: dict, kind: str, count: int, setting: str) -> list[dict]:
    """The measurements of a setting, oldest first, those that are not whole left out."""
    rows = _part(content, _machine(kind, count)).get(setting)
    return [row for row in rows if not files.problem(row, _ROW)] if isinstance(rows, list) else []
