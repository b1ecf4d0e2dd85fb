"""Reads trees of source code: the files that git would track and whose language is known, with their licences."""

import collections
import dataclasses
import functools
import posixpath
from collections.abc import Iterator

import fsspec
import pathspec

from jaxlm.config import ConfigError
from jaxlm.corpus.sources import base, files, languages, licences, streams
from jaxlm.corpus.sources.base import Part, SourceSpec, SourceStats
from jaxlm.corpus.stage import Document

GRAIN = 0
# Folders of version control, dependencies, build results and caches: other people's code, or a machine's.
SKIPPED_FOLDERS = frozenset(
    """.git .hg .svn .bzr node_modules bower_components vendor vendors _vendor third_party third-party thirdparty 3rdparty
    site-packages dist-packages venv .venv virtualenv __pycache__ .tox .nox .eggs .mypy_cache .pytest_cache .ruff_cache
    .ipynb_checkpoints build _build dist target .gradle .idea .vscode .next .nuxt .terraform Pods Carthage DerivedData
    CMakeFiles""".split()  # noqa: SIM905
)
_BINARY = b"\0"
_SNIFF_BYTES = 8192
_LICENCE_BYTES = 1 << 16


def read(part: Part, spec: SourceSpec, stats: SourceStats) -> Iterator[Document]:
    """Yields the part's file as a document.

    Its id is the path. Its licence comes from an SPDX header, or if there is none, from the nearest licence files.
    """
    raw = streams.read_whole(part)
    if isinstance(raw, streams.Damage) or _BINARY in raw[:_SNIFF_BYTES]:
        stats.skip(raw.reason if isinstance(raw, streams.Damage) else "binary file", part.name)
        return
    text = base.to_text(raw, part.name, stats)
    licence = licences.of_header(text) or " OR ".join(filter(None, map(_licence_of, part.licence_files)))
    if spec.licences and not licences.allowed(licence, spec.licences):
        stats.skip(f"licence {licence or 'not found'}", part.name)
        return
    metadata = {"format": "code", "path": part.name, "language": languages.of_file(part.name)}
    metadata["site"] = part.name.partition("/")[0] if "/" in part.name else spec.name
    if licence:
        metadata["licence"] = licence
    yield Document(text=text, id=part.name, metadata=metadata)


@functools.lru_cache(1 << 10)
def _licence_of(url: str) -> str:
    return licences.of_licence_file(streams.read_bytes(url, _LICENCE_BYTES).decode("utf-8", "replace"))


@dataclasses.dataclass(frozen=True)
class _Folder:
    """What applies below a folder: ignore rules (innermost first, each with its folder), and the nearest licence files."""

    ignores: tuple[tuple[str, pathspec.GitIgnoreSpec], ...] = ()
    licence_files: tuple[str, ...] = ()

    def ignored(self, path: str) -> bool:
        """True if git would ignore the path: the innermost .gitignore that matches it decides."""
        for folder, spec in self.ignores:
            include = spec.check_file(path.removeprefix(folder)).include
            if include is not None:
                return include
        return False


def find(path: str, exclude: tuple[str, ...] = (), others: collections.Counter[str] | None = None) -> list[files.Found]:
    """Returns the source files under a folder, sorted, or the file itself. Raises ConfigError if there is none.

    Leaves out files and folders whose names fit a pattern of `exclude`. Counts files that are no source in `others`, by suffix.
    """
    fs, root = files.filesystem(path)
    if not fs.isdir(root):
        return files.find(path, "code")
    found, folders = [], {"": _Folder()}
    for folder, subfolders, names in fs.walk(root, detail=True):
        here = folder.removeprefix(root).strip("/")
        prefix = f"{here}/" if here else ""
        at = _enter(fs, folders[here], prefix, names)
        for name in list(subfolders):
            if name in SKIPPED_FOLDERS or files.excluded(name, exclude) or at.ignored(f"{prefix}{name}/"):
                del subfolders[name]
            else:
                folders[f"{prefix}{name}"] = at
        for name, info in names.items():
            if files.excluded(name, exclude):
                continue
            if not languages.of_file(name) and others is not None:
                others[posixpath.splitext(name)[1].lower() or "no suffix"] += 1
            elif languages.of_file(name) and not at.ignored(prefix + name):
                url = files.url_of(fs, info["name"])
                found.append(files.Found(prefix + name, url, info["size"], at.licence_files))
        del folders[here]
    if not found:
        raise ConfigError(f"source '{path}' has no file in a known programming language")
    return sorted(found, key=lambda file: file.name)


def _enter(fs: fsspec.AbstractFileSystem, above: _Folder, prefix: str, names: dict[str, dict]) -> _Folder:
    ignores, urls = above.ignores, []
    if ".gitignore" in names:
        lines = fs.cat_file(names[".gitignore"]["name"]).decode("utf-8", "replace").splitlines()
        ignores = ((prefix, pathspec.GitIgnoreSpec.from_lines(lines)), *ignores)
    for name in sorted(names):
        if licences.FILE_NAME.fullmatch(name) and not languages.of_file(name):
            urls.append(files.url_of(fs, names[name]["name"]))
    return _Folder(ignores, tuple(urls) or above.licence_files)
