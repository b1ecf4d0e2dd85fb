"""Copies a program's messages into a file, with the time, and without secrets, colour and control characters.

A thread writes, so that a hanging disk delays nothing. Unwritten lines wait in memory.
"""

import collections
import contextlib
import os
import pathlib
import queue
import re
import threading
import time

from jaxlm.host.redact import redact

_KEEP = 10_000  # lines that wait at most
_BEFORE = 1_000  # lines that are kept until the file is known
_CLOSE_S = 2.0  # for how long the end of the program waits for the disk

_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")

Said = tuple[float, str]  # when, and what


class _File:
    def __init__(self, path: pathlib.Path):
        self.path = path
        self._place: os.stat_result | None = None
        # SimpleQueue: a signal's handler may call `put` during a `put`.
        self._queue: queue.SimpleQueue[Said | threading.Event] = queue.SimpleQueue()
        self._lost = 0
        threading.Thread(target=self._work, name="transcript", daemon=True).start()

    def put(self, said: Said) -> None:
        if self._queue.qsize() < _KEEP:
            self._queue.put(said)
        else:
            self._lost += 1

    def close(self) -> None:
        written = threading.Event()
        self._queue.put(written)
        written.wait(_CLOSE_S)

    def _work(self) -> None:
        waiting: collections.deque[bytes] = collections.deque()
        while True:
            said = self._queue.get()
            if not isinstance(said, threading.Event):
                if len(waiting) >= _KEEP:
                    waiting.popleft()
                    self._lost += 1
                waiting.append(_line(*said))
            with contextlib.suppress(OSError):
                self._append(waiting)
            if isinstance(said, threading.Event):
                said.set()
                return

    def _append(self, waiting: collections.deque[bytes]) -> None:
        """Writes the waiting lines. Opens the file each time: a descriptor that failed once may never work again (ESTALE)."""
        place = os.stat(self.path.parent)
        self._place = self._place or place
        if not os.path.samestat(place, self._place):
            return  # the folder was moved, and another is in its place
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            while waiting:
                if self._lost:
                    waiting.appendleft(_line(time.time(), f"[{self._lost:,} lines are missing here]"))
                    self._lost = 0
                waiting[0] = waiting[0][os.write(descriptor, waiting[0]) :]
                if not waiting[0]:
                    waiting.popleft()
        finally:
            os.close(descriptor)


def plain(text: str) -> str:
    return _CONTROL.sub("", text)


def _line(when: float, text: str) -> bytes:
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(when))
    lines = plain(redact(text)).splitlines() or [""]
    return "".join(f"{stamp}  {line}".rstrip() + "\n" for line in lines).encode("utf-8", "backslashreplace")


_before: collections.deque[Said] = collections.deque(maxlen=_BEFORE)
_file: _File | None = None


def note(text: str) -> None:
    """Stores a message: in the file, or in memory until there is one."""
    said = (time.time(), text)
    if _file:
        _file.put(said)
    else:
        _before.append(said)


def begin(path: pathlib.Path, head: str) -> None:
    """Copies all messages into this file: first `head`, then the earlier messages, then the later ones."""
    global _file
    if _file:
        _file.close()
    begun = _File(path)
    begun.put((time.time(), head))
    while _before:
        begun.put(_before.popleft())
    _file = begun


def end() -> None:
    """Ends the file, and drops the stored messages. Waits at most two seconds for the disk."""
    global _file
    if _file:
        _file.close()
    _file = None
    _before.clear()
