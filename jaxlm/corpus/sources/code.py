"""Reads trees of source code: the files that git would track and whose language is known, with their licences."""

import collections
import dataclasses
import functools
import re
from collections.abc import Iterator

import fsspec
import pathspec

from jaxlm.config import ConfigError
from jaxlm.corpus.sources import base, files, registry, streams
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
_LICENCE_NAME = re.compile(r"(licen[cs]e|copying|unlicense)([.-].*)?", re.IGNORECASE)
_HEADER_CHARS = 4096
_HEADER = re.compile(r"SPDX-License-Identifier:[ \t]*((?:\(?[\w.+-]+\)?(?:[ \t]+(?:AND|OR|WITH)[ \t]+)?)+)")
# The phrase that begins first in the text counts; of several that begin there, the first listed. `...` is any text.
_MIT = "permission is hereby granted, free of charge, to any person obtaining a copy"
_ISC = "permission to use, copy, modify, ... distribute this software for any purpose with or without fee is hereby granted"
_BSD = "redistribution and use in source and binary forms"
_WORDS = (
    ("Apache-2.0", "apache license version 2.0"),
    ("AGPL-3.0", "gnu affero general public license version 3"),
    ("LGPL-3.0", "gnu lesser general public license version 3"),
    ("LGPL-2.1", "gnu lesser general public license version 2.1"),
    ("LGPL-2.0", "gnu library general public license version 2"),
    ("GPL-3.0", "gnu general public license version 3"),
    ("GPL-2.0", "gnu general public license version 2"),
    ("MPL-2.0", "mozilla public license version 2.0"),
    ("MPL-2.0", "mozilla public license, v. 2.0"),
    ("EPL-2.0", "eclipse public license - v 2.0"),
    ("EPL-1.0", "eclipse public license - v 1.0"),
    ("CC0-1.0", "cc0 1.0 universal"),
    ("Unlicense", "this is free and unencumbered software released into the public domain"),
    ("BSL-1.0", "boost software license - version 1.0"),
    ("PSF-2.0", "python software foundation license version 2"),
    ("Artistic-2.0", "the artistic license 2.0"),
    ("ISC", f"{_ISC}, provided that"),
    ("0BSD", f"{_ISC}. the software is provided"),
    ("Zlib", "this software is provided 'as-is', without any express or implied warranty"),
    ("BSD-4-Clause", f"{_BSD} ... all advertising materials mentioning features"),
    ("BSD-3-Clause", f"{_BSD} ... endorse or promote products"),
    ("BSD-2-Clause", _BSD),
    ("MIT-0", f"{_MIT} ... to do so. the software is provided"),
    ("MIT", _MIT),
)
_PHRASES = [(spdx, re.compile(".*?".join(map(re.escape, words.split(" ... "))), re.DOTALL)) for spdx, words in _WORDS]

_SNIFF_BYTES = 8192
_LICENCE_BYTES = 1 << 16


def read(part: Part, spec: SourceSpec, stats: SourceStats) -> Iterator[Document]:
    """Yields the file as a document. Its licence is in an SPDX header, or in the nearest licence files."""
    raw = streams.read_whole(part, stats)
    if raw is None:
        return
    if b"\0" in raw[:_SNIFF_BYTES]:
        stats.skip("binary file", part.name)
        return
    text = base.to_text(raw, part.name, stats)
    licence = licence_of_header(text) or " OR ".join(filter(None, map(_licence_of, part.licence_files)))
    if spec.licences and not allowed(licence, spec.licences):
        stats.skip(f"licence {licence or 'not found'}", part.name)
        return
    metadata = {"format": "code", "path": part.name, "language": registry.language_of(part.name)}
    metadata["site"] = part.name.partition("/")[0] if "/" in part.name else spec.name
    if licence:
        metadata["licence"] = licence
    yield Document(text=text, id=part.name, metadata=metadata)


@functools.lru_cache(1 << 10)
def _licence_of(url: str) -> str:
    return licence_of_text(streams.read_bytes(url, _LICENCE_BYTES).decode("utf-8", "replace"))


def licence_of_header(text: str) -> str:
    """Returns the SPDX expression in a file's first lines; "" if there is none."""
    match = _HEADER.search(text, 0, _HEADER_CHARS)
    return match[1].strip() if match else ""


def licence_of_text(text: str) -> str:
    """Returns the SPDX id of a licence text; "" if the text is no licence that is known here."""
    words = re.sub(r"[\s*#/>\"\u201c\u201d]+", " ", text.lower()).replace("license, version", "license version")
    words = re.sub("[\u2018\u2019]", "'", words)
    matches = [(match.start(), i, spdx) for i, (spdx, phrase) in enumerate(_PHRASES) if (match := phrase.search(words))]
    return min(matches, default=(0, 0, ""))[2]


def allowed(expression: str, wanted: tuple[str, ...]) -> bool:
    """Returns True if the licences in `wanted` satisfy an SPDX expression: all of an AND, at least one side of an OR.

    An expression with AND, OR and parentheses passes only if every licence is wanted. Case, `-only` and exceptions don't
    count.
    """

    def plain(spdx: str) -> str:
        return spdx.strip(" ()").split(" ")[0].lower().removesuffix("-only")

    names = {plain(spdx) for spdx in wanted}
    if "(" in expression and " AND " in expression and " OR " in expression:  # no parser for a handful of files
        expression = expression.replace(" OR ", " AND ")
    sides = [[plain(spdx) for spdx in side.split(" AND ")] for side in expression.split(" OR ")]
    return any(all(spdx in names for spdx in side) for side in sides)


@dataclasses.dataclass(frozen=True)
class _Folder:
    """What applies below a folder: ignore rules (innermost first, each with its folder), and the nearest licence files."""

    ignores: tuple[tuple[str, pathspec.GitIgnoreSpec], ...] = ()
    licence_files: tuple[str, ...] = ()

    def ignored(self, path: str) -> bool:
        """Returns True if git would ignore the path: the innermost .gitignore that matches it decides."""
        for folder, spec in self.ignores:
            include = spec.check_file(path.removeprefix(folder)).include
            if include is not None:
                return include
        return False


def find(path: str, exclude: tuple[str, ...] = (), others: collections.Counter[str] | None = None) -> list[files.Found]:
    """Returns a folder's source files, sorted. `others` counts other files by suffix. Raises ConfigError if there is none."""
    fs, root = files.filesystem(path)
    if not fs.isdir(root):
        return files.find(path, "code")
    sources, folders = [], {"": _Folder()}
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
            if not registry.language_of(name) and others is not None:
                others[files.suffix(name)] += 1
            elif registry.language_of(name) and not at.ignored(prefix + name):
                url = files.url_of(fs, info["name"])
                sources.append(files.Found(prefix + name, url, info["size"], at.licence_files))
        del folders[here]
    if not sources:
        raise ConfigError(f"source '{path}' has no file in a known programming language")
    return sorted(sources, key=lambda file: file.name)


def _enter(fs: fsspec.AbstractFileSystem, above: _Folder, prefix: str, names: dict[str, dict]) -> _Folder:
    ignores = above.ignores
    if ".gitignore" in names:
        lines = fs.cat_file(names[".gitignore"]["name"]).decode("utf-8", "replace").splitlines()
        ignores = ((prefix, pathspec.GitIgnoreSpec.from_lines(lines)), *ignores)
    licences = [n for n in sorted(names) if _LICENCE_NAME.fullmatch(n) and not registry.language_of(n)]
    urls = tuple(files.url_of(fs, names[name]["name"]) for name in licences)
    return _Folder(ignores, urls or above.licence_files)
