"""Holds back room on the disk, and says what a run will need of it.

Neither `statvfs` nor a sparse file tells whether a write will succeed: quotas, network folders and overlays lie. So the
reserve is a file of real blocks, and what needs room at a bad moment (logs, the ledger) gets it by deleting that file.
"""

import contextlib
import math
import os
import pathlib
import shutil
import time

from jaxlm import console
from jaxlm.config import CheckpointConfig
from jaxlm.train.checkpoints import disk, keep

RESERVE = ".reserve"  # the file in WORKDIR
_BLOCK = 2**20


class Reserve:
    """A file of random bytes in the work directory, which is deleted when the disk is full.

    Args:
      workdir: the folder of the run.
      megabytes: the size of the file (10^6 bytes); 0 = none.
    """

    def __init__(self, workdir: pathlib.Path, megabytes: float):
        self._path, self._bytes = workdir / RESERVE, int(megabytes * 1e6)

    @property
    def held(self) -> bool:
        """True if the file is there, whole."""
        try:
            return self._bytes > 0 and self._path.stat().st_size == self._bytes
        except OSError:
            return False

    def make(self, most: float | None = None) -> bool:
        """Writes the file, unless it is there. Returns True if it is there now. Never raises.

        Args:
          most: a size in bytes above which the reserve is not needed: that of a checkpoint.
        """
        self._bytes = self._bytes if most is None else min(self._bytes, int(most))
        if not self._bytes or self.held:
            return self.held
        try:
            # Twice the room must be free: a reserve that fills the disk would cause the failure it guards against.
            if shutil.disk_usage(self._path.parent).free < 2 * self._bytes:
                return False
            _fill(self._path, self._bytes)
        except OSError:
            self.free()
            return False
        return True

    def free(self) -> bool:
        """Deletes the file. Returns True if that freed room."""
        with contextlib.suppress(OSError):
            self._path.unlink()
            return True
        return False


def _fill(path: pathlib.Path, size: int, seconds: float = math.inf) -> None:
    """Writes `size` random bytes, or what `seconds` are enough for: some file systems store no zeros."""
    end = time.monotonic() + seconds
    with open(path, "wb") as f:
        for start in range(0, size, _BLOCK):
            if time.monotonic() > end:
                break
            f.write(os.urandom(min(_BLOCK, size - start)))
        f.flush()
        os.fsync(f.fileno())


def is_full(checkpoints: pathlib.Path, seconds: float) -> bool:
    """True if no checkpoint as large as the largest one there can be written beside it: so many bytes are tried.

    False if there is none to go by, if the disk fails otherwise, or takes more than `seconds`: nobody knows then.
    """
    trial = Reserve(checkpoints, 0)
    try:
        sizes = (
            sum(f.stat().st_size for f in p.rglob("*") if f.is_file()) for p in checkpoints.iterdir() if p.is_dir()
        )
        _fill(checkpoints / RESERVE, max(sizes, default=_BLOCK), seconds)
    except OSError as error:
        return disk.full(error)
    finally:
        trial.free()
    return False


def lacking(
    directory: pathlib.Path, there: int, size: float, config: CheckpointConfig, pinned: int = 0, steps: int = 0
) -> str:
    """Returns a warning if the checkpoints of a run do not seem to fit on the disk; "" if they do.

    Args:
      directory: where the checkpoints are.
      there: the number of checkpoints that are there already.
      size: the bytes of one checkpoint.
      config: `config.checkpoint`.
      pinned: the number of checkpoints that the run keeps for good, as milestones.
      steps: the last step of the run; 0 if it is not known.
    """
    most = keep.most(config, steps, pinned)
    needed = max(1, most - there) * size + config.reserve_mb * 1e6
    try:
        free = shutil.disk_usage(directory).free
    except OSError:
        return ""
    if needed <= free:
        return ""
    every = f", keep_every={config.keep_every}" if config.keep_every else ""
    return (
        f"{directory} has {console.size(free)} free, and the run will need {console.size(needed)}: {most} checkpoints of "
        f"{console.size(size)} (config.checkpoint.keep_last={config.keep_last}, keep_best={config.keep_best}{every}, one on "
        "its way), less those that are there, and the reserve; saving fails when the disk is full"
    )
