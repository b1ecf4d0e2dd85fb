"""Folders of HTML pages (mirrored sites, documentation, Confluence exports). The raw page is the document's text."""

import html
import re
from collections.abc import Iterator

from resiliparse.parse import encoding

from jaxlm.corpus.sources import base, streams
from jaxlm.corpus.sources.base import Part, SourceSpec, SourceStats
from jaxlm.corpus.stage import Document

GRAIN = 0
_HEAD_BYTES = 4096  # where the charset is declared
_HEAD_CHARS = 1 << 14  # where title and canonical URL are

_TITLE = re.compile(r"<title[^>]*>([^<]*)</title", re.IGNORECASE)
_CANONICAL = re.compile(
    r"<link\b(?=[^>]*\brel\s*=\s*[\"']?canonical\b)[^>]*\bhref\s*=\s*[\"']?([^\"'\s>]+)", re.IGNORECASE
)
_DECLARED = re.compile(
    rb"<meta\b[^>]*\bcharset\s*=\s*[\"']?\s*([\w.:-]+)|<\?xml[^>]*\bencoding\s*=\s*[\"']([\w.:-]+)", re.IGNORECASE
)


def read(part: Part, spec: SourceSpec, stats: SourceStats) -> Iterator[Document]:
    """Yields a page as a document. Its site is the canonical URL's host, else the first folder."""
    raw = streams.read_whole(part, stats)
    if raw is None:
        return
    text = decode(raw, "", part.name, stats)
    metadata = {"format": "html", "path": part.name} | head_metadata(text)
    metadata.setdefault("site", part.name.partition("/")[0] if "/" in part.name else spec.name)
    yield Document(text=text, id=part.name, metadata=metadata)


def head_metadata(text: str) -> dict[str, str]:
    """Returns the page's title, and its url and site if the page names its canonical URL."""
    metadata, head = {}, text[:_HEAD_CHARS]
    if (title := _TITLE.search(head)) and (words := html.unescape(title[1]).split()):
        metadata["title"] = " ".join(words)
    if (link := _CANONICAL.search(head)) and (site := base.site_of(url := html.unescape(link[1]))):
        metadata |= {"url": url, "site": site}
    return metadata


def decode(raw: bytes, http_charset: str, doc_id: str, stats: SourceStats) -> str:
    """Returns a page as text, decoded by its byte order mark, as UTF-8, in the declared charset, or in a guessed one.

    UTF-8 is tried before the declared charset: text is hardly ever valid UTF-8 by chance, and servers often declare a wrong
    charset.
    """
    for bom, name in base.BYTE_ORDER_MARKS:
        if raw.startswith(bom):
            return raw[len(bom) :].decode(name, "replace")
    declared = http_charset
    if not declared and (match := _DECLARED.search(raw, 0, _HEAD_BYTES)):
        declared = (match[1] or match[2]).decode()
    name = encoding.map_encoding_to_html5(declared, fallback_utf8=False) if declared else None
    could_be_utf8 = not (name or "").startswith(("iso2022", "utf-16")) and (
        name is not None or (b"\x1b" not in raw and b"\0" not in raw[:_HEAD_BYTES])
    )  # ISO-2022 and UTF-16 may be valid UTF-8 too
    if could_be_utf8:
        try:
            text = raw.decode()
            if name not in (None, "utf-8") and not text.isascii():
                stats.repair(base.WRONG_CHARSET, doc_id)
            return text
        except UnicodeDecodeError:
            if name in (None, "utf-8"):
                name, text = None, raw.decode("utf-8", "replace")
                if not base.mostly_damaged(text):
                    stats.repair(base.NOT_UTF8, doc_id)
                    return text
    charset = name or encoding.detect_encoding(raw)
    text = encoding.bytes_to_str(raw, charset, errors="replace", fallback_encodings=())
    if "\ufffd" in text:
        stats.repair(base.BAD_BYTES, doc_id)
    elif not name:
        stats.repair(base.READ_AS.format(charset), doc_id)
    return text
