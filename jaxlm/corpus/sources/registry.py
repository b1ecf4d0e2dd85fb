"""Which module reads which format. To add a format, add a module and one line here.

A module is imported when it is first used, so that a run imports the libraries of its own sources only.
"""

import importlib

from jaxlm.corpus.sources.base import Reader

# Format -> module in this folder, suffixes of its files. Any may be compressed (see `streams.COMPRESSIONS`).
FORMATS = {
    "text": ("text", (".txt", ".rst", ".adoc")),
    "jsonl": ("jsonl", (".jsonl", ".ndjson")),
    "parquet": ("parquet", (".parquet",)),
    "markdown": ("text", (".md", ".markdown")),
    "html": ("html", (".html", ".htm", ".xhtml")),
    "warc": ("warc", (".warc", ".warc.wet")),
    "mediawiki": ("mediawiki", (".xml",)),
    "code": ("code", ()),
}
# What begins with `NAME:` in place of a path; the module's `parts` plans it.
SCHEMES = {"embedded": "embedded", "tfds": "tfds", "hub": "hub"}
# Text that can be trained on as it is, without `jaxlm prepare`.
PLAIN = ("text", "jsonl", "parquet")


def reader(format_name: str) -> Reader:
    """Returns the module that reads a format or a scheme."""
    module = FORMATS[format_name][0] if format_name in FORMATS else SCHEMES[format_name]
    return importlib.import_module(f"jaxlm.corpus.sources.{module}")


def scheme(path: str) -> str:
    """Returns `hub` for `hub:REPO`; "" for a path or a URL."""
    head = path.partition(":")[0]
    return head if head in SCHEMES else ""
