"""Distinguishes damaged checkpoints from failing disks by errors of Python, Orbax and TensorStore; puts errors into words."""

import contextlib
import errno
import json
import os
import pathlib
import re
from collections.abc import Iterator, Sequence

from jaxlm.config import ConfigError, RunError
from jaxlm.host.files import chain

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # EFBIG: the file is larger than the shell's `ulimit -f` allows
# Disk errors that may pass: a full disk, a quota, a bad block or cable, a remount, a network folder that moved.
_PASSING = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN)
# Words of errors that a damaged file never causes.
_NEVER = ("RESOURCE_EXHAUSTED", "PERMISSION_DENIED", "UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED")
# Errors of JSON, Orbax and TensorStore on a damaged file: their types, or how their text begins.
_TYPES = (json.JSONDecodeError, UnicodeDecodeError, FileNotFoundError, KeyError)
_WORDS = ("DATA_LOSS", "NOT_FOUND", "OUT_OF_RANGE", "FAILED_PRECONDITION", "INVALID_ARGUMENT")
# TensorStore says `[OS error 28: ENOSPC No space left on device]` or `[os_error_code='28']`; other layers only repeat the
# system's words.
_NUMBER = re.compile(r"(?:OS error |\[Errno |os_error_code=')(\d+)")
_PATH = re.compile(r"""["'](/[^"']+)["']""")


class CorruptCheckpointError(RunError):
    """Raised for a checkpoint whose arrays or files differ from the saved ones."""


class NoWholeCheckpointError(ConfigError):
    """Raised if none of a run's checkpoints is whole: the same command would always fail."""


class ToldError(OSError):
    """An error of another process; its text is a complete line, with a path."""


@contextlib.contextmanager
def reading(step: int, wrong: Sequence[str] | None = None, same_tree: bool = False) -> Iterator[None]:
    """Turns an error in its `with` block, which reads checkpoint `step`, into an error of one line.

    Raises CorruptCheckpointError if the checkpoint is damaged, RunError for another reason (memory, permissions, a device).

    Args:
      wrong: the files that differ from their checksums; [] if there are none, so the checkpoint is not damaged; None if it
        has no checksums, so only the error shows whether it is damaged.
      same_tree: True if the checkpoint's arrays have the names that the caller wants.
    """
    try:
        yield
    except RunError:
        raise
    except Exception as error:
        first = chain(error)[-1]  # the first cause: TensorStore's words, without the long text that Orbax adds
        reason = (str(first).splitlines() or [""])[0] or type(first).__name__
        if not _is_damage(chain(error), wrong, same_tree):
            raise RunError(f"checkpoint {step} can't be restored: {reason}; nothing was changed") from error
        reason = f"it has no {reason}" if isinstance(first, KeyError) else reason  # whose text is the bare key
        what = f"{wrong[0]} differs from what was saved" if wrong else reason
        raise CorruptCheckpointError(f"checkpoint {step} is damaged: {what}") from error


def _is_damage(errors: list[BaseException], wrong: Sequence[str] | None, same_tree: bool) -> bool:
    # errno: a disk that does not answer now may answer later. (A missing file has an errno too, but is damage.)
    of_disk = any(isinstance(e, OSError) and e.errno and not isinstance(e, FileNotFoundError) for e in errors)
    if of_disk or any(isinstance(e, MemoryError) or _never(e) for e in errors):
        return False
    if wrong is not None:
        return bool(wrong)
    if any(isinstance(e, _TYPES) or str(e).startswith(_WORDS) for e in errors):
        return True
    # Orbax's words for a wrong tree, or for a missing or damaged file of TensorStore.
    return same_tree and any(text in str(e) for e in errors for text in ("structures do not match", "Error opening"))


def _never(error: BaseException) -> bool:
    return any(word in str(error) for word in _NEVER)


def number(error: BaseException) -> int | None:
    """Returns the `errno` of the operating system's error that caused `error`; None if there is none."""
    for link in chain(error):
        if isinstance(link, OSError) and link.errno:
            return link.errno
        if match := _NUMBER.search(str(link)):
            return int(match[1])
        for code in _PASSING:
            if os.strerror(code) in str(link):
                return code
    return None


def full(error: BaseException) -> bool:
    return number(error) in FULL


def passing(error: BaseException) -> bool:
    """True for a temporary error, which is no sign of damage: the same operation may work later."""
    return number(error) in _PASSING or _never(error)


def words(error: BaseException, place: object) -> str:
    """Returns one line: the error's reason, and the path in the error, or `place` if the error has no path."""
    errors, code = chain(error), number(error)
    for link in errors:
        if isinstance(link, ToldError):
            return str(link)
    last = errors[-1]
    text = os.strerror(code) if code else (str(last).splitlines() or [""])[0][:200] or type(last).__name__
    for link in errors:
        match = _PATH.search(str(link))
        path = str((isinstance(link, OSError) and link.filename) or (match and match[1]) or "")
        if path and not path.startswith("/proc/"):  # such a path is an open folder's number: `files.plain_path`
            return f"{text}: {path}"
    return f"{text}: {place}"


def move_aside(directory: pathlib.Path, step: int) -> pathlib.Path:
    """Moves a damaged checkpoint to WORKDIR/damaged, so that its step can be saved again. Returns its new path."""
    folder = directory.parent / "damaged"
    folder.mkdir(exist_ok=True)
    target = next(p for n in range(10**6) if not (p := folder / f"{step}.{n}").exists())
    return (directory / str(step)).rename(target)
