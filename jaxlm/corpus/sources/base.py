"""What all readers of sources share: the specification, the statistics, units of work, and bytes -> text."""

import collections.abc
import dataclasses
import re
import typing
import urllib.parse

from jaxlm.corpus.stage import Document

# A line, page or WARC record beyond this is left out, so that memory has a bound.
MAX_RECORD_BYTES = 16 << 20
BAD_BYTES = "bytes that the declared charset lacks became U+FFFD"
NOT_UTF8 = "bytes that are not UTF-8 became U+FFFD"
WESTERN = "not UTF-8: read as windows-1252"
BYTE_ORDER_MARKS = ((b"\xef\xbb\xbf", "utf-8"), (b"\xff\xfe", "utf-16-le"), (b"\xfe\xff", "utf-16-be"))
_EXAMPLES = 5  # of each reason


@dataclasses.dataclass(frozen=True)
class SourceSpec:
    """A source as the config names it.

    Attributes:
      name: in the config; goes into the documents' metadata.
      path: file, folder, glob, URL that fsspec knows, `tfds:NAME`, `hub:REPO`, `embedded:NAME`.
      format: "auto" (each file by its name), or a key of `registry.FORMATS`.
      text_key: the field that holds the text, in jsonl, parquet and datasets.
      max_bytes: of text to read, at most; 0 = all.
      licences: SPDX ids of the code to keep; () = all.
      tfds_dir: TFDS's data_dir; "" = its own.
      hub_dir: folder that holds hub datasets as REPO/**; "" = from the hub.
    """

    name: str
    path: str
    format: str
    text_key: str
    max_bytes: int
    licences: tuple[str, ...]
    tfds_dir: str
    hub_dir: str


@dataclasses.dataclass(frozen=True)
class Part:
    """A file or a piece of one.

    Attributes:
      format: a key of `registry.FORMATS` or `registry.SCHEMES`.
      name: what its documents' ids begin with: relative to the source's folder.
      url: what to open: a local path, or a URL.
      start, stop: the records that begin in these bytes (examples, for datasets); stop -1 = to the end.
      size: bytes of input, about. file_size: of the whole file, compressed as it is; 0 when unknown.
      licence_files: code: the licence files nearest to it.
    """

    format: str
    name: str
    url: str
    start: int = 0
    stop: int = -1
    size: int = 0
    file_size: int = 0
    licence_files: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Unit:
    """What one task reads: parts in order, and at most `max_bytes` of text (0 = all)."""

    parts: tuple[Part, ...]
    max_bytes: int = 0


@dataclasses.dataclass
class SourceStats:
    """What reading a source met.

    Attributes:
      skipped: lost records by reason. repaired: the same of records that are kept in a changed form.
      examples: the first of each reason, `ID: REASON`.
      no_field: of the first part of which no record has the field `text_key`: what it has; "" = no such part.
    """

    documents: int = 0
    bytes: int = 0
    skipped: dict[str, int] = dataclasses.field(default_factory=dict)
    repaired: dict[str, int] = dataclasses.field(default_factory=dict)
    examples: list[str] = dataclasses.field(default_factory=list)
    no_field: str = ""

    def skip(self, reason: str, doc_id: str, count: int = 1) -> None:
        """Counts records that are left out."""
        self._note(self.skipped, reason, doc_id, count)

    def repair(self, reason: str, doc_id: str) -> None:
        """Counts a record that is kept in a changed form."""
        self._note(self.repaired, reason, doc_id, 1)

    def merge(self, other: "SourceStats") -> None:
        """Adds what another unit of the source met; in the order of units the examples are always the same."""
        self.documents += other.documents
        self.bytes += other.bytes
        self.no_field = self.no_field or other.no_field
        for mine, theirs in ((self.skipped, other.skipped), (self.repaired, other.repaired)):
            for reason, count in theirs.items():
                mine[reason] = mine.get(reason, 0) + count
        for example in other.examples:
            self._show(example, example.partition(": ")[2])

    def _note(self, counts: dict[str, int], reason: str, doc_id: str, count: int) -> None:
        counts[reason] = counts.get(reason, 0) + count
        self._show(f"{doc_id}: {reason}", reason)

    def _show(self, example: str, reason: str) -> None:
        if sum(shown.endswith(f": {reason}") for shown in self.examples) < _EXAMPLES:
            self.examples.append(example)

    def summary(self) -> str:
        """One line for people."""
        line = f"{self.documents:,} documents, {self.bytes / 1e6:.1f} MB"
        for verb, counts in (("skipped", self.skipped), ("repaired", self.repaired)):
            for reason, count in counts.items():
                line += f"; {verb} {count:,}: {reason}"
        return line + (f" (first: {self.examples[0]})" if self.examples else "")


class Reader(typing.Protocol):
    """What a module of a format has. `GRAIN`: its files may be cut at multiples of this many bytes; 0 = never."""

    GRAIN: int

    def read(self, part: Part, spec: SourceSpec, stats: SourceStats) -> typing.Iterator[Document]:
        """The documents of a part, in order; what is broken costs itself alone and goes into `stats`."""


def to_text(raw: bytes, doc_id: str, stats: SourceStats) -> str:
    """UTF-8, what a byte order mark tells, or windows-1252 where that alone makes sense, counted as repaired.

    Else what is not UTF-8 becomes U+FFFD, and is counted too.
    """
    for mark, charset in BYTE_ORDER_MARKS:
        if raw.startswith(mark):
            raw = raw[len(mark) :]
            if charset != "utf-8":
                return raw.decode(charset, "replace")
    try:
        return raw.decode()
    except UnicodeDecodeError:
        western = _western(raw)
        stats.repair(NOT_UTF8 if western is None else WESTERN, doc_id)
        return raw.decode("utf-8", "replace") if western is None else western


def _western(raw: bytes) -> str | None:
    """Text in windows-1252, if nothing in it is UTF-8 beyond ASCII and its other characters are few and common."""
    beyond = raw.translate(None, bytes(range(128)))
    if (
        8 * len(beyond) > len(raw)
        or beyond.translate(None, _COMMON_1252)
        or not raw.decode("utf-8", "ignore").isascii()
    ):
        return None
    if _TORN_UTF8.search(raw) or _FOREIGN_WORD.search(raw):
        return None
    return raw.decode("cp1252")


_TORN_UTF8 = re.compile(rb"\xe2\x80|[\xc2-\xf4][\x80-\xbf]{0,2}\Z")
_FOREIGN_WORD = re.compile(rb"[\xc0-\xff]{3}|(?<![A-Za-z])[\xc0-\xff]{2}(?![A-Za-z])")  # as another alphabet looks


_COMMON_1252 = (  # signs of typography, and letters of French, German, Italian, Portuguese, Scandinavian and Spanish
    "\u20ac\u2026\u2018\u2019\u201c\u201d\u2022\u2013\u2014\u2122\xa0\xa3\xa7\xa9\xab\xad\xae\xb0\xb1\xb5\xb7\xbb\xbc\xbd\xbe\xd7"
    "\u0152\u0153\xc0\xc4\xc5\xc6\xc7\xc9\xd1\xd6\xd8\xdc\xdf\xe0\xe1\xe2\xe3\xe4\xe5\xe6\xe7\xe8\xe9\xea\xeb\xec\xed\xee\xef"
    "\xf1\xf2\xf3\xf4\xf5\xf6\xf8\xf9\xfa\xfb\xfc"
).encode("cp1252")


def site_of(url: str) -> str:
    """The host of a URL without `www.`; "" when it has none."""
    try:
        return re.sub(r"^www\d?\.", "", urllib.parse.urlsplit(url).hostname or "")
    except ValueError:
        return ""


# Metadata -> what records, rows and front matter call it, the first that is there wins.
_FIELDS = {
    "url": ("url", "source_url", "permalink"),
    "path": ("path", "file_path", "max_stars_repo_path"),
    "licence": ("licence", "license", "spdx", "licenses", "detected_licenses", "max_stars_repo_licenses"),
    "language": ("language", "lang", "programming_language"),
    "title": ("title",),
    "date": ("date", "timestamp", "published", "created"),
    "format": ("format",),
}
FIELDS = frozenset(field for fields in _FIELDS.values() for field in fields)
_DOCUMENT_FORMATS = ("text", "html", "markdown", "code")


def known_metadata(record: collections.abc.Mapping[str, typing.Any]) -> dict[str, str]:
    """What documents carry of a record's fields, as strings; lists (of licences) become `A OR B`."""
    found = {}
    for key, fields in _FIELDS.items():
        for field in fields:
            value = record.get(field)
            if isinstance(value, list | tuple):
                value = " OR ".join(str(item) for item in value)
            value = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
            if value is not None and not isinstance(value, dict) and (text := str(value)).strip():
                found[key] = text
                break
    if found.get("format") not in _DOCUMENT_FORMATS:
        found.pop("format", None)
    return found
