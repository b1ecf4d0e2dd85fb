"""Splits a source into units of work, and reads them. Every record is yielded, or counted in `SourceStats.skipped`."""

import collections
import contextlib
import sys
import zlib
from collections.abc import Iterator, Sequence

from jaxlm.config import ConfigError
from jaxlm.corpus.sources import base, files, registry
from jaxlm.corpus.sources.base import Part, SourceSpec, SourceStats, Unit
from jaxlm.corpus.stage import Document

# With max_bytes, each unit that is read gives task_bytes / 16 of text; the units are spread evenly over the source.
_SAMPLED_PART = 16
_UNITS = 16  # of a small source
_LEAST_BYTES = 2_000_000  # of a unit: starting a task takes a tenth of a second


def split_source(
    spec: SourceSpec, task_bytes: int, others: collections.Counter[str] | None = None, spread: bool = True
) -> list[Unit]:
    """Splits a source into units of about `task_bytes`, in a fixed order. Raises ConfigError if it has no files.

    With `spec.max_bytes`, returns units spread evenly over the source. Counts files without a known format in `others`.
    spread: cut a small source into several units too, so that it uses several cores. Units depend on no number of cores.
    """
    parts = find_parts(spec, task_bytes, others)
    least = max(_LEAST_BYTES, sum(part.size for part in parts) // _UNITS)
    if spread and least < task_bytes:
        task_bytes = least
        if any(part.size > task_bytes for part in parts):
            parts = find_parts(spec, task_bytes)
    grouped, size = [[]], 0
    for part in parts:
        if grouped[-1] and size + part.size > task_bytes:
            grouped.append([])
            size = 0
        grouped[-1].append(part)
        size += part.size
    made = [Unit(tuple(group)) for group in grouped]
    return _sample(made, spec.max_bytes, task_bytes) if spec.max_bytes else made


def read_unit(unit: Unit, spec: SourceSpec, stats: SourceStats) -> Iterator[Document]:
    """Yields a unit's documents in a fixed order; none is empty, each can be encoded as UTF-8.

    Broken records are counted in `stats`. Raises ConfigError if a dataset lacks the field; OSError if the file system
    failed.
    """
    read_bytes = 0
    for part in unit.parts:
        try:
            for document in registry.reader(part.format).read(part, spec, stats):
                size = _checked_size(document, stats)
                if size is None:
                    continue
                if unit.max_bytes and read_bytes and read_bytes + size > unit.max_bytes:
                    return
                read_bytes += size
                stats.documents += 1
                stats.bytes += size
                document.metadata["source"] = spec.name
                document.metadata.setdefault("site", base.site_of(document.metadata.get("url", "")) or spec.name)
                yield document
        except PermissionError:  # one such file must not cost the others
            stats.skip("no permission to read it", part.name)


_FIRST_RECORDS = 100
_LOOKED_AT = 64  # files of a source, spread over all


class _Looked(SourceStats):
    """Raises `_Enough` once a reader has skipped its first records."""

    def skip(self, reason: str, doc_id: str, count: int = 1) -> None:
        super().skip(reason, doc_id, count)
        if self.skipped.total() >= _FIRST_RECORDS:
            raise _Enough


class _Enough(Exception):
    pass


def check_fields(spec: SourceSpec, units: Sequence[Unit]) -> None:
    """Raises ConfigError if one of 64 files, spread over all, has no text in `text_key` of its first 100 records."""
    parts = [part for unit in units for part in unit.parts if part.format in registry.RECORDS and not part.start]
    for part in parts[:: -(-len(parts) // _LOOKED_AT) or 1]:
        looked = _Looked()
        with contextlib.suppress(_Enough):
            if next(registry.reader(part.format).read(part, spec, looked), None) is not None:
                continue
        if looked.no_field:
            raise ConfigError(looked.no_field)


def find_parts(spec: SourceSpec, task_bytes: int, others: collections.Counter[str] | None = None) -> list[Part]:
    """Returns a source's parts in order; arguments and errors are those of `split_source`."""
    if scheme := registry.scheme(spec.path):
        return registry.reader(scheme).parts(spec, task_bytes)
    choices = {"auto": registry.AUTO, "plain": registry.PLAIN}
    formats = choices.get(spec.format, (spec.format,))
    if spec.format == "code":
        from jaxlm.corpus.sources import code

        listed = code.find(spec.path, spec.exclude, others)
    else:
        listed = files.find(spec.path, *formats, others=others, exclude=spec.exclude)
    return [
        part
        for file in listed
        for part in files.cut(file, files.format_of(file.name, formats) or spec.format, task_bytes)
    ]


def _sample(made: list[Unit], max_bytes: int, task_bytes: int) -> list[Unit]:
    count = min(len(made), max(1, -(-max_bytes * _SAMPLED_PART // task_bytes)))
    chosen = [made[i * len(made) // count] for i in range(count)]
    sizes = [sum(part.size for part in unit.parts) for unit in chosen]
    return [
        Unit(unit.parts, max(1, max_bytes * size // max(1, sum(sizes))))
        for unit, size in zip(chosen, sizes, strict=True)
    ]


def _checked_size(document: Document, stats: SourceStats) -> int | None:
    """Repairs lone surrogates and returns the text's size in bytes; None for an empty text, which counts as skipped."""
    text = document.text
    if not text.strip():
        stats.skip("empty", document.id)
        return None
    if text.isascii():
        return len(text)
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        stats.repair("lone surrogates became '?'", document.id)
        raw = text.encode("utf-8", "replace")
        document.text = raw.decode()
        return len(raw)


def iterate_documents(
    spec: str,
    *,
    text_key: str = "text",
    tfds_dir: str | None = None,
    max_bytes: int | None = None,
    stats: SourceStats | None = None,
) -> Iterator[tuple[str, str]]:
    """Yields (doc_id, text) of a source (see `jaxlm.corpus.sources`); fills `stats`. Raises ConfigError if there are none."""
    stats = SourceStats() if stats is None else stats
    wanted = SourceSpec(spec, spec, "plain", text_key, max_bytes or 0, tfds_dir=tfds_dir or "")
    whole = Unit(tuple(find_parts(wanted, sys.maxsize)), wanted.max_bytes)
    yield from ((document.id, document.text) for document in read_unit(whole, wanted, stats))
    if not stats.documents:
        why = stats.no_field or "check the path and text_key"
        raise ConfigError(f"source '{spec}' gave no document ({stats.summary()}); {why}")


def source_signature(spec: str) -> str:
    """Returns a line that changes with the names or sizes of a source's files; "" for a dataset."""
    if registry.scheme(spec):
        return ""
    listing = [f"{file.name}={file.size}" for file in files.find(spec, *registry.PLAIN)]
    return f"crc32 {zlib.crc32(';'.join(listing).encode()):08x} of {len(listing)} file names and sizes"
