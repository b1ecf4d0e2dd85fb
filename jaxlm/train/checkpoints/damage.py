"""Tells a damaged checkpoint from one that can't be read just now."""

import contextlib
import json
import typing

from jaxlm.config import RunError

# Errors of JSON, Orbax and TensorStore on a file that is not as it was written: their types, or how their text begins.
_TYPES = (json.JSONDecodeError, UnicodeDecodeError, FileNotFoundError, KeyError)
_WORDS = ("DATA_LOSS", "NOT_FOUND", "OUT_OF_RANGE", "FAILED_PRECONDITION", "INVALID_ARGUMENT")


class CorruptCheckpointError(RunError):
    """A checkpoint whose arrays are not those that were saved."""


@contextlib.contextmanager
def reading(step: int) -> typing.Iterator[None]:
    """Turns any error of the block, which reads checkpoint `step`, into an error of one line.

    Raises:
      CorruptCheckpointError: the checkpoint is damaged.
      RunError: it can't be read for another reason (memory, permissions, a device).
    """
    try:
        yield
    except RunError:
        raise
    except Exception as error:
        chain = [error]
        while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None:
            chain.append(cause)  # to the first cause: TensorStore's words, without the long text that Orbax adds
        reason = (str(chain[-1]).splitlines() or [type(error).__name__])[0]
        if any(isinstance(e, _TYPES) or str(e).startswith(_WORDS) for e in chain):
            raise CorruptCheckpointError(f"checkpoint {step} is damaged: {reason}") from error
        raise RunError(f"checkpoint {step} can't be restored: {reason}; nothing was changed") from error
