"""Finds the files of a source that is a path, on any file system that fsspec knows, and cuts large ones into parts."""

import collections
import dataclasses
import fnmatch
import glob
import os
import posixpath

import fsspec
from fsspec.implementations.local import LocalFileSystem

from jaxlm.config import ConfigError
from jaxlm.corpus.sources import registry, streams
from jaxlm.corpus.sources.base import Part
from jaxlm.host.files import printable


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """A file of a source."""

    name: str  # relative to the source's folder
    url: str
    size: int | None  # None if unknown
    licence_files: tuple[str, ...] = ()

    def __post_init__(self):
        object.__setattr__(self, "name", printable(self.name))


def filesystem(path: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """Returns (the file system of a local path or URL, the path on it). Raises ConfigError if its library is missing."""
    if "://" not in path:
        return LocalFileSystem(), os.path.abspath(os.path.expanduser(path))
    if "::" in path:
        raise ConfigError(f"source '{path}': chained URLs are not read; unpack it first")
    try:
        return fsspec.core.url_to_fs(path)
    except (ImportError, ValueError) as e:
        raise ConfigError(f"source '{path}': {str(e).splitlines()[0]}") from None


def url_of(fs: fsspec.AbstractFileSystem, path: str) -> str:
    """Returns the name that `streams.open_file` takes: a local path unchanged, else a URL."""
    return path if isinstance(fs, LocalFileSystem) else fs.unstrip_protocol(path)


def format_of(name: str, formats: tuple[str, ...]) -> str:
    """Returns which of `formats` a file's name means, compressed or not; "" if none."""
    plain = name.lower()
    plain = plain.removesuffix(streams.compression(plain))
    if "readme" in formats and registry.README.fullmatch(posixpath.basename(plain)):
        return "readme"
    return next((f for f in formats if plain.endswith(registry.FORMATS[f][1])), "")


def suffix(name: str) -> str:
    """Returns the suffix under which a file that is not read is counted."""
    return posixpath.splitext(name)[1].lower() or "unsuffixed"


def excluded(name: str, exclude: tuple[str, ...]) -> str:
    """Returns the first pattern that matches a part of the path `name`; "" if none does."""
    parts = name.strip("/").split("/")
    return next((pattern for pattern in exclude for part in parts if fnmatch.fnmatchcase(part, pattern)), "")


def find(
    path: str, *formats: str, others: collections.Counter[str] | None = None, exclude: tuple[str, ...] = ()
) -> list[Found]:
    """Returns the files of a path, a folder or a glob, sorted by name. Raises ConfigError if there is none.

    In a folder, takes files whose names mean one of `formats`, and counts the rest in `others`. If there is only one
    format, a single file and the files of a glob have it, whatever their names. `exclude` leaves out names below the path.
    """
    suffixes = ", ".join(ending for f in formats for ending in registry.FORMATS[f][1])
    fs, root = filesystem(path)
    forced = len(formats) == 1
    if fs.isfile(root):
        if not forced and not format_of(root, formats):
            raise ConfigError(f"source '{path}' is none of {suffixes}{_prepared(formats) or '; convert it'}")
        return [Found(posixpath.basename(root), url_of(fs, root), fs.size(root))]
    if fs.isdir(root):
        base, forced, infos = root, False, fs.find(root, detail=True)
    elif glob.has_magic(path):
        base, infos = _matching(fs, path, root)
    else:
        raise ConfigError(
            f"source '{path}': no such file or folder; give a path, a glob, a URL, embedded:NAME, tfds:NAME or hub:NAME"
        )
    listed = []
    for name, info in infos.items():
        if exclude and excluded(name.removeprefix(base), exclude):
            continue
        if info["type"] != "file" and not fs.isfile(name):  # a link to a file is a file: the hub's cache has links
            if others is not None and info["type"] == "link":
                others["link to nothing"] += 1
            continue
        if forced or format_of(name, formats):
            listed.append(Found(name.removeprefix(base).lstrip("/"), url_of(fs, name), info.get("size")))
        elif others is not None:
            others[suffix(name)] += 1
    if not listed:
        raise ConfigError(f"source '{path}' has no file ending in {suffixes}{_prepared(formats)}")
    return sorted(listed, key=lambda file: file.name)


def _prepared(formats: tuple[str, ...]) -> str:
    words = "; jaxlm prepare makes text of HTML, code and others, in DATA/documents"
    return words if formats == registry.PLAIN else ""


def cut(file: Found, format_name: str, task_bytes: int) -> list[Part]:
    """Returns the file as one part, or as parts of about `task_bytes` if its format allows and its size is known."""
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


def _matching(fs: fsspec.AbstractFileSystem, path: str, root: str) -> tuple[str, dict[str, dict]]:
    """Returns (the folder before a glob's first wildcard, name -> info of each match); `root` is its `path` on `fs`."""
    if "://" in path:
        return _fixed_part(root), fs.glob(root, detail=True)
    pattern = os.path.expanduser(path)  # as given: the folder that it is relative to is no pattern
    names = glob.glob(pattern, recursive=True, include_hidden=True)
    base = os.path.abspath(posixpath.join(os.getcwd(), _fixed_part(pattern)))
    return base, {os.path.abspath(name): fs.info(name) for name in names}


def _fixed_part(pattern: str) -> str:
    parts = pattern.split("/")
    return "/".join(parts[: next(i for i, part in enumerate(parts) if glob.has_magic(part))])
