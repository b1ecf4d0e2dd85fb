"""Shows how many documents the tasks of a phase have read, while they run in other processes or on other machines."""

import contextlib
import pathlib
import time
import typing
from collections.abc import Iterable, Iterator

_EVERY_S = 1.0

T = typing.TypeVar("T")


def each(documents: Iterable[T], folder: pathlib.Path, phase: str, task: int) -> Iterator[T]:
    """Yields the documents of a task, and writes their number into a file for `total`, once a second."""
    path, number, due = folder / "tasks" / phase / f"count-{task:05d}", 0, 0.0
    for document in documents:
        yield document
        number += 1
        if time.monotonic() >= due:
            _write(path, number)
            due = time.monotonic() + _EVERY_S
    _write(path, number)


def _write(path: pathlib.Path, number: int) -> None:
    with contextlib.suppress(OSError):  # a count is not worth a task
        path.write_text(str(number))


def total(place: pathlib.Path) -> int:
    """Returns how many documents the tasks of the phase in this folder have read so far."""
    found = 0
    for path in place.glob("count-*"):
        with contextlib.suppress(OSError, ValueError):  # it is being written
            found += int(path.read_text())
    return found
