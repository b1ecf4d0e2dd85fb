"""Reads a checkpoint back from the disk itself, and keeps a checksum of each of its files.

A checkpoint with a `checksums.json` is verified: every array was read back, past the page cache, and equalled the array on
the device. The file is written last, and atomically.
"""

import collections
import contextlib
import hashlib
import itertools
import json
import os
import pathlib
import typing
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent import futures

import numpy as np
import tensorstore as ts

from jaxlm.data.shards.verify import file_sha256
from jaxlm.host.files import MANGLED, json_of, plain_path, write_atomically
from jaxlm.run.checkpoints import damage, digest

CHECKSUMS = "checksums.json"
_THREADS = 4  # hash at the same time; hashing releases the GIL
_AHEAD = 2**29  # bytes of arrays that are read at the same time: TensorStore decodes each chunk on one core


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


class _Chunk(typing.NamedTuple):
    """A chunk of an array: its first index, the array's shape, its bytes; `read` begins to read it, and returns the future."""

    name: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    size: int
    read: Callable[[], ts.Future]


def read_back(folder: pathlib.Path, digests: dict[str, int], go_on: Callable[[], bool] = lambda: True) -> str:
    """Reads every array of a checkpoint, some chunks at a time. Returns "", or a line on the first array that differs.

    Args:
      go_on: called before each array; False ends the reading with "".
    """
    # These threads only compute: a thread that waits for a hanging disk would keep Python from ending.
    with futures.ThreadPoolExecutor(_THREADS) as pool, plain_path(folder) as plain:
        for name, chunks in itertools.groupby(_ahead(_chunks(plain, digests)), key=lambda chunk: chunk[0].name):
            if not go_on():
                return ""
            try:
                shares = (digest.of_piece(np.asarray(f.result()), c.start, c.shape, pool) for c, f in chunks)
                whole = sum(shares) % 2**32
            except (ValueError, KeyError, OSError) as error:
                if damage.passing(error):
                    raise OSError(str(error)) from error
                return f"{name} can't be read"
            if whole != digests[name]:
                return f"{name} is not what was saved"
    return ""


def _ahead(chunks: Iterable[_Chunk]) -> Iterator[tuple[_Chunk, ts.Future]]:
    """Yields each chunk with the future of its content; up to _AHEAD bytes of the next chunks are read meanwhile."""
    begun, size = collections.deque(), 0
    for chunk in chunks:
        while begun and size + chunk.size > _AHEAD:
            size -= begun[0][0].size
            yield begun.popleft()
        begun.append((chunk, chunk.read()))
        size += chunk.size
    yield from begun


def open_array(folder: pathlib.Path, name: str) -> ts.Future:
    """Returns the future of array `name` (`params/layers_0/attn/q/kernel`) of a checkpoint; `folder`: its `plain_path`."""
    item, _, rest = name.partition("/")
    base = {"driver": "file", "path": f"{folder.absolute() / item}/"}
    kvstore = {"driver": "ocdbt", "base": base, "path": rest.replace("/", ".") + "/"}
    return ts.open({"driver": "zarr", "kvstore": kvstore}, read=True)


def _chunks(folder: pathlib.Path, names: Iterable[str]) -> Iterator[_Chunk]:
    """Yields all chunks of the arrays, at least one for each. An array that can't be opened has one unreadable chunk."""
    for name in names:
        opened = open_array(folder, name)
        try:
            array = opened.result()
        except (ValueError, KeyError, OSError):
            yield _Chunk(name, (), (), 0, lambda opened=opened: opened)
            continue
        chunk = [
            step or size for size, step in zip(array.shape, array.chunk_layout.read_chunk.shape or (), strict=True)
        ]
        starts = (range(0, max(1, size), max(1, step)) for size, step in zip(array.shape, chunk, strict=True))
        for start in itertools.product(*starts):
            ends = (min(at + step, size) for at, step, size in zip(start, chunk, array.shape, strict=True))
            piece = array[tuple(slice(at, end) for at, end in zip(start, ends, strict=True))]
            yield _Chunk(name, start, array.shape, piece.size * array.dtype.numpy_dtype.itemsize, piece.read)


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
    content = {"files": table, "sha256": seal(table)}
    write_atomically(folder / CHECKSUMS, json.dumps(content, indent=1).encode())


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


def verify(folder: pathlib.Path, digests: dict[str, int]) -> None:
    """Reads a checkpoint back, and writes its checksums if every array has its digest. Writes none if the disk fails."""
    # RuntimeError: Python is ending, and starts no more threads.
    with contextlib.suppress(OSError, RuntimeError):
        flush(folder)
        if not read_back(folder, digests):
            write_checksums(folder)
