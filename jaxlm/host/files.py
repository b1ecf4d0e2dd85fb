"""Writes files atomically, locks folders, waits for disks with a time limit, reads the limits of this process's cgroups."""

import contextlib
import ctypes
import dataclasses
import datetime
import fcntl
import functools
import json
import os
import pathlib
import queue
import re
import shutil
import sys
import threading
import time
import typing
from collections.abc import Callable, Iterator

from jaxlm.host import console
from jaxlm.host.errors import ConfigError, RunError

ROOT = pathlib.Path("/")
ENDING_S = 20.0  # a run that was told to stop, or lost its supervisor, saves and ends within about this
_SOON_S = 5.0  # for reading a small file
HANDED_DOWN = "JAXLM_LOCK"  # the environment variable with the file descriptor of the parent's lock
# The errors of code that reads a value of a wrong type or size.
MANGLED = (ValueError, TypeError, KeyError, IndexError, AttributeError, ArithmeticError)
_MOST_LEVELS = 100  # no real file nests so deeply; recursive code can handle this depth
T = typing.TypeVar("T")
_PLAIN = re.compile(r"(?!/(?:gs|s3|az|hf)/)[\w/.,+=@~ -]*")  # a path that every library reads literally


class NoAnswer(Exception):
    """A call did not end within its time limit."""


@contextlib.contextmanager
def plain_path(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a path of an existing folder that no library reads as a pattern, a URL or an escape.

    Orbax and DuckDB take `[ ] * ?` for a glob, TensorStore `\\` for `/`, Orbax `/s3/runs` for `s3://runs`. A folder with such
    a path is opened, and its path in /proc/self/fd is yielded, if there is a /proc.
    """
    if _PLAIN.fullmatch(str(folder)) or not os.path.isdir("/proc/self/fd"):
        yield folder
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield pathlib.Path(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


def expanded(path: str | pathlib.Path) -> pathlib.Path:
    """Returns a path with `~` replaced by the home folder, unless a file or folder of that very name exists."""
    plain = pathlib.Path(path)
    return plain if plain.exists() else pathlib.Path(os.path.expanduser(plain))


def moved(folder: pathlib.Path, before: os.stat_result) -> bool:
    """True if the path no longer leads to the folder whose `os.stat` was `before`. False if the disk fails."""
    try:
        return not os.path.samestat(os.stat(folder), before)
    except FileNotFoundError:
        return True
    except OSError:
        return False


def write_atomically(path: pathlib.Path, content: bytes, private: bool = False) -> None:
    """Writes a file to disk so that a crash leaves either the old content or the new. `private`: only its owner can read it."""
    tmp = path.with_name(path.name + ".tmp")
    if private:  # before there is anything to read
        tmp.unlink(missing_ok=True)
        os.close(os.open(tmp, os.O_WRONLY | os.O_CREAT, 0o600))
    try:
        tmp.write_bytes(content)
    except OSError as error:  # a full disk: the error of a write names no file
        tmp.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from None
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


def make_folder(folder: pathlib.Path, name: str, advice: str = "") -> None:
    """Creates a folder if it is missing. Raises ConfigError, which begins with `name` and ends with `advice`, if it can't."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{name} can't be made: {error.strerror or error}{advice}") from error


def check_room(folder: pathlib.Path, needed: int, name: str) -> None:
    """Raises RunError if the disk of `folder` lacks room for `needed` bytes; `name` is the folder in the line."""
    if needed > (free := shutil.disk_usage(folder).free):
        raise RunError(
            f"{name} needs about {console.size(needed)}, and {console.size(free)} are free there: free some room"
        )


def lock(folder: pathlib.Path, does: str, key: str, wait_s: float = 0.0) -> typing.IO[str]:
    """Locks a folder against other processes, until the returned file is closed: by `with`, by dropping it, or at exit.

    A process whose parent locked the folder and handed the lock down (the environment variable in HANDED_DOWN) gets that
    lock. The lock is released only when both processes have closed it.

    Args:
      folder: an existing folder; the lock is a file `.lock` in it.
      does: what the lock's holder does, for messages: "is writing", "trains in".
      key: the key or flag that names the folder, for messages: "config.workdir".
      wait_s: how long to wait for the lock's holder, which may be about to end.

    Raises ConfigError if another process holds the lock.
    """
    file = open(folder / ".lock", "a")
    if inherited := _handed_down(file):
        file.close()
        return inherited
    held = _try(file)
    if not held and wait_s:
        console.say(f"another process {does} {folder}: waiting up to {wait_s:.0f} s for its end")
    end = time.monotonic() + wait_s
    while not held and time.monotonic() < end:
        time.sleep(0.1)
        held = _try(file)
    if not held:
        file.close()
        raise ConfigError(f"another process {does} {folder}: wait for it, or give another {key}")
    return file


def _try(file: typing.IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # some network file systems have no locks; a single writer is safe without
    return True


def _handed_down(file: typing.IO[str]) -> typing.IO[str] | None:
    descriptor = int(os.environ.get(HANDED_DOWN) or -1)
    try:
        same = descriptor >= 0 and os.path.samestat(os.fstat(descriptor), os.fstat(file.fileno()))
        return os.fdopen(os.dup(descriptor), "a") if same else None
    except OSError:
        return None


def json_of(content: bytes | str, kind: type[T] = dict) -> T:
    """Returns the value of JSON text, for files that came from elsewhere or may be damaged.

    Raises ValueError if the text is not JSON in UTF-8 or nests too deeply, or the value is not a `kind`.
    """
    try:
        value = json.loads(content.decode("utf-8-sig") if isinstance(content, bytes) else content)
        _check_depth(value, _MOST_LEVELS)
    except RecursionError:
        raise ValueError("it nests too deeply") from None
    if not isinstance(value, kind):
        raise ValueError(f"it holds no {kind.__name__}")
    return value


def _check_depth(value: object, levels: int) -> None:
    if isinstance(value, dict | list):
        if not levels:
            raise RecursionError
        for part in value.values() if isinstance(value, dict) else value:
            _check_depth(part, levels - 1)


def json_there(path: pathlib.Path) -> dict:
    """Returns the object in a JSON file; {} if the file is missing, unreadable or damaged."""
    try:
        return json_of(path.read_bytes())
    except (OSError, ValueError):
        return {}


def kept(path: pathlib.Path, version: int, check: Callable[[dict], str], redo: str) -> dict | None:
    """Returns the object that a command keeps in a file; None without the file. Raises ConfigError if it can't be used.

    Args:
      check: returns what is wrong with an object, "" if nothing is; may raise an error of MANGLED.
      redo: what deleting the file loses, for the message.
    """
    try:
        content = json_of(path.read_bytes())
        if content["version"] != version:
            raise ConfigError(f"{path} is of version {content['version']}, this jaxlm writes {version}: delete it")
        if wrong := check(content):
            raise ValueError(wrong)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}; name another folder") from error
    except ConfigError:
        raise
    except MANGLED as error:
        raise ConfigError(f"{path} is damaged: delete it; {redo}") from error
    return content


def json_lines(path: pathlib.Path) -> list[dict]:
    """Returns the objects of a file of JSON lines. Leaves out lines that are no objects; [] if the file can't be read."""
    objects = []
    with contextlib.suppress(OSError):
        for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
            with contextlib.suppress(ValueError):
                objects.append(json_of(line))
    return objects


def printable(name: str) -> str:
    return name.encode("utf-8", "backslashreplace").decode()


def chain(error: BaseException) -> list[BaseException]:
    """Returns the error and its chain of causes (`__cause__` or `__context__`), the first cause last."""
    links = [error]
    while (cause := links[-1].__cause__ or links[-1].__context__) is not None and cause not in links:
        links.append(cause)
    return links


def of_system(error: BaseException) -> bool:
    """True if storage or network failed: the error or one of its causes is an OSError, or TensorStore's report of one.

    False if a file is in a folder's place or the reverse: a retry can't help.
    """
    links = chain(error)
    if any(isinstance(link, IsADirectoryError | NotADirectoryError | FileExistsError) for link in links):
        return False
    return any(isinstance(link, OSError) or re.search("OS error |os_error_code", str(link)) for link in links)


def is_step(name: str) -> bool:
    return re.fullmatch("0|[1-9][0-9]{0,14}", name) is not None


Clock = Callable[[], datetime.datetime]


def moment(clock: Clock = datetime.datetime.now) -> str:
    """Returns the time of `clock`, to the second, in ISO 8601 with the offset from UTC."""
    return clock().astimezone().isoformat(timespec="seconds")


def is_moment(value: object) -> bool:
    try:
        return bool(datetime.datetime.fromisoformat(value))
    except (TypeError, ValueError):
        return False


def has_steps(checkpoints: pathlib.Path) -> bool:
    return any(is_step(path.name) for path in checkpoints.glob("[0-9]*"))


def is_number(value: object) -> bool:
    """True for a finite int or float; False for a bool, NaN, infinity, text, ..."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A rule for a value in a JSON file: the rule in words, and a test, which returns True if the value follows the rule."""

    words: str
    holds: Callable[[typing.Any], bool]


def whole(low: int) -> Leaf:
    return Leaf(f"a whole number of at least {low}", lambda value: type(value) is int and low <= value < 2**63)


ANYTHING = Leaf("anything", lambda value: True)
TEXT = Leaf("a text", lambda value: isinstance(value, str))
NUMBER = Leaf("a number", is_number)
NUMBER_OR_NONE = Leaf("a number or null", lambda value: value is None or is_number(value))


def problem(value: typing.Any, shape: typing.Any, name: str = "") -> str:
    """Returns the first difference between a value of JSON and its shape, in words; "" if there is none.

    A shape is a `Leaf`, `[shape]` for a list of any length, `{str: shape}` for an object with any keys, or `{key: shape}` for
    an object with at least these keys. `name` is the value's name in the message.
    """
    if isinstance(shape, Leaf):
        return "" if shape.holds(value) else f"{name} is {json.dumps(value)[:60]} instead of {shape.words}"
    if not isinstance(value, type(shape)):
        words = "an object" if isinstance(shape, dict) else "a list"
        return f"{name} is {json.dumps(value)[:60]} instead of {words}"
    if isinstance(shape, list):
        parts = [(f"{name}[{i}]", item, shape[0]) for i, item in enumerate(value)]
    elif str in shape:
        parts = [(f"{name}.{key}", item, shape[str]) for key, item in value.items()]
    else:
        prefix = f"{name}." if name else ""
        if missing := [key for key in shape if key not in value]:
            return f"{prefix}{missing[0]} is missing"
        parts = [(f"{prefix}{key}", value[key], inner) for key, inner in shape.items()]
    return next((words for name, item, inner in parts if (words := problem(item, inner, name))), "")


def read_soon(path: pathlib.Path) -> bytes:
    """Returns the content of a small file, for a command that a hanging disk must not block.

    Raises OSError if it can't be read, NoAnswer if the disk does not answer within a few seconds.
    """
    return within(_SOON_S, path.read_bytes)


def within(seconds: float | None, ask: Callable[[], T]) -> T:
    """Calls `ask` in a thread, which is abandoned after `seconds`, and returns or raises what `ask` does.

    Raises NoAnswer if `ask` takes longer. `seconds` None waits without limit, but a signal interrupts the wait; a signal would
    not interrupt a hanging read in the caller's own thread.
    """
    answers: queue.SimpleQueue = queue.SimpleQueue()

    def work() -> None:
        try:
            answers.put((ask(), None))
        except BaseException as error:  # also SystemExit of a library: it must not be lost
            answers.put((None, error))

    threading.Thread(target=work, name="may hang", daemon=True).start()
    try:
        value, error = answers.get(timeout=seconds)
    except queue.Empty:
        raise NoAnswer(f"no answer in {seconds:g} s") from None
    if error is not None:
        raise error
    return value


def cgroups(controller: str, root: pathlib.Path = ROOT) -> Iterator[tuple[pathlib.Path, bool]]:
    """Yields (folder, True for cgroup version 1) of each cgroup that limits this process, the innermost first.

    Yields nothing where there is no /proc (macOS). `controller` is the limited resource: "memory" or "cpu".
    """
    try:
        groups = [line.split(":", 2) for line in (root / "proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return
    for _, controllers, where in groups:
        older = controller in controllers.split(",")
        if controllers and not older:
            continue
        base = root / "sys/fs/cgroup" / (controller if older else "")
        own = base / where.lstrip("/")
        for place in [own, *own.parents]:  # a parent's limit holds too; in a container `own` may not be visible
            if not place.is_relative_to(base):
                break
            yield place, older


def trim_memory() -> None:
    """Gives freed memory back to the system, which glibc keeps for later; does nothing with another C library."""
    getattr(ctypes.CDLL(None), "malloc_trim", int)(0)


@functools.cache
def threads() -> int:
    """Returns the number of threads that make batches or encode texts: one per core of this process, at most four."""
    return min(4, cores())


def cores(root: pathlib.Path = ROOT) -> int:
    """Returns how many cores this process may use, by its CPU affinity and its cgroups' quotas; at least 1."""
    limits = [len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1]
    for place, older in cgroups("cpu", root):
        with contextlib.suppress(OSError, ValueError):  # "max" = no limit; in version 1 that is -1
            if older:
                quota, period = ((place / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            else:
                quota, period = (place / "cpu.max").read_text().split()
            if int(quota) > 0:
                limits.append(max(1, int(quota) // int(period)))
    return min(limits)
