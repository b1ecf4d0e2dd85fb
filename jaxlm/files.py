"""Writes files whole or not at all, locks folders so that each has only one writer, and hides the secrets in URLs."""

import fcntl
import os
import pathlib
import typing
import urllib.parse

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
    flush_folder(path.parent)


def flush_folder(folder: pathlib.Path) -> None:
    """Flushes a folder's list of names to disk: without it a crash of the machine may undo a rename."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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


def redact_url(url: str) -> str:
    """Returns the URL without its secrets: `***` instead of user and password, and of each value of its query.

    A text that is no URL, as a path, comes back as it is.
    """
    if "://" not in url:
        return url
    try:
        parts = urllib.parse.urlsplit(url)
    except ValueError:  # brackets that are no IPv6 address
        return url.split("://", 1)[0] + "://***"
    netloc = "***@" + parts.netloc.rpartition("@")[2] if "@" in parts.netloc else parts.netloc
    query = "&".join(
        f"{pair.partition('=')[0]}=***" if "=" in pair else "***" for pair in parts.query.split("&") if pair
    )
    return urllib.parse.urlunsplit((parts.scheme, netloc, parts.path, query, ""))
