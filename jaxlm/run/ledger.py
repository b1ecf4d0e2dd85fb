"""Reads and writes run.json: every start of a run with its code, data, packages, hardware and price, and how it ended."""

import contextlib
import dataclasses
import datetime
import functools
import hashlib
import importlib.metadata
import itertools
import json
import os
import pathlib
import platform
import subprocess
import sys
import time
import typing
from collections.abc import Callable

from jaxlm.config import Config, ConfigError, to_json
from jaxlm.host import files
from jaxlm.host.console import say
from jaxlm.host.redact import redact

# The types of a start's fields; each may be missing.
_START = {
    "time": files.TEXT,
    "step": files.whole(0),
    "usd_per_hour": files.NUMBER,
    "changed": [{"name": files.TEXT, "was": files.ANYTHING, "is": files.ANYTHING}],
    **{key: {} for key in ("git", "packages", "hardware", "choices", "ended")},
}
_PACKAGES = ("jaxlm", "jax", "jaxlib", "flax", "optax")
_PACKAGES += ("orbax-checkpoint", "grain", "array-record", "sentencepiece", "numpy")


def _is_start(entry: object) -> bool:
    known = {key: entry[key] for key in _START if entry.get(key)} if isinstance(entry, dict) else None
    return known is not None and not files.problem(known, {key: _START[key] for key in known})


# The lists of run.json, and what each of their entries must be.
_LISTS: dict[str, Callable[[object], bool]] = {
    "starts": _is_start,
    "phases": lambda entry: isinstance(entry, dict),
    "passed_over": lambda entry: isinstance(entry, list) and [type(x) for x in entry] == [int, int],
    "rollbacks": lambda entry: not files.problem(entry, {"steps": [files.whole(0)], "time": files.NUMBER}),
    "receipt": lambda entry: isinstance(entry, dict),  # `run.receipt` names links that were changed
}


def read(folder: pathlib.Path, mend: bool = True) -> dict:
    """Returns the content of run.json: lists `starts`, `phases`, `passed_over`, `rollbacks`, `receipt`; empty without a file.

    Renames a damaged file to run.json.damaged.N, and writes its undamaged lists to a new run.json; without `mend` raises
    ConfigError.
    """
    path, empty = folder / "run.json", {key: [] for key in _LISTS}
    try:
        book = files.json_of(path.read_bytes().decode("utf-8", "surrogateescape"))
    except (FileNotFoundError, NotADirectoryError):
        return empty
    except ValueError:
        book = None
    lists = empty | (book or {})
    sound = [key for key, ok in _LISTS.items() if isinstance(lists[key], list) and all(map(ok, lists[key]))]
    if book is not None and len(sound) == len(_LISTS):
        return lists
    if not mend:
        raise ConfigError(f"{path} is damaged: nothing that it holds can be checked")
    names = (path.with_name(f"run.json.damaged.{number}") for number in itertools.count(1))
    aside = next(name for name in names if not name.exists())
    os.replace(path, aside)
    whole = {key: lists[key] for key in sound if lists[key]}
    if whole:
        _write(folder, empty | whole)
    held = f"; its {' and '.join(whole)} are kept" if whole else ""
    say(f"{path} is damaged: moved to {aside.name}{held}; the run goes on with a new one")
    return empty | whole


def moment(folder: pathlib.Path, clock: files.Clock = datetime.datetime.now) -> str:
    """Returns the time that a run's chat template always sees as the present, with its UTC offset; run.json keeps it.

    It is the time of the first call or, in a run begun before 28 November 2026, of the first start.
    """
    book = read(folder)
    if files.is_moment(book.get("moment")):
        return book["moment"]
    if book["starts"] and files.is_moment(first := book["starts"][0].get("time")):
        return files.moment(lambda: datetime.datetime.fromisoformat(first))
    when = files.moment(clock)
    _write(folder, book | {"moment": when})
    return when


def last_link(folder: pathlib.Path) -> str:
    """Returns the sha256 of the last link of the receipt; "" without one."""
    return next((link.get("sha256", "") for link in reversed(read(folder)["receipt"])), "")


def append(folder: pathlib.Path, key: str, entry: object) -> None:
    book = read(folder)
    _write(folder, book | {key: [*book[key], redact(entry)]})


def put(folder: pathlib.Path, key: str, entries: list) -> None:
    """Replaces a list of run.json. Raises OSError."""
    book = read(folder)
    if book[key] != entries:
        _write(folder, book | {key: entries})


def roll_back(folder: pathlib.Path, entry: dict) -> None:
    """Adds a rollback, and drops the phases that ended at or after its first step, in one write. Raises OSError."""
    book = read(folder)
    rows = [row for row in book["phases"] if row.get("last_step", 0) < entry["steps"][0]]
    _write(folder, book | {"rollbacks": [*book["rollbacks"], entry | {"time": time.time()}], "phases": rows})


def record_start(
    folder: pathlib.Path,
    config: Config,
    *,
    step: int,
    manifest_sha256: str,
    hardware: dict,
    choices: dict,
    changed: list[dict],
    flops_per_token: float | None = None,
    held_out: dict[str, str] | None = None,
) -> None:
    """Writes config.json, and adds this start to run.json.

    config.json keeps its secrets (`notify.urls`), since it is used again; then only its owner can read it. `step`: the steps
    already done. `changed`: `differences.since_last_start`. `flops_per_token`: for MFU; old starts have none, see
    `meter.recounted`. `held_out`: source -> what identifies the held-out text (`held_out_texts`).
    """
    # Absolute, so that the run is found from any folder.
    data = dataclasses.replace(config.data, dir=os.path.abspath(config.data.dir))
    config = dataclasses.replace(config, workdir=os.path.abspath(config.workdir), data=data)
    text, plain = to_json(config), dataclasses.asdict(config)
    files.write_atomically(folder / "config.json", text.encode(), private=redact(plain) != plain)
    start = {
        "time": _now(),
        "step": step,
        "pid": os.getpid(),
        "command": sys.argv,
        "git": git(),
        "config_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "manifest_sha256": manifest_sha256,
        "held_out": held_out or {},
        "packages": packages(),
        "python": platform.python_version(),
        "hardware": machine() | hardware,
        "choices": choices,
        "usd_per_hour": config.hardware.usd_per_hour,
        "changed": changed,
        "flops_per_token": flops_per_token,
        "link": last_link(folder),
    }
    append(folder, "starts", start)


def end(
    folder: pathlib.Path, *, step: int, code: int, why: str, cause: str = "", pid: int | None = None, hung: bool = False
) -> None:
    """Writes into run.json how the newest start ended, if its process is `pid` (default: this process). Raises no OSError.

    An ending that the start wrote itself stays, unless the supervisor, which gives its child's `pid`, says that it `hung`.
    """
    ended = {"time": _now(), "code": code, "why": redact(why), "cause": cause}

    def facts(last: dict) -> dict:
        if "ended" in last and not hung:
            return {}
        return {"ended": {"step": max(step, last.get("step", 0)), **ended, "link": last_link(folder)}}

    _on_last_start(folder, facts, pid)


def note(folder: pathlib.Path, mirrored: bool) -> None:
    _on_last_start(folder, lambda last: {"ended": {**last.get("ended", {}), "mirrored": mirrored}})


def _on_last_start(folder: pathlib.Path, facts: Callable[[dict], dict], pid: int | None = None) -> None:
    """Adds `facts(start)` to the newest start, if its process is `pid` (by default this process)."""
    try:
        book = read(folder)
        last = book["starts"][-1] if book["starts"] else {}
        if last.get("pid") == (pid or os.getpid()) and (new := facts(last)):
            last |= new
            _write(folder, book)
    except OSError as error:
        say(f"run.json can't be updated with how this start ended: {error}")


def lock(folder: pathlib.Path) -> typing.IO[str]:
    """Locks the run's folder against other processes, until the returned file is closed; see `files.lock`."""
    return files.lock(folder, "trains in", "config.workdir", wait_s=files.ENDING_S)


def machine() -> dict[str, str]:
    """Returns this machine's `host` name, and the `boot_id` of its last boot, "" on systems that have none."""
    boot_id = ""
    with contextlib.suppress(OSError):
        boot_id = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return {"host": platform.node(), "boot_id": boot_id}


def _write(folder: pathlib.Path, book: dict) -> None:
    files.write_atomically(folder / "run.json", (json.dumps(book, indent=1) + "\n").encode())


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")


def packages() -> dict[str, str | None]:
    """Returns the versions of the packages that a run's numbers depend on; None for an absent package."""
    versions: dict[str, str | None] = dict.fromkeys(_PACKAGES)
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


@functools.cache
def git() -> dict | None:
    """Returns the code's commit, and whether files differ from it; None outside a checkout."""
    folder = pathlib.Path(__file__).resolve().parents[2]

    def ask(*args: str) -> str:
        return subprocess.run(["git", *args], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()

    try:
        if pathlib.Path(ask("rev-parse", "--show-toplevel")) != folder:
            return None  # installed inside somebody else's repository
        return {"commit": ask("rev-parse", "HEAD"), "dirty": bool(ask("status", "--porcelain"))}
    except (OSError, subprocess.CalledProcessError):
        return None
