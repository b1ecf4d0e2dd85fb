"""Measures storage by writing and reading, since quotas and statvfs lie, and some disks garble what they write.

Storage that hangs can make a process unkillable. So what touches storage runs in a process of its own, which is left
behind if it does not answer: `apart` starts it, and it runs this module. It imports neither JAX nor Grain.
"""

import contextlib
import errno
import hashlib
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time
import typing
from collections.abc import Iterator

import numpy as np

from jaxlm import files
from jaxlm.config import CheckpointConfig
from jaxlm.console import duration, size
from jaxlm.redact import redact_url
from jaxlm.train.doctor.findings import FAIL, OK, WARN, Finding, no_answer, words

CAP_BYTES, CAP_S = 4e9, 20.0  # of a trial of writing and reading; more of neither
REMOTE_BYTES = 256e6  # of a trial at a mirror that is a URL
ANSWER_S = 30.0  # after which storage counts as hung
_CHUNK = 16 << 20  # written and flushed at a time, so that slow storage is noticed in time
_PREFIX = ".jaxlm-doctor-"


def apart(task: str, *args: typing.Any, seconds: float = ANSWER_S) -> dict:
    """Returns what the function `task` of this module returns, called with these JSON values in a process of its own.

    Raises:
      NoAnswer: it does not answer in `seconds`. The process is asked to end, and is not waited for.
      OSError: the function raised one, or the process died.
    """
    # By standard input: all users of a machine see command lines, and URLs may hold secrets.
    process = subprocess.Popen(
        [sys.executable, "-m", __name__, task],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, problem = process.communicate(json.dumps(args), timeout=seconds)
    except subprocess.TimeoutExpired:
        process.terminate()  # it removes its file once the storage answers
        raise files.NoAnswer(f"no answer in {seconds:g} s") from None
    except BaseException:
        process.terminate()
        raise
    try:
        answer = json.loads(out)
    except ValueError:
        raise OSError(f"the trial died (exit code {process.returncode}): {problem.strip()[-200:]}") from None
    if "error" in answer:
        raise OSError(*answer["error"])
    return answer


def disk(
    workdir: str, checkpoint_bytes: int, config: CheckpointConfig, kept: int, seconds: float = ANSWER_S
) -> list[Finding]:
    """Returns two findings on the disk of the run's folder: its speed and truth, and whether all checkpoints have room.

    Args:
      workdir: the run's folder; if it does not exist, the nearest folder above it is tried.
      checkpoint_bytes: the bytes of one checkpoint.
      config: the section `checkpoint` of the config.
      kept: how many checkpoints will stay, at most, the one that is being written included.
      seconds: the most that the trial may take.
    """
    try:
        found = apart("try_folder", workdir, min(checkpoint_bytes, CAP_BYTES), CAP_S, seconds=seconds)
    except files.NoAnswer as late:
        text = f"{workdir}: {late}: the storage hangs; mount it anew or take another config.workdir"
        return [no_answer("disk", text)]
    speed = _speed("disk", found, checkpoint_bytes, "take another config.workdir")
    need = checkpoint_bytes * kept + config.reserve_mb * 1e6
    left = need - found["checkpoint_bytes"]
    figures = {"need_bytes": need, "there_bytes": found["checkpoint_bytes"], "free_bytes": found["free_bytes"]}
    held = found["checkpoint_bytes"]
    text = (
        f"{kept} checkpoints of {size(checkpoint_bytes)} and checkpoint.reserve_mb need {size(need)}"
        f"{f', of which the checkpoints that the run has already take {size(held)}' if held else ''}; "
        f"{size(found['free_bytes'])} are free in {found['folder']}"
    )
    if found["free_bytes"] < left:
        every = " or raise keep_every" if config.keep_every else ""
        mend = f"free some, or lower checkpoint.keep_last or keep_best{every}"
        return [speed, Finding("room", FAIL, f"{text}: {mend}", figures)]
    tight = found["free_bytes"] < 1.2 * left
    return [speed, Finding("room", WARN if tight else OK, text + ": little is left for logs and data" * tight, figures)]


def mirror(url: str, checkpoint_bytes: int, timeout_s: float, seconds: float = ANSWER_S) -> Finding:
    """Returns a finding on the mirror: a file is written there, read back, compared and removed.

    Args:
      url: a folder, or a URL that fsspec knows.
      checkpoint_bytes: the bytes of one checkpoint.
      timeout_s: the key `checkpoint.mirror_timeout_s`.
      seconds: the most that the trial may take.
    """
    remote = "://" in url
    task, cap = ("try_url", REMOTE_BYTES) if remote else ("try_folder", CAP_BYTES)
    try:
        found = apart(task, url, min(checkpoint_bytes, cap), CAP_S, seconds=seconds)
    except files.NoAnswer as late:
        return no_answer("mirror", f"{late}: the mirror hangs; mend config.checkpoint.mirror")
    finding = _speed("mirror", found, checkpoint_bytes, "mend config.checkpoint.mirror")
    takes = checkpoint_bytes * (1 / found["write"] + 1 / found["read"]) if found["write"] and found["read"] else 0
    if finding.verdict == OK and takes > timeout_s:
        text = (
            f"a copy takes about {_seconds(takes)} by {finding.text}; raise checkpoint.mirror_timeout_s={timeout_s:g}"
        )
        return Finding("mirror", FAIL, text, finding.figures)
    return finding


def data(folder: str, seconds: float = ANSWER_S) -> Finding:
    """Returns a finding on the data directory: how fast its files read, and whether their sha256 are the manifest's."""
    try:
        found = apart("read_data", folder, CAP_BYTES, CAP_S / 2, seconds=seconds)
    except files.NoAnswer as late:
        return no_answer("data", f"{folder}: {late}: the storage hangs; mount it anew or copy the data elsewhere")
    if not found["there"]:
        return Finding("data", OK, f"no data in {folder} yet: the first start makes it")
    if found["damaged"]:
        name, problem = found["damaged"]
        text = f"{folder}/{name} {problem}: copy it again, or delete {folder} and make it anew"
        return Finding("data", FAIL, text, found)
    text = f"{folder} reads {size(found['read'])}/s; {found['checked']} of {found['files']} files compared with their sha256"
    return Finding("data", OK, text, found)


def _speed(name: str, found: dict, checkpoint_bytes: int, mend: str) -> Finding:
    """The finding on one trial of writing and reading."""
    folder = found["folder"]
    if found["problem"]:
        full = found["errno"] in (errno.ENOSPC, errno.EDQUOT)
        mend = f"{size(checkpoint_bytes)} make one checkpoint: free some room" if full else mend
        text = f"{folder}: {found['problem']} after {size(found['bytes'])}; {mend}"
        return Finding(name, FAIL, text, found)
    if found["garbled"]:
        text = (
            f"{folder}: {found['garbled']} of {found['chunks']} pieces read back other than they were written; {mend}"
        )
        return Finding(name, FAIL, text, found)
    save = checkpoint_bytes / found["write"]
    text = (
        f"{folder} writes {size(found['write'])}/s and reads {size(found['read'])}/s ({size(found['bytes'])} tried, read back "
        f"equal): a checkpoint of {size(checkpoint_bytes)} takes about {_seconds(save)}"
    )
    return Finding(name, OK, text, found | {"save_s": save})


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else duration(seconds)


# What follows runs in the process of its own.


def try_folder(path: str, most_bytes: float, most_s: float) -> dict:
    """Writes a file in a folder, reads it back past the page cache, and removes it.

    Returns the folder that was tried (the nearest one that exists), its free bytes, the bytes of checkpoints there, and
    what `_trial` returns.
    """
    asked = folder = pathlib.Path(path).absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    for old in folder.glob(f"{_PREFIX}*"):  # of a trial that was ended half-way
        if not _alive(old.name.removeprefix(_PREFIX)):
            old.unlink(missing_ok=True)
    free = shutil.disk_usage(folder).free
    there = sum(p.stat().st_size for p in asked.glob("checkpoints/**/*") if p.is_file())
    file = folder / f"{_PREFIX}{os.getpid()}"
    try:
        found = _trial(lambda mode: open(file, mode, buffering=0), most_bytes, most_s)
    finally:
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)
    return {"folder": str(folder), "free_bytes": free, "checkpoint_bytes": there, **found}


def try_url(url: str, most_bytes: float, most_s: float) -> dict:
    """Does what `try_folder` does at a URL that fsspec knows. Free bytes are unknown there."""
    import fsspec  # here, because a run without such a mirror needs none of it

    try:
        files, root = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:  # a package is missing, or the protocol is unknown
        raise OSError(f"config.checkpoint.mirror={redact_url(url)}: {words(error)}") from error
    file = f"{root.rstrip('/')}/{_PREFIX}{os.getpid()}"
    try:
        files.makedirs(root, exist_ok=True)  # does nothing where a store has no folders
        found = _trial(lambda mode: files.open(file, mode), most_bytes, most_s)
    finally:
        with contextlib.suppress(Exception):
            files.rm(file)
    return {"folder": f"{url.partition('://')[0]}://{root.partition('/')[0]}", **found}


def _trial(open_file: typing.Callable[[str], typing.IO[bytes]], most_bytes: float, most_s: float) -> dict:
    """Writes random bytes, flushes them to the device, drops them from the page cache, reads them and compares sha256.

    Returns `write` and `read` in bytes a second (of one stream), `bytes` written, `chunks`, how many of them are `garbled`,
    and the `problem` that ended it ("" = none) with its `errno`.
    """
    result = {"write": 0.0, "read": 0.0, "bytes": 0, "chunks": 0, "garbled": 0, "problem": "", "errno": 0}
    end, digests = time.monotonic() + most_s / 2, []
    write_s = read_s = 0.0
    try:
        with open_file("wb") as out:
            for chunk in _chunks(most_bytes):
                digests.append(hashlib.sha256(chunk).digest())
                began = time.monotonic()
                result["bytes"] += _write(out, chunk)
                write_s += time.monotonic() - began
                if time.monotonic() > end:
                    break
            began = time.monotonic()
        write_s += time.monotonic() - began  # closing may be what sends it
        result |= {"write": result["bytes"] / max(write_s, 1e-9), "chunks": len(digests)}
        end = time.monotonic() + most_s / 2
        with open_file("rb") as file:
            _drop_cache(file)
            read, left = 0, result["bytes"]
            for digest in digests:
                began = time.monotonic()
                chunk = _read(file, min(_CHUNK, left - read))
                read_s += time.monotonic() - began
                read += len(chunk)
                result["garbled"] += hashlib.sha256(chunk).digest() != digest
                if time.monotonic() > end:
                    break
        result["read"] = read / max(read_s, 1e-9)
    except OSError as error:
        result |= {"problem": error.strerror or words(error), "errno": error.errno or 0}
    except Exception as error:  # fsspec's file systems raise their own
        result |= {"problem": words(error)}
    return result


def _chunks(total: float) -> Iterator[bytes]:
    """Yields `total` bytes of noise in chunks, no two alike: nothing to compress or to deduplicate."""
    noise = np.random.default_rng().integers(0, 2**64, _CHUNK // 8, np.uint64)
    number, left = 0, max(1, int(total))
    while left > 0:
        chunk = (noise ^ np.uint64(number * 0x9E3779B97F4A7C15 % 2**64)).tobytes()[:left]
        number, left = number + 1, left - len(chunk)
        yield chunk


def _write(out: typing.IO[bytes], chunk: bytes) -> int:
    view = memoryview(chunk)
    while view:
        written = out.write(view)
        if not written:
            raise OSError(errno.EIO, "a write took no bytes")
        view = view[written:]
    if (descriptor := _descriptor(out)) is not None:
        os.fdatasync(descriptor)
    return len(chunk)


def _descriptor(file: typing.IO[bytes]) -> int | None:
    """The number of an open file of the system; None for fsspec's others."""
    try:
        return file.fileno()
    except (AttributeError, OSError):
        return None


def _read(file: typing.IO[bytes], count: int) -> bytes:
    parts = []
    while count > 0 and (part := file.read(count)):
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def _drop_cache(file: typing.IO[bytes]) -> None:
    """Drops a file from the page cache, so that reads come from the device. tmpfs has no device, and keeps it."""
    if (descriptor := _descriptor(file)) is not None:
        with contextlib.suppress(OSError):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def read_data(folder: str, most_bytes: float, most_s: float) -> dict:
    """Reads files of a data directory, in random order, and compares them with the manifest until time or bytes are spent.

    Returns `there` (False without a manifest), `files`, how many were `checked`, `read` in bytes a second, and `damaged`:
    None or (name of the first bad file, what is wrong).
    """
    root = pathlib.Path(folder)
    result = {"there": False, "files": 0, "checked": 0, "read": 0.0, "damaged": None}
    try:
        entries = list(_entries(files.json_of((root / "manifest.json").read_bytes())))
    except (FileNotFoundError, NotADirectoryError):
        return result
    except ValueError as error:
        return result | {"there": True, "damaged": ("manifest.json", f"is damaged ({words(error)})")}
    result |= {"there": True, "files": len(entries)}
    end, done, read_s = time.monotonic() + most_s, 0, 0.0
    for entry in random.sample(entries, len(entries)):
        digest = hashlib.sha256()
        try:
            with open(root / entry["file"], "rb", buffering=0) as file:
                _drop_cache(file)
                while True:
                    began = time.monotonic()
                    chunk = _read(file, _CHUNK)
                    read_s += time.monotonic() - began
                    done += len(chunk)
                    digest.update(chunk)
                    if len(chunk) < _CHUNK or time.monotonic() > end or done > most_bytes:
                        break
        except OSError as error:
            return result | {"damaged": (entry["file"], f"can't be read ({error.strerror})")}
        result["read"] = done / max(read_s, 1e-9)
        if len(chunk) < _CHUNK:  # it was read to its end
            if digest.hexdigest() != entry["sha256"]:
                return result | {"damaged": (entry["file"], "is not what the manifest says (sha256)")}
            result["checked"] += 1
        if time.monotonic() > end or done > most_bytes:
            break
    return result


def _entries(value: typing.Any) -> Iterator[dict]:
    """Yields each part of a manifest that names a file and its sha256."""
    if isinstance(value, dict) and isinstance(value.get("file"), str) and isinstance(value.get("sha256"), str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _entries(part)


def _alive(pid: str) -> bool:
    return pid.isdigit() and pathlib.Path(f"/proc/{pid}").exists()


def main(argv: list[str]) -> int:
    """Calls a function of this module by its name, with values from standard input; prints what it returns as JSON."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # runs `finally`, which removes the file of the trial
    try:
        answer = globals()[argv[0]](*json.load(sys.stdin))
    except OSError as error:
        answer = {"error": [error.errno, error.strerror, error.filename] if error.errno else [words(error)]}
    except Exception as error:  # those of fsspec's stores have classes of their own
        answer = {"error": [words(error)]}
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
