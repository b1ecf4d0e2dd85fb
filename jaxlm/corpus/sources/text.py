"""Plain text, Markdown and other markup: a file is a document; a large file is cut at blank lines."""

import itertools
import re
import tomllib
from collections.abc import Iterable, Iterator

import yaml

from jaxlm.corpus.sources import base, streams
from jaxlm.corpus.sources.base import Part, SourceSpec, SourceStats
from jaxlm.corpus.stage import Document

WHOLE_BYTES = 1 << 18  # a file up to here is one document
PART_BYTES = 1 << 16  # a larger one is cut at the first blank line after this, or the first line end after twice this
GRAIN = 1 << 24  # it is also cut at the first line after each multiple of this, so that a task can begin there

_FRONT_MATTER = re.compile(r"\A(---|\+\+\+)[ \t]*\r?\n(.*?)^\1[ \t]*(?:\r?\n|\Z)", re.DOTALL | re.MULTILINE)


def read(part: Part, spec: SourceSpec, stats: SourceStats) -> Iterator[Document]:
    """Yields a file, or a large one in pieces with ids FILE@BYTE. Markdown's front matter becomes metadata."""
    lines = _sound_lines(part, stats)
    held, size = [], 0
    if not part.start:
        for offset, line in lines:
            held.append((offset, line))
            size += len(line)
            if size > WHOLE_BYTES:
                break
    if part.start or size > WHOLE_BYTES:
        pieces = ((f"{part.name}@{offset}", raw) for offset, raw in _cut(itertools.chain(held, lines)))
    else:
        pieces = [(part.name, b"".join(line for _, line in held))]
    for doc_id, raw in pieces:
        text = base.to_text(raw, doc_id, stats)
        metadata = {"format": "markdown" if part.format == "markdown" else "text", "path": part.name}
        if part.format == "markdown" and doc_id in (part.name, f"{part.name}@0"):
            text, front = _front_matter(text)
            metadata |= front
        yield Document(text=text, id=doc_id, metadata=metadata)


def _sound_lines(part: Part, stats: SourceStats) -> Iterator[tuple[int, bytes]]:
    for offset, line in streams.lines(part):
        if isinstance(line, streams.Damage):
            stats.skip(line.reason, f"{part.name}@{offset}")
        else:
            yield offset, line


def _cut(lines: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    start, piece = 0, bytearray()
    for offset, line in lines:
        if piece and offset // GRAIN != start // GRAIN:
            yield start, bytes(piece)
            piece.clear()
        start = start if piece else offset
        piece += line
        if len(piece) >= (PART_BYTES if not line.strip() else 2 * PART_BYTES):
            yield start, bytes(piece)
            piece.clear()
    if piece:
        yield start, bytes(piece)


def _front_matter(text: str) -> tuple[str, dict]:
    """Returns (text after the front matter, its metadata). Front matter that is not keys with values counts as text."""
    if not (match := _FRONT_MATTER.match(text)):
        return text, {}
    try:
        keys = yaml.safe_load(match[2]) if match[1] == "---" else tomllib.loads(match[2])
    except (yaml.YAMLError, ValueError, RecursionError):
        return text, {}
    if not isinstance(keys, dict):
        return text, {}
    return text[match.end() :], base.known_metadata(keys)
