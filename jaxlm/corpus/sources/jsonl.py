"""JSON lines."""

import json
import typing
from collections.abc import Iterator

import orjson

from jaxlm.corpus.sources import base, streams
from jaxlm.corpus.sources.base import Part, SourceSpec, SourceStats
from jaxlm.corpus.stage import Document

GRAIN = 1
_SHOWN_FIELDS = 10
NUMBERED_BYTES = 64 << 20  # up to this size ids have line numbers (a task in the middle counts the lines before)


def read(part: Part, spec: SourceSpec, stats: SourceStats) -> Iterator[Document]:
    """Yields a document for each line. Ids: `NAME:LINE` (from 1); in a plain file past 64 MiB `NAME@BYTE`."""
    key, has_field, fields = spec.text_key, False, set()
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
        elif not isinstance(record, dict) or not isinstance(record.get(key), str):
            stats.skip(base.no_text(key), doc_id)
            if isinstance(record, dict):
                has_field = has_field or key in record
                fields.update(record if len(fields) < _SHOWN_FIELDS else ())
        else:
            has_field = True
            yield base.document_of_row(record[key], doc_id, record, key)
    if fields and not has_field and not stats.no_field:
        shown = ", ".join(sorted(fields)[:_SHOWN_FIELDS])
        stats.no_field = f"{part.url} has no text in field '{key}'; its fields are {shown}: set text_key"


def _parse(line: bytes, doc_id: str, stats: SourceStats) -> typing.Any:
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
