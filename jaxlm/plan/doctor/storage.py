"""Measures storage by writing and reading, since quotas and statvfs lie, and some disks garble what they write.

Storage is accessed in a child process, which is abandoned if it hangs. This module imports neither JAX nor Grain.
"""

import contextlib
import errno
import hashlib
import io
import itertools
import os
import pathlib
import random
import shutil
import signal
import sys
import time
import typing
from collections.abc import Callable, Iterator

import numpy as np
from fsspec.implementations.local import LocalFileSystem

from jaxlm.config import CheckpointConfig
from jaxlm.host import files
from jaxlm.host.child import Child, Died
from jaxlm.host.console import duration, size
from jaxlm.host.redact import redact_url
from jaxlm.plan.doctor.findings import FAIL, OK, WARN, Finding, words
from jaxlm.run.checkpoints import remote

CAP_BYTES, CAP_S = 4e9, 20.0  # the most for a trial of writing and reading
REMOTE_BYTES = 256e6  # of a trial at a mirror that is a URL
ANSWER_S = 30.0  # after which storage counts as hung
_CHUNK = 16 << 20  # written and flushed at a time, so that slow storage is noticed in time
_PREFIX = ".jaxlm-doctor-"


def apart(task: str, place: str, *args: typing.Any, seconds: float = ANSWER_S) -> dict:
    """Runs `task` of this module in a child process; returns its result. Raises NoAnswer if it hangs, OSError if it fails."""
    trial = Child(f"{__name__}:work", end_by=signal.SIGTERM)  # it removes its file once the storage answers
    try:
        trial.send((task, (place, *args)), seconds)
        answer = trial.receive(seconds)
    except TimeoutError:
        mend = "mount it anew, or take another place"
        raise files.NoAnswer(f"no answer in {seconds:g} s from {redact_url(place) or '.'}; {mend}") from None
    except Died as death:
        raise OSError(f"the trial died (exit code {death.code}): {death.said[-200:]}") from None
    finally:
        trial.end()
    if "error" in answer:
        raise OSError(answer["error"])
    return answer


def disk(
    workdir: str, checkpoint_bytes: int, config: CheckpointConfig, kept: int, seconds: float = ANSWER_S
) -> list[Finding]:
    """Returns findings on the disk of the run's folder: speed, correctness, and the room for `kept` checkpoints."""
    trial = apart("try_place", workdir, min(checkpoint_bytes, CAP_BYTES), CAP_S, seconds=seconds)
    speed = _speed("disk", trial, checkpoint_bytes, "take another config.workdir")
    need, held, free = checkpoint_bytes * kept + config.reserve_mb * 1e6, trial["checkpoint_bytes"], trial["free_bytes"]
    figures = {"need_bytes": need, "there_bytes": held, "free_bytes": free}
    text = (
        f"{kept} checkpoints of {size(checkpoint_bytes)} and checkpoint.reserve_mb need {size(need)}"
        f"{f', of which the checkpoints that the run has already take {size(held)}' if held else ''}; "
        f"{size(free)} are free in {trial['folder']}"
    )
    if free < need - held:
        every = " or raise keep_every" if config.keep_every else ""
        mend = f"free some, or lower checkpoint.keep_last or keep_best{every}"
        return [speed, Finding("room", FAIL, f"{text}: {mend}", figures)]
    tight = free < 1.2 * (need - held)
    return [speed, Finding("room", WARN if tight else OK, text + ": little is left for logs and data" * tight, figures)]


def mirror(url: str, checkpoint_bytes: int, timeout_s: float, seconds: float = ANSWER_S) -> Finding:
    """Returns a finding on the mirror: a file is written there, read back, compared and removed."""
    cap = REMOTE_BYTES if "://" in url else CAP_BYTES
    trial = apart("try_place", url, min(checkpoint_bytes, cap), CAP_S, seconds=seconds)
    finding = _speed("mirror", trial, checkpoint_bytes, "fix config.checkpoint.mirror")
    takes = checkpoint_bytes * (1 / trial["write"] + 1 / trial["read"]) if finding.verdict == OK else 0.0
    if takes <= timeout_s:
        return finding
    mend = f"raise checkpoint.mirror_timeout_s={timeout_s:g}"
    return Finding("mirror", FAIL, f"a copy takes about {_seconds(takes)} by {finding.text}; {mend}", trial)


def data(folder: str, seconds: float = ANSWER_S) -> Finding:
    """Returns a finding on the data directory: how fast its files read, and whether their sha256 are the manifest's."""
    trial = apart("read_data", folder, CAP_BYTES, CAP_S / 2, seconds=seconds)
    if not trial["there"]:
        return Finding("data", OK, f"no data in {folder} yet: the first start makes it")
    if trial["damaged"]:
        name, problem = trial["damaged"]
        text = f"{folder}/{name} {problem}: copy it again, or delete {folder} and make it anew"
        return Finding("data", FAIL, text, trial)
    checked = f"{trial['checked']} of {trial['files']} files compared with their sha256"
    return Finding("data", OK, f"{folder} reads {size(trial['read'])}/s; {checked}", trial)


def _speed(name: str, trial: dict, checkpoint_bytes: int, mend: str) -> Finding:
    """Returns the finding on one trial of writing and reading."""
    folder = trial["folder"]
    if trial["problem"]:
        full = trial["errno"] in (errno.ENOSPC, errno.EDQUOT)
        mend = f"one checkpoint takes {size(checkpoint_bytes)}: free some room" if full else mend
        return Finding(name, FAIL, f"{folder}: {trial['problem']} after {size(trial['bytes'])}; {mend}", trial)
    if trial["garbled"]:
        pieces = f"{trial['garbled']} of {trial['chunks']} pieces read back differ from what was written"
        return Finding(name, FAIL, f"{folder}: {pieces}; {mend}", trial)
    save_s = checkpoint_bytes / trial["write"]
    text = (
        f"{folder} writes {size(trial['write'])}/s and reads {size(trial['read'])}/s ({size(trial['bytes'])} tried, read back "
        f"equal): a checkpoint of {size(checkpoint_bytes)} takes about {_seconds(save_s)}"
    )
    return Finding(name, OK, text, trial | {"save_s": save_s})


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else duration(seconds)


# What follows runs in the child process.


def work(requests: Iterator[tuple[str, tuple]], tell: Callable[[dict], None]) -> None:
    """Answers the first request: the name of a function of this module, and its arguments."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # runs `finally`, which removes the file of the trial
    task, args = next(requests)
    try:
        tell({"try_place": try_place, "read_data": read_data}[task](*args))
    except Exception as error:  # fsspec's stores raise their own classes
        tell({"error": words(error)})


def try_place(place: str, most_bytes: float, most_s: float) -> dict:
    """Writes a file in a folder or at a URL, reads it back past the page cache, and removes it. Returns the figures."""
    try:
        system, root = remote.file_system(place)
    except (ImportError, ValueError) as error:  # a package is missing, or the protocol is unknown
        raise OSError(f"config.checkpoint.mirror={redact_url(place)}: {words(error)}") from error
    if isinstance(system, LocalFileSystem):
        held = sum(path.stat().st_size for path in pathlib.Path(root).glob("checkpoints/**/*") if path.is_file())
        folder = next(path for path in (pathlib.Path(root), *pathlib.Path(root).parents) if path.exists())
        for old in folder.glob(f"{_PREFIX}*"):  # of a trial that was killed
            if not os.path.exists(f"/proc/{old.name.removeprefix(_PREFIX)}"):
                old.unlink(missing_ok=True)
        about = {"folder": str(folder), "free_bytes": shutil.disk_usage(folder).free, "checkpoint_bytes": held}
        root = str(folder)
    else:
        system.makedirs(root, exist_ok=True)  # does nothing where a store has no folders
        about = {"folder": f"{place.partition('://')[0]}://{root.partition('/')[0]}"}
    file = f"{root.rstrip('/')}/{_PREFIX}{os.getpid()}"
    try:
        return about | _trial(lambda mode: system.open(file, mode), most_bytes, most_s)
    finally:
        with contextlib.suppress(Exception):
            system.rm_file(file)


def _trial(open_file: Callable[[str], typing.IO[bytes]], most_bytes: float, most_s: float) -> dict:
    """Writes random bytes, flushes them to the device, drops them from the page cache, reads them and compares sha256."""
    trial = {"write": 0.0, "read": 0.0, "bytes": 0, "chunks": 0, "garbled": 0, "problem": "", "errno": 0}
    digests, write_s, read, read_s = [], 0.0, 0, 0.0
    end = time.monotonic() + most_s / 2
    try:
        with open_file("wb") as out:
            for chunk in _noise(most_bytes):
                digests.append(hashlib.sha256(chunk).digest())
                began = time.monotonic()
                out.write(chunk)
                _sync(out)
                write_s += time.monotonic() - began
                trial["bytes"] += len(chunk)
                if time.monotonic() > end:
                    break
            began = time.monotonic()
        write_s += time.monotonic() - began  # some stores send the data on closing
        trial |= {"write": trial["bytes"] / max(write_s, 1e-9), "chunks": len(digests)}
        end = time.monotonic() + most_s / 2
        with open_file("rb") as file:
            # A file that is too short reads as empty pieces, which count as garbled.
            pieces = itertools.chain(_chunks(file), itertools.repeat((b"", 0.0)))
            for digest, (chunk, seconds) in zip(digests, pieces, strict=False):
                read, read_s = read + len(chunk), read_s + seconds
                trial["garbled"] += hashlib.sha256(chunk).digest() != digest
                if time.monotonic() > end:
                    break
        trial["read"] = read / max(read_s, 1e-9)
    except OSError as error:
        trial |= {"problem": error.strerror or words(error), "errno": error.errno or 0}
    except Exception as error:  # fsspec's file systems raise their own
        trial |= {"problem": words(error)}
    return trial


def _noise(total: float) -> Iterator[bytes]:
    """Yields `total` bytes of noise in chunks, no two alike: nothing to compress or to deduplicate."""
    rng, left = np.random.default_rng(), max(1, int(total))
    noise = rng.integers(0, 2**64, _CHUNK // 8, np.uint64)
    while left > 0:
        # New noise would take longer than a disk.
        chunk = (noise ^ rng.integers(0, 2**64, 1, np.uint64)).tobytes()[:left]
        left -= len(chunk)
        yield chunk


def _sync(out: typing.IO[bytes]) -> None:
    """Flushes what was written to the device; fsspec's remote files have no descriptor for that."""
    out.flush()
    with contextlib.suppress(AttributeError, io.UnsupportedOperation):
        os.fdatasync(out.fileno())


def _chunks(file: typing.IO[bytes]) -> Iterator[tuple[bytes, float]]:
    """Yields pieces of a file from the device, past the page cache, each with the seconds that it took."""
    with contextlib.suppress(AttributeError, OSError):  # tmpfs has no device, and keeps its pages
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    while True:
        began = time.monotonic()
        if not (chunk := file.read(_CHUNK)):
            return
        yield chunk, time.monotonic() - began


def read_data(folder: str, most_bytes: float, most_s: float) -> dict:
    """Reads files of a data directory, in random order, and compares them with the manifest, up to a limit of time and bytes.

    `damaged` is None or (name of the first bad file, what is wrong).
    """
    root, end = pathlib.Path(folder), time.monotonic() + most_s
    trial = {"there": True, "files": 0, "checked": 0, "read": 0.0, "damaged": None}
    try:
        entries = list(_entries(files.json_of((root / "manifest.json").read_bytes())))
    except (FileNotFoundError, NotADirectoryError):
        return trial | {"there": False}
    except ValueError as error:
        return trial | {"damaged": ("manifest.json", f"is damaged ({words(error)})")}
    trial["files"], read, read_s = len(entries), 0, 0.0
    for entry in random.sample(entries, len(entries)):
        digest = hashlib.sha256()
        try:
            with open(root / entry["file"], "rb") as file:
                for chunk, seconds in _chunks(file):
                    digest.update(chunk)
                    read, read_s = read + len(chunk), read_s + seconds
                    trial["read"], spent = read / max(read_s, 1e-9), time.monotonic() > end or read > most_bytes
                    if spent and len(chunk) == _CHUNK:
                        return trial
        except OSError as error:
            return trial | {"damaged": (entry["file"], f"can't be read ({error.strerror})")}
        if digest.hexdigest() != entry["sha256"]:
            return trial | {"damaged": (entry["file"], "is not what the manifest says (sha256)")}
        trial["checked"] += 1
        if time.monotonic() > end or read > most_bytes:
            break
    return trial


def _entries(value: typing.Any) -> Iterator[dict]:
    """Yields each part of a manifest that names a file and its sha256."""
    if isinstance(value, dict) and isinstance(value.get("file"), str) and isinstance(value.get("sha256"), str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _entries(part)
