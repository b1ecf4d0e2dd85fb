"""Makes a document of a row with fields, for jsonl, parquet and datasets."""

import typing
from collections.abc import Mapping

from jaxlm.corpus.sources import base, languages
from jaxlm.corpus.stage import Document


def document(text: str, doc_id: str, row: Mapping[str, typing.Any], text_key: str) -> Document:
    """Returns a row as a document.

    Its format is the row's own field `format`; else html if `text_key` holds "html", code if the row's path is a source
    file's, and text otherwise.
    """
    metadata = base.known_metadata(row)
    if "format" not in metadata:
        language = languages.of_file(metadata["path"]) if "path" in metadata else ""
        if language:
            metadata["language"] = language
        metadata["format"] = "html" if "html" in text_key.lower() else "code" if language else "text"
    return Document(text=text, id=doc_id, metadata=metadata)


def no_text(key: str) -> str:
    """Returns the reason for which a row without text is skipped."""
    return f"no text in field '{key}'"
