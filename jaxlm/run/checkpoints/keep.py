"""Decides which checkpoints to keep, estimates the disk space that they will need, and keeps a reserve for a full disk.

Neither `statvfs` nor a sparse file tells whether a write will succeed: quotas, network folders and overlays lie. So the
reserve is a file of real blocks: when the disk is full, deleting that file makes room for the logs and the ledger.
"""

import contextlib
import math
import os
import pathlib
import shutil
import time
from collections.abc import Collection, Iterable, Mapping, Sequence

from jaxlm.config import CheckpointConfig
from jaxlm.host import console
from jaxlm.host.files import is_step
from jaxlm.run.checkpoints import damage

RESERVE = ".reserve"  # the file in WORKDIR
_BLOCK = 2**20


def steps(checkpoints: pathlib.Path) -> list[int]:
    names = os.listdir(checkpoints) if checkpoints.is_dir() else []
    return sorted(int(name) for name in names if is_step(name))


def imported(checkpoints: pathlib.Path) -> bool:
    """True if the only checkpoint is step 0 with the weights of an imported model: the run has saved no step yet."""
    first = checkpoints / "0"
    return steps(checkpoints) == [0] and (first / "params").is_dir() and not (first / "train").is_dir()


def begun(checkpoints: pathlib.Path) -> bool:
    """True if the run has saved a step of its own, to resume from."""
    return bool(steps(checkpoints)) and not imported(checkpoints)


def obsolete(
    steps: Sequence[int],
    scores: Mapping[int, float],
    config: CheckpointConfig,
    whole: Collection[int] | None = None,
    pinned: Collection[int] = (),
) -> list[int]:
    """Returns the steps to delete: all but the newest `keep_last`, the best `keep_best`, multiples of `keep_every`, `pinned`.

    Args:
      whole: the verified steps; None if all count as verified. Only these count as the newest and the best. An unverified
        checkpoint is deleted once `keep_last` verified ones are newer. So on a disk that corrupts data the last whole
        checkpoints stay.
    """
    counted = sorted(steps if whole is None else set(steps) & set(whole))
    newest = counted[-config.keep_last :]
    enough = len(newest) == config.keep_last
    unproven = [step for step in set(steps) - set(counted) if not enough or step > newest[0]]
    every = [step for step in steps if config.keep_every and step % config.keep_every == 0]
    lowest = ranked(counted, scores)[: config.keep_best]
    return sorted(set(steps) - {*newest, *unproven, *every, *lowest, *pinned})


def best(steps: Sequence[int], scores: Mapping[int, float]) -> int | None:
    return next(iter(ranked(steps, scores)), None)


def ranked(steps: Iterable[int], scores: Mapping[int, float]) -> list[int]:
    """Returns the steps with a finite score, the lowest first; equal scores by step."""
    return [step for _, step in sorted((scores[s], s) for s in steps if math.isfinite(scores.get(s, math.nan)))]


def need(checkpoints: pathlib.Path, step: int, run: pathlib.Path) -> None:
    """Writes STEP.needed, so that rotation never deletes the checkpoint: the adapter of `run` needs it as its base."""
    file, line = checkpoints / f"{step}.needed", f"{run.resolve()}\n"
    if not file.is_file() or line not in file.read_text("utf-8"):
        with file.open("a", encoding="utf-8") as out:
            out.write(line)


def needed(checkpoints: pathlib.Path) -> set[int]:
    return {int(file.stem) for file in checkpoints.glob("*.needed") if is_step(file.stem)}


def most(config: CheckpointConfig, steps: int, pinned: int) -> int:
    """Returns the largest number of checkpoints that a run has at once, including the checkpoint being written."""
    every = steps // config.keep_every if config.keep_every else 0
    return config.keep_last + config.keep_best + every + pinned + 1


def lacking(
    directory: pathlib.Path, there: int, size: float, config: CheckpointConfig, pinned: int = 0, steps: int = 0
) -> str:
    """Returns a warning if the checkpoints of a run do not seem to fit on the disk; "" if they do."""
    count = most(config, steps, pinned)
    bytes_ = max(1, count - there) * size + config.reserve_mb * 1e6
    try:
        free = shutil.disk_usage(directory).free
    except OSError:
        return ""
    if bytes_ <= free:
        return ""
    every = f", keep_every={config.keep_every}" if config.keep_every else ""
    return (
        f"{directory} has {console.size(free)} free, and the run will need {console.size(bytes_)}: {count} checkpoints of "
        f"{console.size(size)} (config.checkpoint.keep_last={config.keep_last}, keep_best={config.keep_best}{every}, one on "
        "its way), less the existing ones, and the reserve; saving fails when the disk is full"
    )


class Reserve:
    """A file of random bytes in the work directory, which is deleted when the disk is full."""

    def __init__(self, workdir: pathlib.Path, megabytes: float):
        self._path, self._bytes = workdir / RESERVE, int(megabytes * 1e6)

    @property
    def held(self) -> bool:
        with contextlib.suppress(OSError):
            return self._bytes > 0 and self._path.stat().st_size == self._bytes
        return False

    def make(self, most: float = math.inf) -> None:
        """Writes the file, of at most `most` bytes, if it is missing and twice its size is free."""
        self._bytes = int(min(self._bytes, most))
        if self._bytes and not self.held:
            try:
                # Twice the room must be free: a reserve that fills the disk would cause the failure it guards against.
                if shutil.disk_usage(self._path.parent).free >= 2 * self._bytes:
                    _fill(self._path, self._bytes)
            except OSError:
                self.free()

    def free(self) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink()


def is_full(checkpoints: pathlib.Path, seconds: float) -> bool:
    """True if the disk is full: a trial file of the largest checkpoint's size does not fit. False if `seconds` pass before."""
    trial = checkpoints / RESERVE
    try:
        folders = [path for path in checkpoints.iterdir() if path.is_dir()]
        sizes = (sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) for path in folders)
        _fill(trial, max(sizes, default=_BLOCK), seconds)
    except OSError as error:
        return damage.full(error)
    finally:
        with contextlib.suppress(OSError):
            trial.unlink()
    return False


def _fill(path: pathlib.Path, size: int, seconds: float = math.inf) -> None:
    """Writes `size` bytes, or fewer if `seconds` pass. The bytes are random, since some file systems store no zeros."""
    end = time.monotonic() + seconds
    with open(path, "wb") as file:
        for start in range(0, size, _BLOCK):
            if time.monotonic() > end:
                break
            file.write(os.urandom(min(_BLOCK, size - start)))
        file.flush()
        os.fsync(file.fileno())
