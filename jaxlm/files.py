"""Files that are there whole or not at all, and folders with one writer."""

import contextlib
import fcntl
import os
import pathlib
from collections.abc import Iterator

from jaxlm.config import ConfigError


def write_atomically(path: pathlib.Path, content: bytes) -> None:
    """Writes a file so that a crash leaves either the old one or the new one, on disk."""
    tmp = path.with_name(path.name + ".tmp")
    tmp.write_bytes(content)
    settle(tmp, path)


def settle(tmp: pathlib.Path, path: pathlib.Path) -> None:
    """Flushes a closed file to disk, gives it its final name, and flushes that too."""
    with open(tmp, "rb+") as f:
        os.fsync(f.fileno())
    os.replace(tmp, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextlib.contextmanager
def lock(root: pathlib.Path) -> Iterator[None]:
    """Keeps two processes from writing the same folder; the system lets go when a process dies."""
    with open(root / ".lock", "w") as f:
        try:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another process is writing {root}; wait for it or set another data.dir") from None
        except OSError:
            pass  # some network file systems have no locks; a single writer is safe without
        yield
