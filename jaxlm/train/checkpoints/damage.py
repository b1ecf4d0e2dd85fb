"""Tells apart damaged checkpoints and checkpoints that can't be read for another reason."""

import contextlib
import json
import typing

from jaxlm.config import RunError

# Errors of JSON, Orbax and TensorStore on a file that is not as it was written: their types, or how their text begins.
_TYPES = (json.JSONDecodeError, UnicodeDecodeError, FileNotFoundError, KeyError)
_WORDS = ("DATA_LOSS", "NOT_FOUND", "OUT_OF_RANGE", "FAILED_PRECONDITION", "INVALID_ARGUMENT")


class CorruptCheckpointError(RunError):
    """Raised for a checkpoint whose arrays differ from the saved ones."""


@contextlib.contextmanager
def reading(step: int) -> typing.Iterator[None]:
    """Turns any error in its `with` block, which reads checkpoint `step`, into an error with a message of one line.

    Raises:
      CorruptCheckpointError: the checkpoint is damaged.
      RunError: the checkpoint can't be read for another reason (memory, permissions, a device).
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
