"""JSON lines."""

import json
import typing
from collections.abc import Iterator

import orjson

from jaxlm.config import ConfigError
from jaxlm.corpus.sources import base, rows, streams
from jaxlm.corpus.sources.base import Part, SourceSpec, SourceStats
from jaxlm.corpus.stage import Document

GRAIN = 1
NUMBERED_BYTES = 64 << 20  # in files up to here lines have numbers (a task in the middle counts those before)


def read(part: Part, spec: SourceSpec, stats: SourceStats) -> Iterator[Document]:
    """Ids: `NAME:LINE` (from 1), and `NAME@BYTE` in a plain file past 64 MiB. Blank lines are no records.

    Raises ConfigError when the part has records and none has a field `text_key`.
    """
    key, records, seen_keys = spec.text_key, 0, set()
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
            stats.skip(rows.no_text(key), doc_id)
            seen_keys.update(record if isinstance(record, dict) else ())
        else:
            records += 1
            yield rows.document(record[key], doc_id, record, key)
    if not records and seen_keys and key not in seen_keys:
        fields = ", ".join(sorted(map(str, seen_keys))[:10])
        raise ConfigError(f"{part.url} has no text in field '{key}'; its fields are {fields}: set text_key")


def _parse(line: bytes, doc_id: str, stats: SourceStats) -> typing.Any:
    """The line's value; None when it is none. What orjson refuses (lone surrogates, NaN, bad bytes) gets a second look."""
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError:
        try:
            return json.loads(base.to_text(line, doc_id, stats))
        except (ValueError, RecursionError):
            return None


def _lines_before(part: Part) -> int:
    """Lines before the first that begins in the part: one ends at its first byte less one, or later."""
    count, left = 1, part.start - 1
    for chunk in streams.chunks(part):
        count += chunk[:left].count(b"\n")
        left -= len(chunk)
        if left <= 0:
            break
    return count
