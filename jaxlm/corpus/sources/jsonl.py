"""JSON lines."""

import json
from collections.abc import Iterator

import orjson

from jaxlm.corpus.sources import base, streams
from jaxlm.corpus.sources.base import Part, SourceSpec, SourceStats
from jaxlm.corpus.stage import Document

GRAIN = 1
_FIELDS = 100  # that are remembered, to be named if none has the text
NUMBERED_BYTES = 64 << 20  # up to this size ids have line numbers (a task in the middle counts the lines before)


def read(part: Part, spec: SourceSpec, stats: SourceStats) -> Iterator[Document]:
    """Yields a document for each line. Ids: `NAME:LINE` (from 1); in a plain file past 64 MiB `NAME@BYTE`."""
    fields: set[str] = set()
    numbered = bool(streams.compression(part.name)) or part.file_size <= NUMBERED_BYTES
    number = _lines_before(part) if numbered and part.start else 0
    for offset, line in streams.lines(part):
        number += 1
        doc_id = f"{part.name}:{number}" if numbered else f"{part.name}@{offset}"
        if isinstance(line, streams.Damage):
            stats.skip(line.reason, doc_id)
            continue
        if not line.strip():
            continue
        record = _parse(line, doc_id, stats)
        if record is None:
            stats.skip("malformed JSON line", doc_id)
        elif isinstance(record, dict) and (text := base.text_of(record, spec.text_key)) is not None:
            yield base.document_of_row(text, doc_id, record, spec.text_key)
        else:
            if isinstance(record, dict) and len(fields) < _FIELDS and not record.keys() <= fields:
                fields |= record.keys()
                if not fields & set(base.text_keys(record, spec.text_key)):
                    stats.no_field = base.no_field(part.url, spec.text_key, fields)
            stats.skip(base.no_text(spec.text_key), doc_id)


def _parse(line: bytes, doc_id: str, stats: SourceStats) -> object:
    """Returns a line's value, None if it is no JSON. Lines that orjson refuses (lone surrogates, NaN) get a second try."""
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError:
        try:
            return json.loads(base.to_text(line, doc_id, stats))
        except (ValueError, RecursionError):
            return None


def _lines_before(part: Part) -> int:
    """Returns how many lines begin before the part. The last of these may end inside the part."""
    count, left = 1, part.start - 1
    for chunk in streams.chunks(part):
        count += chunk[:left].count(b"\n")
        left -= len(chunk)
        if left <= 0:
            break
    return count
