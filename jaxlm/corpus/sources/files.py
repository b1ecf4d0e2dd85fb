"""The files of a path source, on any file system that fsspec knows."""

import collections
import dataclasses
import glob
import pathlib
import posixpath

import fsspec
from fsspec.implementations.local import LocalFileSystem

from jaxlm.config import ConfigError
from jaxlm.corpus.sources import registry, streams
from jaxlm.corpus.sources.base import Part


@dataclasses.dataclass(frozen=True)
class Found:
    """A file: its name relative to the source's folder, what to open, bytes (None = unknown), code: its licence files."""

    name: str
    url: str
    size: int | None
    licence_files: tuple[str, ...] = ()


def filesystem(path: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """The file system of a local path or URL, and the path there. ConfigError when what it needs is not installed."""
    if "::" in path:
        raise ConfigError(f"source '{path}': chained URLs are not read; unpack it first")
    try:
        return fsspec.core.url_to_fs(path if "://" in path else str(pathlib.Path(path).expanduser()))
    except (ImportError, ValueError) as e:
        raise ConfigError(f"source '{path}': {str(e).splitlines()[0]}") from None


def url_of(fs: fsspec.AbstractFileSystem, path: str) -> str:
    """What `streams.open_file` opens: a local path as it is, else a URL."""
    return path if isinstance(fs, LocalFileSystem) else fs.unstrip_protocol(path)


def format_of(name: str, formats: tuple[str, ...]) -> str:
    """The one of `formats` that a file's name tells, compressed or not; "" when none does."""
    plain = name.lower()
    plain = plain.removesuffix(streams.compression(plain))
    return next((f for f in formats if plain.endswith(registry.FORMATS[f][1])), "")


def find(path: str, *formats: str, others: collections.Counter[str] | None = None) -> list[Found]:
    """The files, sorted by name. ConfigError when there is none.

    Of a folder those whose names tell one of `formats` (`others` counts the rest by suffix); a single one of `formats` is
    also taken at its word for a file or a glob, whatever the names.
    """
    suffixes = ", ".join(suffix for f in formats for suffix in registry.FORMATS[f][1])
    fs, root = filesystem(path)
    forced = len(formats) == 1
    if fs.isfile(root):
        if not forced and not format_of(root, formats):
            raise ConfigError(f"source '{path}' is none of {suffixes}; convert it, or name a folder that holds such")
        return [Found(posixpath.basename(root), url_of(fs, root), fs.size(root))]
    if fs.isdir(root):
        base, forced, infos = root, False, fs.find(root, detail=True)
    elif glob.has_magic(root):
        base, infos = _fixed_part(root), fs.glob(root, detail=True)
    else:
        raise ConfigError(
            f"source '{path}': no such file or folder; give a path, a glob, a URL, embedded:NAME, tfds:NAME or hub:NAME"
        )
    found = []
    for name, info in infos.items():
        if info["type"] != "file" and not fs.isfile(name):  # a link to a file is one: the hub's cache is made of such
            if others is not None and info["type"] == "link":
                others["link to nothing"] += 1
            continue
        if forced or format_of(name, formats):
            found.append(Found(name.removeprefix(base).lstrip("/"), url_of(fs, name), info.get("size")))
        elif others is not None:
            others[posixpath.splitext(name)[1] or "no suffix"] += 1
    if not found:
        raise ConfigError(f"source '{path}' has no file ending in {suffixes}")
    return sorted(found, key=lambda file: file.name)


def cut(file: Found, format_name: str, task_bytes: int) -> list[Part]:
    """A file whole, or in pieces of about `task_bytes` where its format allows. A file of unknown size counts as one task."""
    size = task_bytes if file.size is None else file.size
    whole = Part(format_name, file.name, file.url, 0, -1, size, file.size or 0, file.licence_files)
    grain = registry.reader(format_name).GRAIN
    if not grain or size <= task_bytes or streams.compression(file.name):
        return [whole]
    pieces = -(-size // task_bytes)
    step = -(-size // (pieces * grain)) * grain
    return [
        dataclasses.replace(whole, start=start, stop=min(start + step, size), size=min(step, size - start))
        for start in range(0, size, step)
    ]


def _fixed_part(pattern: str) -> str:
    """The folders before the first wildcard."""
    parts = pattern.split("/")
    return "/".join(parts[: next(i for i, part in enumerate(parts) if glob.has_magic(part))])
