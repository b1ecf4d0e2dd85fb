"""Tells apart damaged checkpoints and checkpoints that can't be read for another reason; moves the damaged aside."""

import contextlib
import json
import pathlib
import typing

from jaxlm import files
from jaxlm.config import ConfigError, RunError

# Errors of JSON, Orbax and TensorStore on a file that is not as it was written: their types, or how their text begins.
_TYPES = (json.JSONDecodeError, UnicodeDecodeError, FileNotFoundError, KeyError)
_WORDS = ("DATA_LOSS", "NOT_FOUND", "OUT_OF_RANGE", "FAILED_PRECONDITION", "INVALID_ARGUMENT")
# How an error sounds that a damaged file never makes.
_NEVER = ("RESOURCE_EXHAUSTED", "PERMISSION_DENIED", "UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED")


class CorruptCheckpointError(RunError):
    """Raised for a checkpoint whose arrays or files differ from the saved ones."""


class NoWholeCheckpointError(ConfigError):
    """Raised if none of a run's checkpoints is whole: the same command will never do better."""


@contextlib.contextmanager
def reading(step: int, wrong: typing.Sequence[str] | None = None, same_tree: bool = False) -> typing.Iterator[None]:
    """Turns any error in its `with` block, which reads checkpoint `step`, into an error with a message of one line.

    Args:
      step: the checkpoint's step.
      wrong: the files that differ from their checksums: [] means that none does, so the checkpoint is not damaged; None
        that it has no checksums, so that the error alone must tell.
      same_tree: True if the checkpoint's arrays have the names that the caller wants.

    Raises:
      CorruptCheckpointError: the checkpoint is damaged.
      RunError: the checkpoint can't be read for another reason (memory, permissions, a device).
    """
    try:
        yield
    except RunError:
        raise
    except Exception as error:
        chain = files.chain(error)  # to the first cause: TensorStore's words, without the long text that Orbax adds
        reason = (str(chain[-1]).splitlines() or [""])[0] or type(error).__name__
        if _is_damage(chain, wrong, same_tree):
            what = f"{wrong[0]} differs from what was saved" if wrong else _plain(chain[-1], reason)
            raise CorruptCheckpointError(f"checkpoint {step} is damaged: {what}") from error
        raise RunError(f"checkpoint {step} can't be restored: {reason}; nothing was changed") from error


def _is_damage(chain: list[BaseException], wrong: typing.Sequence[str] | None, same_tree: bool) -> bool:
    texts = [str(error) for error in chain]
    # errno: a disk that does not answer now may answer later. (A missing file has one too, and is damage.)
    passing = any(isinstance(e, OSError) and e.errno and not isinstance(e, FileNotFoundError) for e in chain)
    if passing or any(isinstance(e, MemoryError) for e in chain) or any(word in t for t in texts for word in _NEVER):
        return False
    if wrong is not None:
        return bool(wrong)
    if any(isinstance(e, _TYPES) or text.startswith(_WORDS) for e, text in zip(chain, texts, strict=True)):
        return True
    # Orbax's words for a tree or a file of TensorStore that is not there as it should be.
    return same_tree and any("structures do not match" in text or "Error opening" in text for text in texts)


def _plain(error: BaseException, reason: str) -> str:
    """Returns the reason; for a KeyError, whose text is the bare key, a sentence."""
    return f"it has no {reason}" if isinstance(error, KeyError) else reason


def move_aside(directory: pathlib.Path, step: int) -> pathlib.Path:
    """Moves a damaged checkpoint to WORKDIR/damaged, so that its step can be saved again. Returns where it is."""
    folder = directory.parent / "damaged"
    folder.mkdir(exist_ok=True)
    target = next(p for n in range(10**6) if not (p := folder / f"{step}.{n}").exists())
    return (directory / str(step)).rename(target)
