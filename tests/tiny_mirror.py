"""Runs for tests of the mirror: folders that look like a run's, and the mirror's jobs without a process around them."""

import os
import pathlib
import random

from jaxlm import config
from jaxlm.config import config_files
from jaxlm.run.checkpoints import mirror_worker as worker
from jaxlm.run.checkpoints.remote import Remote

_OVERRIDES = ["data.path=x", "checkpoint.mirror_keep_last=2", "checkpoint.keep_best=0"]
CONFIG = config.resolve(config_files.load("base", _OVERRIDES)).checkpoint


def make_run(folder: pathlib.Path, *steps: int) -> pathlib.Path:
    """Makes a run's folder with logs and these checkpoints; the files of each are random, but always the same."""
    (folder / "samples").mkdir(parents=True)
    (folder / "config.json").write_text('{"seed": 1}')
    (folder / "run.json").write_text('{"starts": []}')
    (folder / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    (folder / "eval" / "10").mkdir(parents=True)
    (folder / "eval" / "10" / "results.json").write_text('{"tasks": {}}')
    (folder / "samples" / "10.jsonl").write_text('{"text": "x"}\n')
    for step in steps:
        save(folder, step)
    return folder


def save(run: pathlib.Path, step: int, size: int = 3000) -> None:
    """Adds a checkpoint to a run's folder."""
    rng = random.Random(step)
    for name in ("params/d/a1", "params/manifest.ocdbt", "train/d/b2", "train/_METADATA", "meta/metadata", "_METADATA"):
        path = run / "checkpoints" / str(step) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(rng.randbytes(size))


def content(folder: pathlib.Path) -> dict[str, bytes]:
    """Relative name -> bytes of all files under a folder."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def job(run: pathlib.Path, step: int = 0, **more) -> dict:
    """A job as the mirror's process gets it, from start "s" of the run "r"."""
    ours = {"id": "r", "start": "s", "new_id": "r", "workdir": str(run), "empty": not (run / "checkpoints").is_dir()}
    return {**ours, "step": step, "copied": {}, **more}


def copy(remote: Remote, run: pathlib.Path, step: int, **more) -> dict:
    """Copies a checkpoint to the mirror, in this process."""
    return worker.copy(remote, job(run, step, **more), lambda event: None)


def restore(url: str | pathlib.Path, workdir: pathlib.Path) -> tuple[int | None, list[str]]:
    """Brings a run back from a mirror, in this process. Returns (step, the lines that it said).

    Raises Refused, as a run would exit with 2.
    """
    events, remote, empty = [], Remote(str(url), pause_s=0), {"id": "", "empty": True}
    workdir.mkdir(parents=True, exist_ok=True)
    worker.claim(remote, job(workdir, **empty), events.append)
    step = worker.restore(remote, job(workdir), events.append)["step"]
    return step, [event["line"] for event in events if "line" in event]


def flip(path: pathlib.Path, rng: random.Random) -> int:
    """Flips one bit of a file, in place. Returns which; to flip it again (`flip_back`) mends the file."""
    bit = rng.randrange(8 * path.stat().st_size)
    flip_back(path, bit)
    return bit


def flip_back(path: pathlib.Path, bit: int) -> None:
    """Flips the bit `bit` of a file."""
    with open(path, "rb+") as file:
        byte = os.pread(file.fileno(), 1, bit // 8)[0]
        os.pwrite(file.fileno(), bytes([byte ^ 1 << bit % 8]), bit // 8)
