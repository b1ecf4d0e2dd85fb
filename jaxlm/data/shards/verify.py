"""Compares the files of a data directory with the sha256s of its manifest, and knows which file is being read."""

import contextlib
import hashlib
import logging
import os
import pathlib
import threading
import time
import typing
from collections.abc import Callable, Iterable, Mapping

from jaxlm.config import ConfigError, RunError
from jaxlm.data.shards.manifest import MANIFEST, PARENT
from jaxlm.host import files

FIRST_READ_BYTES = 256 << 20  # a file above this is not hashed before its first record is given out
FIRST_READ_SECONDS = 20.0  # hashing delays the first batches by about this much in all; after that, records go first
BACKGROUND_BYTES_PER_SECOND = 200e6
RETRY_SECONDS = (0.5, 2.0)  # the pauses after the first and the second failure to read a file
_CHUNK = 4 << 20

T = typing.TypeVar("T")
Entry = Mapping[str, object]  # a file in the manifest: `file`, `size`, `sha256`


class DamagedData(ConfigError):
    """A file of the data differs from the manifest. Running again does not help: the file must be replaced (exit code 2)."""


def mend(root: pathlib.Path) -> str:
    """Returns what to do about a damaged file of the data directory `root`, as the end of a sentence."""
    if PARENT in files.json_there(root / MANIFEST):
        again = f"{root} and make it again: jaxlm tokenize its parent's folder --without=LIST (its without.jsonl)"
    else:
        again = f"{root / MANIFEST} and run the same command, which builds the same bytes again"
    return f"copy it again from where the data was built, or delete {again}"


def file_sha256(path: str | os.PathLike) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


class Verifier:
    """Verifies each file of one data directory once. Thread-safe."""

    def __init__(self, root: pathlib.Path):
        self._root = root
        self.damage: DamagedData | None = None
        self._sound: set[object] = set()
        self._locks: dict[object, threading.Lock] = {}
        self._spent = 0.0
        self._reads: dict[int, tuple[str, float]] = {}  # thread -> the file that it reads, since when
        self._stop = threading.Event()

    def read(self, entry: Entry, what: str, act: Callable[[], T]) -> T:
        """Calls `act`, which reads `what` of a file, up to three times, since networks have hiccups; returns its result.

        Raises DamagedData if the file differs from the manifest; RunError if reading fails though the file is sound, or
        can't be read at all.
        """
        thread, path = threading.get_ident(), str(self._root / str(entry["file"]))
        self._reads[thread] = path, time.monotonic()
        try:
            for pause in (*RETRY_SECONDS, None):
                try:
                    return act()
                except ConfigError:
                    raise
                except Exception as e:
                    error = e
                with contextlib.suppress(OSError):
                    self.check(entry)
                problem = f"cannot read {what} of {path}: {error}"
                if pause is None:
                    raise RunError(f"{problem}; check the disk or network") from error
                logging.warning("%s; trying again", problem)
                time.sleep(pause)
        finally:
            self._reads.pop(thread, None)

    def oldest_read(self) -> str:
        """Returns the file whose read has lasted longest, and for how long; "" if none is being read."""
        path, since = min([*self._reads.values()], key=lambda read: read[1], default=("", 0.0))
        return f"{path}, for {time.monotonic() - since:.1f} s" if path else ""

    def check(self, entry: Entry) -> None:
        """Hashes a file. Raises DamagedData if it differs from the manifest, OSError if it can't be read."""
        if file_sha256(self._root / str(entry["file"])) != entry["sha256"]:
            raise self.damaged(entry)
        self._sound.add(entry["file"])

    def damaged(self, entry: Entry, why: str = "its sha256 is not that in the manifest") -> DamagedData:
        return DamagedData(f"{self._root / str(entry['file'])} is damaged ({why}): {mend(self._root)}")

    def content(self, entry: Entry) -> bytes:
        """Returns the bytes of a small file. Raises DamagedData if they differ from the manifest, RunError as `read` does."""
        content = self.read(entry, "the content", (self._root / str(entry["file"])).read_bytes)
        if hashlib.sha256(content).hexdigest() != entry["sha256"]:
            raise self.damaged(entry)
        return content

    def first_read(self, entry: Entry, *, always: bool = False) -> None:
        """Hashes a file, once, before its first record is used. Raises DamagedData, OSError.

        Leaves files above FIRST_READ_BYTES, and all after FIRST_READ_SECONDS, to the background, unless `always`: the
        first batch has rows from every shard, and would wait until a whole large corpus is hashed.
        """
        name = entry["file"]
        late = entry["size"] > FIRST_READ_BYTES or self._spent > FIRST_READ_SECONDS
        if name in self._sound or (late and not always):
            return
        with self._locks.setdefault(name, threading.Lock()):
            if name in self._sound:
                return
            start = time.monotonic()
            self.check(entry)
            self._spent += time.monotonic() - start

    def begin(self, entries: Iterable[Entry]) -> None:
        """Verifies files in a daemon thread, slowly; sets `damage`. Skips files that can't be read: their readers raise."""
        self.end()
        self._stop = threading.Event()
        job = (list(entries), self._stop)
        threading.Thread(target=self._background, args=job, name="verify-data", daemon=True).start()

    def end(self) -> None:
        self._stop.set()

    def _background(self, entries: list[Entry], stop: threading.Event) -> None:
        for entry in entries:
            if stop.is_set():
                return
            if entry["file"] in self._sound:
                continue
            with contextlib.suppress(OSError):
                sha256 = self._hash_slowly(entry, stop)
                if sha256 == entry["sha256"]:
                    self._sound.add(entry["file"])
                elif sha256:
                    self.damage = self.damaged(entry)
                    return

    def _hash_slowly(self, entry: Entry, stop: threading.Event) -> str:
        """Returns the sha256 of a file; "" if `stop` is set."""
        digest = hashlib.sha256()
        with open(self._root / str(entry["file"]), "rb", buffering=0) as file:
            while chunk := file.read(_CHUNK):
                start = time.monotonic()
                digest.update(chunk)
                left = len(chunk) / BACKGROUND_BYTES_PER_SECOND - (time.monotonic() - start)
                if stop.wait(max(0.0, left)):
                    return ""
        return digest.hexdigest()
