"""Reads the records of benchmark files: jsonl, json, parquet; compressed or not, local or at a URL."""

import codecs
import glob
import itertools
import os
import pathlib
import re
from collections.abc import Callable, Iterator

import pyarrow.parquet

from jaxlm.config import ConfigError
from jaxlm.corpus.sources import streams
from jaxlm.corpus.sources.base import Part
from jaxlm.host import files as files_lib

SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".jsonl.zst", ".parquet")
# Files that the hub's tools write next to the data.
_NO_DATA = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
_SPLIT = re.compile(r"(?:train|test|val|valid|validation|dev)(?:-\d+-of-\d+)?")


def files(paths: tuple[str, ...], key: str) -> list[str]:
    """Returns the files of paths, folders, globs and URLs, each once. Raises ConfigError if a path has none."""
    listed: list[str] = []
    for path in paths:
        pattern = path if not os.path.exists(path) else glob.escape(path) + "/**" * os.path.isdir(path)
        inside = glob.glob(pattern, recursive=True)
        inside = [file for file in inside if file.endswith(SUFFIXES) and pathlib.PurePath(file).name not in _NO_DATA]
        inner = [path] if "://" in path else sorted(inside)
        if not inner and not glob.has_magic(path) and not os.path.exists(path):
            raise ConfigError(f"{key}: there is no file or folder {path!r}")
        if not inner:
            raise ConfigError(f"{key}: {path!r} has no file that ends in {', '.join(SUFFIXES)}")
        listed += [file for file in inner if file not in listed]
    return listed


def name(path: str) -> str:
    """Returns the benchmark's name: that of the file, or of its folder if the file is named after a split."""
    stem = re.sub(r"\.(?:jsonl?|parquet)(?:\.gz|\.zst)?$", "", pathlib.PurePath(path).name)
    return (pathlib.PurePath(path).parent.name or stem) if _SPLIT.fullmatch(stem) else stem


def records(path: str, unfit: Callable[[int], object] | None = None) -> Iterator[tuple[int, dict]]:
    """Yields (a record's number from 1, in a jsonl its line; the record).

    A json file holds a list of records, an object whose `data` is a list of records, or one record a line. `unfit` gets
    the numbers of records that are no JSON object. Raises ConfigError for these without `unfit`, and for unreadable files.
    """
    try:
        if path.endswith(".parquet"):
            with streams.open_file(path) as f:
                yield from enumerate(pyarrow.parquet.read_table(f).to_pylist(), 1)
            return
        parts = list(streams.chunks(Part("jsonl", path, path)))
        if lost := [part.reason for part in parts if isinstance(part, streams.Damage)]:
            raise ValueError(lost[0])
        text = b"".join(parts).removeprefix(codecs.BOM_UTF8)
        whole = _whole(text) if path.removesuffix(".gz").endswith(".json") else None
    except (OSError, EOFError, ValueError, pyarrow.ArrowException) as e:
        raise ConfigError(f"{path} can't be read: {getattr(e, 'strerror', None) or e}") from e
    numbered = enumerate(whole if whole is not None else map(_parsed, text.split(b"\n")), 1)
    for number, record in itertools.filterfalse(lambda line: line[1] == "", numbered):
        if isinstance(record, dict):
            yield number, record
        elif unfit:
            unfit(number)
        else:
            raise ConfigError(f"{path}:{number} is no JSON object")


def _whole(text: bytes) -> list | None:
    """Returns the records of a json file that is one value; None if it holds one record a line."""
    if text.lstrip().startswith(b"["):
        return files_lib.json_of(text, list)
    try:
        whole = files_lib.json_of(text, object)
    except ValueError:
        return None
    return whole["data"] if isinstance(whole, dict) and isinstance(whole.get("data"), list) else [whole]


def _parsed(line: bytes) -> object:
    """Returns a line's record, "" for an empty line, None if it is no JSON."""
    try:
        return files_lib.json_of(line, object) if line.strip() else ""
    except ValueError:
        return None
