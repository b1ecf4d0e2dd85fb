"""WARC and WET: pages as crawlers store them (WARC 1.1, ISO 28500).

A record ends by its Content-Length, so a damaged one is skipped alone, where FastWARC's own iterator would stop.
"""

import re
from collections.abc import Container, Iterator

from fastwarc.warc import WarcRecord, WarcRecordType

from jaxlm.corpus.sources import base, html, streams
from jaxlm.corpus.sources.base import Part, SourceSpec, SourceStats
from jaxlm.corpus.stage import Document

GRAIN = 0
_HEADER_BYTES = 1 << 16  # a WARC header is shorter
_BLANK_LINE = b"\r\n\r\n"  # ends the header, and the record
_LENGTH = re.compile(rb"^content-length:[ \t]*(\d+)[ \t]*\r$", re.IGNORECASE | re.MULTILINE)
_PAGE = re.compile(rb"^warc-type:[ \t]*(?:response|conversion)[ \t]*\r$", re.IGNORECASE | re.MULTILINE)
_URL = re.compile(rb"^warc-target-uri:[ \t]*<?([^\s>]+)", re.IGNORECASE | re.MULTILINE)
_SPACE = re.compile(rb"\s*")
_HTML_TYPES = ("text/html", "application/xhtml+xml")
_HTML_BEGINS = re.compile(
    rb"(\xef\xbb\xbf)?\s*+(<\?xml[^>]*+>\s*+)?(<!--((?!-->).)*+-->\s*+)*+<(!doctype\s+html|(html|head|body)[\s>])",
    re.IGNORECASE | re.DOTALL,
)
_SNIFF_BYTES = 4096


def read(part: Part, spec: SourceSpec, stats: SourceStats, only: Container[str] | None = None) -> Iterator[Document]:
    """Yields responses that are HTML, and the plain text of WET. Ids: `NAME@BYTE`, the record's decompressed offset.

    only: ids of the records to read; None: all.
    """
    for offset, raw in _records(streams.Cursor(streams.chunks(part))):
        doc_id = f"{part.name}@{offset}"
        if only is not None and doc_id not in only:
            continue
        page = raw if isinstance(raw, streams.Damage) else _page(raw, doc_id, stats)
        if isinstance(page, Document):
            yield page
        else:
            stats.skip(page.reason, doc_id)


def urls(part: Part) -> Iterator[tuple[str, str]]:
    """Yields (id, URL) of each record that may be a page. Parses no more than its WARC header."""
    for offset, raw in _records(streams.Cursor(streams.chunks(part))):
        if not isinstance(raw, streams.Damage) and (url := _URL.search(raw, 0, raw.find(_BLANK_LINE))):
            yield f"{part.name}@{offset}", url[1].decode("utf-8", "replace")


def _page(raw: bytes, doc_id: str, stats: SourceStats) -> Document | streams.Damage:
    try:
        record, body = _parse(raw)
    except (OSError, ValueError) as e:
        return streams.Damage(f"bad WARC record ({str(e).splitlines()[0]})")
    if len(body) > base.MAX_RECORD_BYTES:
        return streams.Damage(streams.TOO_LARGE)
    url = record.headers.get("WARC-Target-URI", "").strip("<>")
    metadata = {"url": url, "site": base.site_of(url), "date": record.headers.get("WARC-Date", "")}
    metadata = {key: value for key, value in metadata.items() if value}
    if record.record_type == WarcRecordType.conversion:
        return Document(text=base.to_text(body, doc_id, stats), id=doc_id, metadata=metadata | {"format": "text"})
    if record.http_headers is not None and record.http_headers.status_code not in (200, None):
        return streams.Damage("HTTP status is not 200")
    if not _is_html(record, body):
        return streams.Damage("not HTML")
    text = html.decode(body, (record.http_charset or "").strip("\"' "), doc_id, stats)
    return Document(text=text, id=doc_id, metadata={"format": "html"} | html.head_metadata(text) | metadata)


def _parse(raw: bytes) -> tuple[WarcRecord, bytes]:
    """Returns a record and its body, decoded as its HTTP headers say, or unchanged if it proves to be decoded already."""
    record, limit = WarcRecord.from_bytes(raw), base.MAX_RECORD_BYTES + 1
    if record.record_type != WarcRecordType.response:
        return record, record.reader.read(limit)
    try:
        record.parse_http(auto_decode="all", quirks_mode=True)
        return record, record.reader.read(limit)
    except OSError:
        record = WarcRecord.from_bytes(raw)
        record.parse_http(auto_decode="none", quirks_mode=True)
        body = record.reader.read(limit)
        if _HTML_BEGINS.match(body[:_SNIFF_BYTES]):
            return record, body
        raise


def _is_html(record: WarcRecord, body: bytes) -> bool:
    """Returns True if the record's type is HTML, or if the body begins like HTML (XHTML is often typed text/xml)."""
    kind = record.headers.get("WARC-Identified-Payload-Type") or record.http_content_type or ""
    return kind.strip().lower() in _HTML_TYPES or bool(_HTML_BEGINS.match(body[:_SNIFF_BYTES]))


def _records(cursor: streams.Cursor) -> Iterator[tuple[int, bytes | streams.Damage]]:
    """Yields (offset, record) of responses and conversions. After a damaged record, goes on at the next."""
    while True:
        cursor.drop(_SPACE.match(cursor.window).end())
        if not cursor.window:
            if not (more := cursor.fill()):
                return
            if isinstance(more, streams.Damage):
                yield cursor.offset, more
            continue
        at = cursor.offset
        size, outcome = _measure(cursor)
        if isinstance(outcome, streams.Damage):
            yield at, outcome
            cursor.drop(len(cursor.window))
        elif not outcome:
            yield at, streams.Damage("malformed, cut or too large WARC record")
            _to_next(cursor)
        else:
            if _PAGE.search(cursor.window, 0, cursor.window.find(_BLANK_LINE) + 2):
                yield at, bytes(cursor.window[:size])
            cursor.drop(size)


def _measure(cursor: streams.Cursor) -> tuple[int, bool | streams.Damage]:
    """Returns (size, True if complete and sound, else False or a Damage) of the record at the window's beginning."""
    while (end := cursor.window.find(_BLANK_LINE)) < 0:
        more = cursor.fill() if len(cursor.window) <= _HEADER_BYTES else False
        if more is not True:
            return 0, more
    length = _LENGTH.search(cursor.window, 0, end + 2)
    if not cursor.window.startswith(b"WARC/") or not length or int(length[1]) > base.MAX_RECORD_BYTES:
        return 0, False
    size = end + 4 + int(length[1])
    while len(cursor.window) < size + 4:
        more = cursor.fill()
        if more is True:
            continue
        if len(cursor.window) < size:
            return size, more
        if more:
            cursor.unread(more)
        break
    return size, _BLANK_LINE.startswith(bytes(cursor.window[size : size + 4]))


def _to_next(cursor: streams.Cursor) -> None:
    """Moves to where the next record seems to begin: after a blank line or after damage."""
    cursor.drop(1)
    more = cursor.seek(_BLANK_LINE + b"WARC/")
    cursor.drop(len(_BLANK_LINE) if more is True else len(cursor.window))
    if isinstance(more, streams.Damage):
        cursor.unread(more)
