"""What jsonl, parquet and datasets have in common: a row with fields becomes a document."""

import typing
from collections.abc import Mapping

from jaxlm.corpus.sources import base, languages
from jaxlm.corpus.stage import Document


def document(text: str, doc_id: str, row: Mapping[str, typing.Any], text_key: str) -> Document:
    """The format is the row's own `format`, or html when `text_key` says so, or code when the row's path does."""
    metadata = base.known_metadata(row)
    if "format" not in metadata:
        language = languages.of_file(metadata["path"]) if "path" in metadata else ""
        if language:
            metadata["language"] = language
        metadata["format"] = "html" if "html" in text_key.lower() else "code" if language else "text"
    return Document(text=text, id=doc_id, metadata=metadata)


def no_text(key: str) -> str:
    """The reason of a skipped row."""
    return f"no text in field '{key}'"
