"""Shared by all readers of sources: the specification, the statistics, units of work, and bytes -> text."""

import dataclasses
import re
import urllib.parse
from collections import Counter
from collections.abc import Iterable, Mapping

from jaxlm.config import DataConfig, PrepareSourceConfig
from jaxlm.corpus.sources import registry
from jaxlm.corpus.stage import Document

# A line, page or WARC record beyond this is left out, so that memory has a bound.
MAX_RECORD_BYTES = 16 << 20
BAD_BYTES = "bytes that the declared charset lacks became U+FFFD"
NOT_UTF8 = "bytes that are not UTF-8 became U+FFFD"
WRONG_CHARSET = "not in the declared charset: read as UTF-8"
READ_AS = "not UTF-8: read as {}"
BYTE_ORDER_MARKS = ((b"\xef\xbb\xbf", "utf-8"), (b"\xff\xfe", "utf-16-le"), (b"\xfe\xff", "utf-16-be"))
_EXAMPLES = 5  # of each reason
_SHOWN_FIELDS = 10
_FEW_BYTES = 8  # beyond ASCII tell no charset


@dataclasses.dataclass(frozen=True)
class SourceSpec:
    """A source as the config describes it."""

    name: str
    path: str  # file, folder, glob, URL that fsspec knows, or tfds:NAME, hub:REPO, embedded:NAME
    format: str = "auto"  # a key of `registry.FORMATS`, or "auto": by each file's name
    text_key: str = "text"
    max_bytes: int = 0  # of text; 0 for all
    exclude: tuple[str, ...] = ()  # names below the path, with wildcards
    licences: tuple[str, ...] = ()  # SPDX ids; () for all
    tfds_dir: str = ""  # "": TFDS's own
    hub_dir: str = ""  # holds datasets as REPO/**; "": the hub

    @classmethod
    def of(cls, name: str, source: PrepareSourceConfig, data: DataConfig) -> "SourceSpec":
        own = (source.path, source.format, source.text_key, source.max_bytes, source.exclude, source.licences)
        return cls(name, *own, data.tfds_dir, data.hub_dir)


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """A file, or a piece of one."""

    format: str  # a key of `registry.FORMATS` or `SCHEMES`
    name: str  # relative to the source's folder; the ids begin with it
    url: str
    start: int = 0  # in bytes (datasets: in examples): the part has the records that begin at this place or after it
    stop: int = -1  # -1: the end
    size: int = 0  # bytes of input, roughly
    file_size: int = 0  # as stored; 0 if unknown
    licence_files: tuple[str, ...] = ()  # of code: the nearest ones above the file


@dataclasses.dataclass(frozen=True)
class Unit:
    """What one task reads: these parts in this order, and at most `max_bytes` bytes of text (0 for all)."""

    parts: tuple[Part, ...]
    max_bytes: int = 0


@dataclasses.dataclass
class SourceStats:
    """Counts documents read from a source, and records skipped or repaired."""

    documents: int = 0
    bytes: int = 0
    skipped: Counter[str] = dataclasses.field(default_factory=Counter)  # reason -> records
    repaired: Counter[str] = dataclasses.field(default_factory=Counter)  # kept in a changed form
    # Template of a wiki -> how often its words were left out.
    lost: Counter[str] = dataclasses.field(default_factory=Counter)
    examples: list[str] = dataclasses.field(default_factory=list)  # the first of each reason, as `ID: REASON`
    no_field: str = ""  # lists the fields of a file's records without a field `text_key`

    def skip(self, reason: str, doc_id: str, count: int = 1) -> None:
        self._note(self.skipped, reason, doc_id, count)

    def repair(self, reason: str, doc_id: str) -> None:
        self._note(self.repaired, reason, doc_id, 1)

    def _note(self, counts: Counter[str], reason: str, doc_id: str, count: int) -> None:
        counts[reason] += count
        if sum(shown.endswith(f": {reason}") for shown in self.examples) < _EXAMPLES:
            self.examples.append(f"{doc_id}: {reason}")

    def summary(self) -> str:
        """Returns the counts in one line for users."""
        line = f"{self.documents:,} documents, {self.bytes / 1e6:.1f} MB"
        for verb, counts in (("skipped", self.skipped), ("repaired", self.repaired)):
            for reason, count in counts.items():
                line += f"; {verb} {count:,}: {reason}"
        return line + (f" (first: {self.examples[0]})" if self.examples else "")


_ASCII = bytes(range(128))
_BEYOND_ASCII = re.compile(r"[^\x00-\x7f]+")
_CONTROLS = re.compile(r"[\x00-\x08\x0e-\x1f\x7f-\x9f]")
_TORN_UTF8 = re.compile(rb"\xe2\x80|[\xc2-\xf4][\x80-\xbf]{0,2}\Z")
_FOREIGN_WORD = re.compile(rb"[\xc0-\xff]{3}|(?<![A-Za-z])[\xc0-\xff]{2}(?![A-Za-z])")  # as another alphabet looks
_COMMON_1252 = (  # signs of typography, and letters of French, German, Italian, Portuguese, Scandinavian and Spanish
    "\u20ac\u2026\u2018\u2019\u201c\u201d\u2022\u2013\u2014\u2122\xa0\xa3\xa7\xa9\xab\xad\xae\xb0\xb1\xb5\xb7\xbb\xbc\xbd\xbe\xd7"
    "\u0152\u0153\xc0\xc4\xc5\xc6\xc7\xc9\xd1\xd6\xd8\xdc\xdf\xe0\xe1\xe2\xe3\xe4\xe5\xe6\xe7\xe8\xe9\xea\xeb\xec\xed\xee\xef"
    "\xf1\xf2\xf3\xf4\xf5\xf6\xf8\xf9\xfa\xfb\xfc"
).encode("cp1252")


def to_text(raw: bytes, doc_id: str, stats: SourceStats) -> str:
    """Returns bytes as text, decoded by the byte order mark, as UTF-8, or in the charset that they look like.

    Else each bad byte becomes U+FFFD. `stats` counts other charsets and bad bytes as repaired.
    """
    for mark, charset in BYTE_ORDER_MARKS:
        if raw.startswith(mark):
            raw = raw[len(mark) :]
            if charset != "utf-8":
                return raw.decode(charset, "replace")
    try:
        return raw.decode()
    except UnicodeDecodeError:
        beyond = raw.translate(None, _ASCII)
    if _is_western(raw, beyond):
        stats.repair(READ_AS.format("windows-1252"), doc_id)
        return raw.decode("cp1252")
    text = raw.decode("utf-8", "replace")
    if len(beyond) >= _FEW_BYTES and mostly_damaged(text):
        from resiliparse.parse import encoding  # here, because training reads texts too, and pages never

        name = encoding.detect_encoding(raw)
        guessed = encoding.bytes_to_str(raw, name, errors="replace", fallback_encodings=())
        # Windows-1252 has a letter for nearly every byte: what `_is_western` refused is no text in it.
        if name != "cp1252" and "\ufffd" not in guessed and not _CONTROLS.search(guessed):
            stats.repair(READ_AS.format(name), doc_id)
            return guessed
    stats.repair(NOT_UTF8, doc_id)
    return text


def mostly_damaged(text: str) -> bool:
    """Returns True if more than half of the characters beyond ASCII are bytes that are not UTF-8."""
    return 2 * text.count("\ufffd") > sum(map(len, _BEYOND_ASCII.findall(text)))


def _is_western(raw: bytes, beyond: bytes) -> bool:
    """Returns False if the bytes beyond ASCII are UTF-8, or many, or uncommon characters in windows-1252."""
    few = 8 * len(beyond) <= len(raw) and not beyond.translate(None, _COMMON_1252)
    return few and raw.decode("utf-8", "ignore").isascii() and not (_TORN_UTF8.search(raw) or _FOREIGN_WORD.search(raw))


def site_of(url: str) -> str:
    """Returns the host of a URL without `www.`; "" if it has none."""
    try:
        return re.sub(r"^www\d?\.", "", urllib.parse.urlsplit(url).hostname or "")
    except ValueError:
        return ""


# Metadata -> its keys in records, rows and front matter; the first key that is there wins.
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


def known_metadata(record: Mapping) -> dict[str, str]:
    """Returns the fields of a record that become a document's metadata, as strings. A list (of licences) becomes `A OR B`."""
    metadata = {}
    for key, fields in _FIELDS.items():
        for field in fields:
            value = record.get(field)
            if isinstance(value, list | tuple):
                value = " OR ".join(str(item) for item in value)
            value = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
            if value is not None and not isinstance(value, dict) and (text := str(value)).strip():
                metadata[key] = text
                break
    if metadata.get("format") not in _DOCUMENT_FORMATS:
        metadata.pop("format", None)
    return metadata


def document_of_row(text: str, doc_id: str, row: Mapping, text_key: str) -> Document:
    """Returns a row as a document. Its format comes from the row, from `text_key` ("html") or from the row's path."""
    metadata = known_metadata(row)
    if "format" not in metadata:
        language = registry.language_of(metadata["path"]) if "path" in metadata else ""
        if language:
            metadata["language"] = language
        metadata["format"] = "html" if "html" in text_key.lower() else "code" if language else "text"
    return Document(text=text, id=doc_id, metadata=metadata)


def text_keys(record: Mapping, text_key: str) -> list[str]:
    """Returns the fields that `text_key` names: one, or several with commas between them."""
    return [text_key] if text_key in record else [key.strip() for key in text_key.split(",")]


def text_of(record: Mapping, text_key: str) -> str | None:
    """Returns the fields' texts, joined by blank lines; None if one is missing or is no string."""
    texts = [record.get(key) for key in text_keys(record, text_key)]
    return "\n\n".join(texts) if all(isinstance(text, str) for text in texts) else None


def no_text(key: str) -> str:
    return f"no text in field '{key}'"


def no_field(url: str, key: str, fields: Iterable[str]) -> str:
    """Returns the message that a file has no text in the field `key`, with the fields that it has."""
    shown = sorted(fields)
    more = f" and {len(shown) - _SHOWN_FIELDS} more" if len(shown) > _SHOWN_FIELDS else ""
    flags = "--config.prepare.sources.SOURCE.text_key=FIELD, or --config.data.text_key=FIELD for data.path"
    listed = ", ".join(shown[:_SHOWN_FIELDS]) + more
    return f"{url} has no text in field '{key}'; its fields are {listed}: set text_key ({flags})"
