"""Appends records to a file and never raises: what the disk does not take waits in memory until there is room."""

import collections
import contextlib
import errno
import os
import pathlib
from collections.abc import Callable

from jaxlm import console

KEEP = 10_000  # records that wait in memory at most
_FULL = (errno.ENOSPC, errno.EDQUOT)


class Appender:
    """Appends records to a file, each whole or not at all.

    A record that can't be written waits, and is tried again at every later call. If more than `keep` wait, the oldest are
    dropped. One line says when it begins, and one when it is over.

    Args:
      path: the file; it and its folder are made when the first record is written.
      on_full: called when the disk becomes full, to make room. The record is then tried once more.
      keep: the number of records that may wait.
    """

    def __init__(self, path: pathlib.Path, on_full: Callable[[], None] | None = None, keep: int = KEEP):
        self._path, self._on_full, self._keep = path, on_full, keep
        self._waiting: collections.deque[bytes] = collections.deque()
        self._descriptor, self._size = -1, -1  # _size: where the last whole record ends; -1 = wherever the file ends
        self._failing, self._dropped = "", 0

    def append(self, record: bytes) -> None:
        """Writes a record, and before it those that wait. Does not raise if it can't."""
        if len(self._waiting) >= self._keep:
            self._waiting.popleft()
            self._dropped += 1
        self._waiting.append(record)
        self._write()

    def close(self) -> None:
        """Writes what still waits, flushes it to disk and closes the file. Says what was lost."""
        self._write()
        try:
            if self._descriptor >= 0:
                os.fsync(self._descriptor)
        except OSError as error:
            console.say(f"{self._path} may lack its last lines: {error.strerror}")
        self._shut()
        if self._waiting:
            console.say(f"{self._path} lacks its last {len(self._waiting):,} records: {self._failing}")
            self._waiting.clear()

    def _write(self) -> None:
        error = self._attempt()
        if error and error.errno in _FULL and self._on_full and not self._failing:
            with contextlib.suppress(OSError):
                self._on_full()
            error = self._attempt()
        if error and not self._failing:
            self._failing = error.strerror or str(error)
            console.say(f"{self._path} can't be written ({self._failing}): it goes on once it can, and training now")
        elif not error and self._failing:
            lost = f"{self._dropped:,} records were lost" if self._dropped else "nothing was lost"
            console.say(f"{self._path} is written again; {lost}")
            self._failing, self._dropped = "", 0

    def _attempt(self) -> OSError | None:
        """Writes all records that wait, until one fails; returns why."""
        try:
            if self._waiting and self._descriptor < 0:
                self._open()
            while self._waiting:
                left = memoryview(self._waiting[0])
                while left:
                    left = left[os.write(self._descriptor, left) :]
                self._size += len(self._waiting.popleft())
        except OSError as error:
            self._cut()  # now, for readers; if this fails, `_open` does it before anything is appended
            self._shut()  # a file handle that failed once may never work again (ESTALE)
            return error
        return None

    def _open(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        size = os.fstat(self._descriptor).st_size
        if 0 <= self._size < size:
            os.ftruncate(self._descriptor, self._size)
        else:
            self._size = size

    def _cut(self) -> None:
        """Takes away the part of a record that was written."""
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, self._size)

    def _shut(self) -> None:
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
        self._descriptor = -1
