"""Reads a checkpoint back from the disk itself, and keeps a checksum of each of its files.

A checkpoint with a `checksums.json` is verified: every array was read back, past the page cache, and equalled the array on
the device. The file is written last, and atomically.
"""

import collections
import hashlib
import json
import os
import pathlib
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent import futures

import numpy as np
import tensorstore as ts

from jaxlm.data.shards.verify import file_sha256
from jaxlm.host.files import MANGLED, json_of, plain_path, write_atomically
from jaxlm.run.checkpoints import damage, digest

CHECKSUMS = "checksums.json"
_THREADS = 4  # hash at the same time; hashing releases the GIL
_AHEAD = 2**29  # bytes of small arrays that are read at the same time


def files(folder: pathlib.Path) -> list[str]:
    """Returns the paths of all files of a checkpoint but CHECKSUMS, relative to its folder, sorted."""
    paths = (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(CHECKSUMS))
    return sorted(str(path.relative_to(folder)) for path in paths)


def flush(folder: pathlib.Path) -> None:
    """Writes all files in the folder to the disk, and drops them from the page cache, so that reading reads the disk.

    Raises OSError; some file systems report only here that a write failed.
    """
    for path in (folder, *folder.rglob("*")):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            if path.is_file():
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def read_back(folder: pathlib.Path, digests: dict[str, int], go_on: Callable[[], bool] = lambda: True) -> str:
    """Reads every array of a checkpoint, some at a time. Returns "", or a line on the first array that differs.

    Args:
      go_on: called before each array; False ends the reading with "".
    """
    # These threads only compute: a thread that waits for a hanging disk would keep Python from ending.
    with futures.ThreadPoolExecutor(_THREADS) as pool, plain_path(folder) as plain:
        for name, content in _reads(plain, digests):
            if not go_on():
                return ""
            try:
                array = np.asarray(content.result())
            except (ValueError, KeyError, OSError) as error:
                if damage.passing(error):
                    raise OSError(str(error)) from error
                return f"{name} can't be read"
            if digest.of_array(array, pool) != digests[name]:
                return f"{name} is not what was saved"
            del array, content  # the next turn waits for another array
    return ""


def _reads(folder: pathlib.Path, names: Iterable[str]) -> Iterator[tuple[str, ts.Future]]:
    """Yields each array's name and the future of its content; up to _AHEAD bytes of the next arrays are read meanwhile."""
    begun, ahead = collections.deque(), 0
    for name in names:
        opened, size = open_array(folder, name), 0
        if whole := opened.exception() is None:
            size = opened.result().size * opened.result().dtype.numpy_dtype.itemsize
        while begun and ahead + size > _AHEAD:
            ahead -= begun[0][2]
            yield begun.popleft()[:2]
        begun.append((name, opened.result().read() if whole else opened, size))
        ahead += size
    yield from (each[:2] for each in begun)


def open_array(folder: pathlib.Path, name: str) -> ts.Future:
    """Returns the future of array `name` (`params/layers_0/attn/q/kernel`) of a checkpoint; `folder`: its `plain_path`."""
    item, _, rest = name.partition("/")
    base = {"driver": "file", "path": f"{folder.absolute() / item}/"}
    kvstore = {"driver": "ocdbt", "base": base, "path": rest.replace("/", ".") + "/"}
    return ts.open({"driver": "zarr", "kvstore": kvstore}, read=True)


def sha256s(folder: pathlib.Path, names: Iterable[str]) -> dict[str, str]:
    """Returns name -> sha256 of each array's bytes in row-major order, reading one at a time. Raises as TensorStore does."""
    with plain_path(folder) as plain:
        arrays = ((name, np.ascontiguousarray(open_array(plain, name).result().read().result())) for name in names)
        return {name: hashlib.sha256(array.reshape(-1).view(np.uint8)).hexdigest() for name, array in arrays}


def write_checksums(folder: pathlib.Path) -> None:
    """Writes the size and the sha256 of each file to CHECKSUMS, which marks the checkpoint as verified."""
    names = files(folder)
    with futures.ThreadPoolExecutor(_THREADS) as pool:
        sums = list(pool.map(lambda name: file_sha256(folder / name), names))
    table = {name: [(folder / name).stat().st_size, value] for name, value in zip(names, sums, strict=True)}
    write_atomically(folder / CHECKSUMS, json.dumps({"files": table, "sha256": seal(table)}, indent=1).encode())


def seal(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def read_checksums(folder: pathlib.Path) -> dict[str, tuple[int, str]] | None:
    """Returns file -> (size, sha256); None if there are no checksums, or if they are damaged."""
    try:
        content = json_of((folder / CHECKSUMS).read_bytes())
        table = {name: (int(size), str(value)) for name, (size, value) in content["files"].items()}
        return table if content["sha256"] == seal(content["files"]) else None
    except (FileNotFoundError, *MANGLED):
        return None


def differing(
    folder: pathlib.Path, items: Collection[str] | None = None, share: tuple[int, int] = (0, 1)
) -> list[str] | None:
    """Returns the files that differ from their checksums; None if there are no checksums. Raises OSError.

    Args:
      items: compare only the files of these items, such as "params"; None compares all files.
      share: (i, n): read every n-th file whole, from the i-th on, and only the ends of the others. For n processes.
    """
    saved = read_checksums(folder)
    if saved is None:
        return None
    names = [name for name in sorted(saved) if items is None or name.split("/")[0] in items]

    def differs(index: int, name: str) -> bool:
        path, (size, value) = folder / name, saved[name]
        try:
            if path.stat().st_size != size:
                return True
            whole = index % share[1] == share[0]
            return file_sha256(path) != value if whole else _touch(path)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return True

    with futures.ThreadPoolExecutor(_THREADS) as pool:
        wrong = list(pool.map(differs, range(len(names)), names))
    return [name for name, is_wrong in zip(names, wrong, strict=True) if is_wrong]


def _touch(path: pathlib.Path) -> bool:
    """Reads a file's first and last byte, which raises OSError if it can't be read. Returns False."""
    with open(path, "rb", buffering=0) as f:
        f.read(1)
        f.seek(max(0, path.stat().st_size - 1))
        f.read(1)
    return False


def verify(folder: pathlib.Path, digests: dict[str, int], go_on: Callable[[], bool] = lambda: True) -> str:
    """Reads a checkpoint back, and writes its checksums if every array has its digest. Returns as `read_back`; OSError."""
    flush(folder)
    differs = read_back(folder, digests, go_on)
    if not differs and go_on():
        write_checksums(folder)
    return differs
