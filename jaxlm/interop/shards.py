"""Writes safetensors files one tensor at a time, with the index that Hugging Face puts beside several of them.

The format (https://github.com/huggingface/safetensors): 8 bytes with the length of a JSON header, the header (name ->
type, shape, place), the tensors one after the other. The library's `save_file` wants all of them in memory at once.
"""

import json
import math
import pathlib
import struct
from collections.abc import Iterable

import numpy as np

INDEX = "model.safetensors.index.json"
_NAMES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
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
    itemsize = _BYTES[dtype]
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
