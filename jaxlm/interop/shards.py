"""Writes and reads safetensors files one tensor at a time, with the index that Hugging Face puts beside several of them.

The format (https://github.com/huggingface/safetensors): 8 bytes with the length of a JSON header, the header (name ->
type, shape, place), the tensors one after the other. The library's `save_file` wants all of them in memory at once.
"""

import json
import math
import pathlib
import struct
import typing
from collections.abc import Iterable, Iterator

import ml_dtypes
import numpy as np

from jaxlm.config import RunError

INDEX = "model.safetensors.index.json"
_NAMES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_TYPES = {"BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype(np.float16), "F32": np.dtype(np.float32)}
_ALIGN = 8  # bytes, at which the first tensor begins

Shapes = dict[str, tuple[int, ...]]


def plan(shapes: Shapes, itemsize: int, shard_bytes: int) -> list[Shapes]:
    """Splits tensors, in their order, into files of at most `shard_bytes` (one tensor may be larger)."""
    files: list[Shapes] = [{}]
    size = 0
    for name, shape in shapes.items():
        needed = math.prod(shape) * itemsize
        if files[-1] and size + needed > shard_bytes:
            files.append({})
            size = 0
        files[-1][name] = shape
        size += needed
    return files


def write(
    folder: pathlib.Path, files: list[Shapes], dtype: str, tensors: Iterable[tuple[str, np.ndarray]]
) -> list[pathlib.Path]:
    """Writes the files of a `plan` and, if there are several, their index. Returns their paths.

    Args:
      dtype: "bfloat16", "float16" or "float32".
      tensors: (name, contiguous array of this type) in the order of the plan; each is read when it is written.
    """
    given, paths, where = iter(tensors), [], {}
    itemsize = np.dtype(_TYPES[_NAMES[dtype]]).itemsize
    for number, shapes in enumerate(files, 1):
        path = folder / (
            "model.safetensors" if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        )
        with open(path, "wb") as file:
            file.write(_header(shapes, dtype, itemsize))
            for name, shape in shapes.items():
                got, value = next(given)
                if (got, value.shape, str(value.dtype)) != (name, shape, dtype):
                    raise ValueError(f"{got} {value.dtype}{value.shape} where {name} {dtype}{shape} was planned")
                file.write(value.reshape(-1).view(np.uint8).data)
                where[name] = path.name
        paths.append(path)
    if len(files) > 1:
        total = sum(math.prod(shape) * itemsize for shapes in files for shape in shapes.values())
        content = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / INDEX).write_text(json.dumps(content, indent=2) + "\n")
    return paths


def _header(shapes: Shapes, dtype: str, itemsize: int) -> bytes:
    at, table = 0, {"__metadata__": {"format": "pt"}}
    for name, shape in shapes.items():
        end = at + math.prod(shape) * itemsize
        table[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGN)
    return struct.pack("<Q", len(text)) + text


class Reader:
    """Reads tensors of the safetensors files in a folder, one at a time.

    Attributes:
      shapes: name -> shape, of all tensors.
    """

    def __init__(self, folder: pathlib.Path):
        self._where: dict[str, tuple[pathlib.Path, int, np.dtype]] = {}
        self.shapes: Shapes = {}
        for path in sorted(folder.glob("*.safetensors")):
            for name, shape, kind, at in _entries(path):
                self._where[name] = (path, at, kind)
                self.shapes[name] = shape

    def tensor(self, name: str) -> np.ndarray:
        """Returns a tensor in its own type."""
        path, at, kind = self._where[name]
        return read_array(path, at, kind, self.shapes[name])


def read_array(path: pathlib.Path, at: int, kind: typing.Any, shape: tuple[int, ...]) -> np.ndarray:
    """Returns the array that begins at byte `at` of a file. Read, not mapped: a mapped file's pages count as memory."""
    kind = np.dtype(kind)
    value = np.empty(shape, kind)
    with open(path, "rb", buffering=0) as file:
        file.seek(at)
        left = memoryview(value.reshape(-1).view(np.uint8))
        while left and (n := file.readinto(left)):
            left = left[n:]
    if left:
        raise RunError(f"{path} ends in the middle of a tensor: it was cut short; run the same command again")
    return value


def _entries(path: pathlib.Path) -> Iterator[tuple[str, tuple[int, ...], np.dtype, int]]:
    """Yields (name, shape, type, first byte) of each tensor in a file."""
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        table = json.loads(file.read(length))
    for name, entry in table.items():
        if name != "__metadata__":
            yield name, tuple(entry["shape"]), _TYPES[entry["dtype"]], 8 + length + entry["data_offsets"][0]
