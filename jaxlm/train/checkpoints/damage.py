"""What a damaged checkpoint looks like, told from one that can't be read just now."""

import contextlib
import json
import typing

from jaxlm.config import RunError

# What a file that is not as it was written makes JSON, Orbax and TensorStore say.
_TYPES = (json.JSONDecodeError, UnicodeDecodeError, FileNotFoundError, KeyError)
_WORDS = ("DATA_LOSS", "NOT_FOUND", "OUT_OF_RANGE", "FAILED_PRECONDITION", "INVALID_ARGUMENT")


class CorruptCheckpointError(RunError):
    """A checkpoint whose arrays are not those that were saved."""


@contextlib.contextmanager
def reading(step: int) -> typing.Iterator[None]:
    """Turns what goes wrong while a checkpoint is read into one line.

    Raises:
      CorruptCheckpointError: it is damaged.
      RunError: it can't be read for another reason (memory, permissions, a device).
    """
    try:
        yield
    except RunError:
        raise
    except Exception as error:
        chain = [error]
        while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None:
            chain.append(cause)  # Orbax wraps what TensorStore said in the text of a whole spec
        reason = (str(chain[-1]).splitlines() or [type(error).__name__])[0]
        if any(isinstance(e, _TYPES) or str(e).startswith(_WORDS) for e in chain):
            raise CorruptCheckpointError(f"checkpoint {step} is damaged: {reason}") from error
        raise RunError(f"checkpoint {step} can't be restored: {reason}; nothing was changed") from error
