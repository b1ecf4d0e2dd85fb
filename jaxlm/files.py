"""Writes files whole or not at all, and locks folders so that each has only one writer."""

import fcntl
import os
import pathlib
import typing

from jaxlm.config import ConfigError


def write_atomically(path: pathlib.Path, content: bytes) -> None:
    """Writes a file to disk so that a crash leaves either the old content or the new."""
    tmp = path.with_name(path.name + ".tmp")
    tmp.write_bytes(content)
    settle(tmp, path)


def settle(tmp: pathlib.Path, path: pathlib.Path) -> None:
    """Flushes the closed file `tmp` to disk, renames it to `path`, and flushes the folder."""
    with open(tmp, "rb+") as f:
        os.fsync(f.fileno())
    os.replace(tmp, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def lock(folder: pathlib.Path, does: str, key: str) -> typing.IO[str]:
    """Locks a folder against other processes, until the returned file is closed: by `with`, by dropping it, or at exit.

    Args:
      folder: an existing folder; the lock is a file `.lock` in it.
      does: what the process that holds the lock does: "is writing", "trains in".
      key: the config key that names the folder.

    Raises:
      ConfigError: another process holds the lock.
    """
    file = open(folder / ".lock", "w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ConfigError(f"another process {does} {folder}: wait for it, or give another config.{key}") from None
    except OSError:
        pass  # some network file systems have no locks; a single writer is safe without
    return file
