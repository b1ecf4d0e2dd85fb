"""Reads a source whose text can be trained on as it is (.txt, .jsonl, .parquet, datasets), without `jaxlm prepare`."""

import sys
import zlib
from collections.abc import Iterator

from jaxlm.config import ConfigError
from jaxlm.corpus.sources import files, registry
from jaxlm.corpus.sources.base import SourceSpec, SourceStats, Unit
from jaxlm.corpus.sources.units import find_parts, read_unit


def iterate_documents(
    spec: str,
    *,
    text_key: str = "text",
    tfds_dir: str | None = None,
    max_bytes: int | None = None,
    stats: SourceStats | None = None,
) -> Iterator[tuple[str, str]]:
    """Yields (doc_id, text) of a source's documents, in order.

    Args:
      spec: the source's path, as in the docstring of `jaxlm.corpus.sources`.
      text_key: the field of .jsonl and .parquet records that holds the text.
      tfds_dir: TFDS's data_dir (default: TFDS's own).
      max_bytes: stop after this many bytes of text (default: all; embedded sources have a limit of their own).
      stats: filled while reading.

    Raises:
      ConfigError: the source does not exist, has no such field or gave no document.
    """
    stats = SourceStats() if stats is None else stats
    wanted = SourceSpec(spec, spec, "plain", text_key, max_bytes or 0, tfds_dir=tfds_dir or "")
    whole = Unit(tuple(find_parts(wanted, sys.maxsize)), wanted.max_bytes)
    yield from ((document.id, document.text) for document in read_unit(whole, wanted, stats))
    if not stats.documents:
        raise ConfigError(
            f"source '{spec}' gave no document ({stats.summary()}); {stats.no_field or 'check the path and text_key'}"
        )


def source_signature(spec: str) -> str:
    """Returns one line that changes if the names or sizes of a source's files change; "" if the source is not files.

    A rebuild compares it with the last one. An edit that keeps a file's size is not noticed.
    """
    if registry.scheme(spec):
        return ""
    listing = [f"{file.name}={file.size}" for file in files.find(spec, *registry.PLAIN)]
    return f"crc32 {zlib.crc32(';'.join(listing).encode()):08x} of {len(listing)} file names and sizes"
