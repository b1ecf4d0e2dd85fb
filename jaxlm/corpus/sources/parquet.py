"""Parquet: reads the row groups that begin in a part's bytes, a batch at a time."""

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq

from jaxlm.corpus.sources import base, streams
from jaxlm.corpus.sources.base import Part, SourceSpec, SourceStats
from jaxlm.corpus.stage import Document

GRAIN = 1
_BATCH_ROWS = 256


def read(part: Part, spec: SourceSpec, stats: SourceStats) -> Iterator[Document]:
    """Yields a document for each row. Ids: `NAME:ROW` (from 0). Skips all rows if no column of strings is named `text_key`."""
    with streams.open_file(part.url) as f:
        try:
            table = pq.ParquetFile(f)
        except (pa.ArrowException, OSError) as e:
            reason = f"not a readable parquet file ({_damage(e)})"
            if not part.start:  # every part of the file meets this error, which counts once
                stats.skip(reason, part.name)
            return
        schema, row = table.schema_arrow, 0
        fault = _fault(schema, spec.text_key, part.url)
        stats.no_field = stats.no_field or fault
        keys = base.text_keys(dict.fromkeys(schema.names), spec.text_key)
        columns = [*keys, *sorted(base.FIELDS & set(schema.names) - set(keys))]
        for group in range(table.metadata.num_row_groups):
            about = table.metadata.row_group(group)
            if part.start <= _first_byte(about) and (part.stop < 0 or _first_byte(about) < part.stop):
                if fault:
                    stats.skip(base.no_text(spec.text_key), f"{part.name}:{row}", about.num_rows)
                else:
                    yield from _read_group(table, group, row, columns, part, spec, stats)
            row += about.num_rows


def _damage(error: Exception) -> str:
    """Returns what is wrong with a file. Raises errors of the file system again: these alone have an errno."""
    if getattr(error, "errno", None):
        raise error
    return str(error).splitlines()[0]


def _fault(schema: pa.Schema, key: str, url: str) -> str:
    """Returns why the columns can hold no text; "" if they can."""
    for name in base.text_keys(dict.fromkeys(schema.names), key):
        if name not in schema.names:
            return base.no_field(url, name, schema.names)
        kind = schema.field(name).type
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            return f"column '{name}' of {url} holds {kind}, not strings: set text_key"
    return ""


def _first_byte(group: pq.RowGroupMetaData) -> int:
    column = group.column(0)
    return column.dictionary_page_offset or column.data_page_offset


def _read_group(
    table: pq.ParquetFile, group: int, row: int, columns: list[str], part: Part, spec: SourceSpec, stats: SourceStats
) -> Iterator[Document]:
    end = row + table.metadata.row_group(group).num_rows
    try:
        for batch in table.iter_batches(batch_size=_BATCH_ROWS, row_groups=[group], columns=columns):
            names = batch.schema.names
            for values in zip(*(_values(batch.column(name)) for name in names), strict=True):
                record, doc_id = dict(zip(names, values, strict=True)), f"{part.name}:{row}"
                row += 1
                for key in base.text_keys(record, spec.text_key):
                    if isinstance(record[key], bytes):
                        record[key] = base.to_text(record[key], doc_id, stats)
                text = base.text_of(record, spec.text_key)
                if text is None:
                    stats.skip(base.no_text(spec.text_key), doc_id)
                else:
                    yield base.document_of_row(text, doc_id, record, spec.text_key)
    except (pa.ArrowException, OSError) as e:
        stats.skip(f"damaged parquet row group ({_damage(e)})", f"{part.name}:{row}", end - row)


def _values(column: pa.Array) -> list:
    try:
        return column.to_pylist()
    except UnicodeDecodeError:  # Arrow does not check UTF-8: a bad byte is noticed here
        return column.cast(pa.large_binary()).to_pylist()
