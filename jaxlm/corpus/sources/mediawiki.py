"""MediaWiki's XML export (Special:Export, dumps.wikimedia.org): reads articles, leaves redirects and other pages out.

Finds each page in the stream by its tags (text is escaped, so that they can't occur inside a page), and parses one page
at a time: memory is bounded by a page, and a broken page is skipped alone.
"""

import dataclasses
import html
import re
import urllib.parse
import xml.etree.ElementTree as ET
from collections.abc import Iterator

from jaxlm.corpus.sources import base, streams, wikitext
from jaxlm.corpus.sources.base import Part, SourceSpec, SourceStats
from jaxlm.corpus.stage import Document

GRAIN = 1
_BEGIN, _END = b"<page>", b"</page>"
_TAGS = re.compile(rb"<page>|</page>")
_BASE = re.compile(rb"<base>([^<]*)</base>")
_MEDIA_NAMESPACES = re.compile(rb"<namespace key=\"(?:6|14)\"[^>]*>([^<]+)<")  # files and categories, in its language
_HEADER_BYTES = 1 << 16


@dataclasses.dataclass(frozen=True)
class _Wiki:
    """What the export's header tells: the URL up to a title ("" = unknown), the host, and the names of media namespaces."""

    root: str
    site: str
    dropped_namespaces: frozenset[str]


def read(part: Part, spec: SourceSpec, stats: SourceStats) -> Iterator[Document]:
    """Yields each article as Markdown under its title. Ids: `NAME:PAGEID`, or `NAME@BYTE` if the page has no id."""
    wiki = _header(part)
    wiki = wiki if wiki.site else dataclasses.replace(wiki, site=spec.name)
    pages = 0
    for offset, raw in _pages(streams.Cursor(streams.chunks(part, part.start), part.start), part.stop):
        pages += 1
        doc_id = f"{part.name}@{offset}"
        page = raw if isinstance(raw, streams.Damage) else _parse(raw, doc_id, part, wiki, stats)
        if isinstance(page, Document):
            yield page
        else:
            stats.skip(page.reason, doc_id)
    if not pages and not part.start:
        stats.skip("no page of MediaWiki in it", part.name)


def _header(part: Part) -> _Wiki:
    head = b""
    for chunk in streams.chunks(part):
        if isinstance(chunk, streams.Damage):
            break
        head += chunk
        if _BEGIN in head or len(head) > _HEADER_BYTES:
            break
    head = head.partition(_BEGIN)[0]
    match = _BASE.search(head)
    url = html.unescape(match[1].decode("utf-8", "replace")).strip() if match else ""
    names = {html.unescape(name.decode("utf-8", "replace")).lower() for name in _MEDIA_NAMESPACES.findall(head)}
    return _Wiki(
        url.rpartition("/")[0] + "/" if url else "", base.site_of(url), frozenset(names | {"file", "image", "category"})
    )


def _pages(cursor: streams.Cursor, stop: int) -> Iterator[tuple[int, bytes | streams.Damage]]:
    """Yields (offset, `<page>...</page>`) of the pages that begin before `stop`."""
    while True:
        while (begin := cursor.window.find(_BEGIN)) < 0:
            cursor.drop(len(cursor.window) - len(_BEGIN) + 1)
            if not (more := cursor.fill()):
                return
            if isinstance(more, streams.Damage):
                yield cursor.offset, more
                cursor.drop(len(cursor.window))
        cursor.drop(begin)
        offset, seen = cursor.offset, len(_BEGIN)
        if 0 <= stop <= offset:
            return
        while not (tag := _TAGS.search(cursor.window, seen)):
            seen = max(seen, len(cursor.window) - len(_END) + 1)
            more = cursor.fill() if len(cursor.window) <= base.MAX_RECORD_BYTES else False
            if more is not True:
                yield offset, more or streams.Damage("page cut short or too large")
                cursor.drop(len(cursor.window))
                break
        else:
            closed = tag[0] == _END
            end = tag.end() if closed else tag.start()
            del tag  # it holds the window
            yield offset, bytes(cursor.window[:end]) if closed else streams.Damage("broken XML page")
            cursor.drop(end)


def _parse(raw: bytes, doc_id: str, part: Part, wiki: _Wiki, stats: SourceStats) -> Document | streams.Damage:
    try:
        page = ET.fromstring(base.to_text(raw, doc_id, stats))
    except ET.ParseError:
        return streams.Damage("broken XML page")
    if page.find("redirect") is not None:
        return streams.Damage("redirect")
    revision = next(reversed(page.findall("revision")), page)
    if page.findtext("ns", "0") != "0" or revision.findtext("model", "wikitext") != "wikitext":
        return streams.Damage("not an article")
    title, number = page.findtext("title", "").strip(), page.findtext("id", "").strip()
    try:
        text = wikitext.to_markdown(revision.findtext("text") or "", wiki.dropped_namespaces)
    except (RecursionError, wikitext.ParserError):
        return streams.Damage("wikitext that can't be parsed")
    metadata = {"format": "markdown", "path": part.name, "site": wiki.site, "title": title}
    if wiki.root:
        metadata["url"] = wiki.root + urllib.parse.quote(title.replace(" ", "_"), safe="/:,()'!*@;")
    if date := revision.findtext("timestamp"):
        metadata["date"] = date
    text = f"# {title}\n\n{text}\n" if title and text else text
    return Document(text=text, id=f"{part.name}:{number}" if number else doc_id, metadata=metadata)
