"""Reads and writes the mirror's files in a folder or at a URL: tries again, flushes to disk, reads past the page cache."""

import contextlib
import errno
import hashlib
import itertools
import json
import os
import pathlib
import random
import shutil
import time
import typing
from collections.abc import Callable, Iterable, Iterator

import fsspec
from fsspec.implementations.local import LocalFileSystem

from jaxlm.host import files
from jaxlm.run.checkpoints.damage import FULL

_CHUNK = 8 * 2**20  # bytes of one file in memory
_ATTEMPTS = 8  # with the pauses between them half a minute
_LONGEST_PAUSE_S = 30.0
_ABSENT = (FileNotFoundError, NotADirectoryError)
# Errors that no second attempt fixes: full, read-only, not allowed, not a folder.
_LASTING = {*FULL, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG}

T = typing.TypeVar("T")
Sum = list  # of a file: [bytes, sha256]


class Remote:
    """The files under one folder or fsspec URL. Names are relative to it, with `/`.

    Each method tries again after an error that may pass, with pauses that double from `pause_s` on. A file that is absent
    raises FileNotFoundError at once.
    """

    def __init__(self, url: str, pause_s: float = 0.25):
        self._pause_s = pause_s
        # Listings are not cached: files that others wrote, or that failed half-way, must be seen.
        self._fs, root = file_system(url, use_listings_cache=False, skip_instance_cache=True)
        self._root = root.rstrip("/")
        self._local = isinstance(self._fs, LocalFileSystem)

    def put(self, source: pathlib.Path, name: str) -> None:
        """Copies a local file to `name`."""

        def copy() -> None:
            path = self._place(name)
            self._fs.put_file(str(source), path)
            if self._local:
                with open(path, "rb+") as file:
                    os.fsync(file.fileno())

        self._patiently(copy)

    def write(self, name: str, content: bytes) -> None:
        """Writes a small file, whole or not at all."""

        def write() -> None:
            path = self._place(name)
            if self._local:
                files.write_atomically(pathlib.Path(path), content)
            else:
                self._fs.pipe_file(path, content)

        self._patiently(write)

    def read(self, name: str) -> bytes:
        return b"".join(self._patiently(lambda: list(self._chunks(name))))

    def measure(self, name: str) -> Sum:
        """Returns the size and sha256 of a file, read from the storage, not from the page cache."""
        return self._patiently(lambda: sum_of(self._chunks(name)))

    def fetch(self, name: str, target: pathlib.Path) -> Sum:
        """Copies a file to the new local file `target`, flushed to disk. Returns the number and sha256 of the bytes read."""

        def copy() -> Sum:
            with open(target, "wb") as out:
                measured = sum_of(self._chunks(name), out)
                out.flush()
                os.fsync(out.fileno())
            return measured

        target.parent.mkdir(parents=True, exist_ok=True)
        return self._patiently(copy)

    def names(self, folder: str) -> list[str]:
        """Returns the names of all files under a folder, sorted; [] if there is no such folder."""
        with contextlib.suppress(*_ABSENT):
            paths = self._patiently(lambda: self._fs.find(self._path(folder)))
            return sorted(path[len(self._root) + 1 :] for path in paths)
        return []

    def folders(self, folder: str) -> list[str]:
        """Returns the names of the folders in `folder`, without its path; [] if there is no such folder."""
        with contextlib.suppress(*_ABSENT):
            entries = self._patiently(lambda: self._fs.ls(self._path(folder), detail=True))
            return sorted(pathlib.PurePath(entry["name"]).name for entry in entries if entry["type"] == "directory")
        return []

    def delete(self, names: Iterable[str]) -> None:
        """Deletes files, one after the other, in this order. An absent file is no error."""
        for name in names:
            with contextlib.suppress(*_ABSENT):
                self._patiently(lambda name=name: self._fs.rm_file(self._path(name)))

    def prune(self, folder: str) -> None:
        """Deletes a folder whose files are deleted; object stores have no folders."""
        if self._local:
            shutil.rmtree(self._path(folder), ignore_errors=True)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _place(self, name: str) -> str:
        """Returns the path of a file to write; makes its folder, if it is local: object stores have no folders."""
        path = self._path(name)
        if self._local:
            os.makedirs(os.path.dirname(path), exist_ok=True)
        return path

    def _chunks(self, name: str) -> Iterator[bytes]:
        path = self._path(name)
        with self._fs.open(path, "rb", **({} if self._local else {"block_size": _CHUNK})) as file:
            if self._local:  # Without this the page cache would be read, not the disk.
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            yield from iter(lambda: file.read(_CHUNK), b"")

    def _patiently(self, do: Callable[[], T]) -> T:
        for attempt in itertools.count(1):
            try:
                return do()
            except Exception as error:
                lasting = isinstance(error, (*_ABSENT, PermissionError)) or getattr(error, "errno", None) in _LASTING
                if lasting or attempt == _ATTEMPTS:
                    raise
            pause_s = min(self._pause_s * 2 ** (attempt - 1), _LONGEST_PAUSE_S)
            time.sleep(pause_s * random.uniform(0.5, 1.0))  # so that not all files are retried at once


def file_system(url: str, **options: bool) -> tuple[fsspec.AbstractFileSystem, str]:
    """Returns the file system of a folder or an fsspec URL, and the path on it. A folder may be called `file:x` or `a::b`."""
    if "://" in url:
        return fsspec.core.url_to_fs(url, **options)
    return LocalFileSystem(**options), os.path.abspath(os.path.expanduser(url))


def measure(path: pathlib.Path) -> Sum:
    with open(path, "rb") as file:
        return sum_of(iter(lambda: file.read(_CHUNK), b""))


def sum_of(chunks: Iterable[bytes], out: typing.BinaryIO | None = None) -> Sum:
    size, digest = 0, hashlib.sha256()
    for chunk in chunks:
        size += len(chunk)
        digest.update(chunk)
        if out:
            out.write(chunk)
    return [size, digest.hexdigest()]


def seal(record: dict) -> bytes:
    """Returns a record as JSON with its sha256, so that any change is noticed."""
    sealed = {"record": record, "sha256": _sha256(record)}
    return (json.dumps(sealed, indent=1, sort_keys=True) + "\n").encode()


def unseal(content: bytes) -> dict | None:
    """Returns the record that `seal` wrote; None if the bytes were changed."""
    with contextlib.suppress(*files.MANGLED):
        sealed = files.json_of(content)
        if sealed["sha256"] == _sha256(sealed["record"]):
            return sealed["record"]
    return None


def _sha256(record: object) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
