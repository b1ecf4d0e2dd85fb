"""Names the module that reads each format; one is imported when first used, for its libraries. Add a format here."""

import importlib
import types
from collections.abc import Mapping

# Format -> module in this folder, suffixes of its files. Any may be compressed (see `streams.COMPRESSIONS`).
FORMATS = {
    "text": ("text", (".txt",)),
    "jsonl": ("jsonl", (".jsonl", ".ndjson")),
    "parquet": ("parquet", (".parquet",)),
    "markdown": ("text", (".md", ".markdown")),
    "markup": ("text", (".rst", ".adoc")),  # apart from text: what `PLAIN` means must not change under finished data
    "html": ("html", (".html", ".htm", ".xhtml")),
    "warc": ("warc", (".warc", ".warc.wet")),
    "mediawiki": ("mediawiki", (".xml",)),
    "code": ("code", ()),
}
# Suffixes of documents in formats that are not read -> how to make them readable.
DOCUMENTS = {
    (".pdf", ".ps"): "convert with pdftotext or docling",
    (".docx", ".doc", ".odt", ".pptx", ".rtf", ".epub", ".tex", ".texi", ".org"): "convert with pandoc -t markdown",
    (".mhtml",): "save as .html",
    (".ipynb",): "convert with jupyter nbconvert --to markdown",
}
# The same of what may hold text.
CONTAINERS = {
    (".csv", ".tsv", ".json", ".xlsx", ".xml"): 'make a .jsonl of the texts, a line {"text": "..."} each',
    (".zip", ".tar", ".tgz", ".7z", ".rar", ".gz", ".xz", ".bz2", ".zst"): "unpack first",
}
# The same of names that tell no format.
UNNAMED = {("no suffix",): "name those that are text NAME.txt"}
# What begins with `NAME:` in place of a path; the module's `parts` plans it.
SCHEMES = {"embedded": "embedded", "tfds": "tfds", "hub": "hub"}
# Text that can be trained on as it is, without `jaxlm prepare`.
PLAIN = ("text", "jsonl", "parquet")
_SHOWN = 5  # suffixes, in one line


def reader(format_name: str) -> types.ModuleType:
    """Returns the module of a format or scheme, with `read` and `GRAIN` (bytes at whose multiples files may be cut, or 0)."""
    module = FORMATS[format_name][0] if format_name in FORMATS else SCHEMES[format_name]
    return importlib.import_module(f"jaxlm.corpus.sources.{module}")


def scheme(path: str) -> str:
    """Returns `hub` for `hub:REPO`; "" for a path or a URL."""
    head = path.partition(":")[0]
    return head if head in SCHEMES else ""


def in_words(counts: Mapping[str, int]) -> str:
    """Returns the numbers of files by suffix, "312 .pdf, 4 .ps and 7 other"."""
    most = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    named = ", ".join(f"{count:,} {name}" for name, count in most[:_SHOWN])
    others = sum(count for _, count in most[_SHOWN:])
    return f"{named} and {others:,} other" if others else named
