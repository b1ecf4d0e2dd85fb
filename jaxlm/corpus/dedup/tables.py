"""Writes the tables of hashes and ranks of documents that deduplication needs.

`doc` is a document's place: task << 32 | row. Documents are ranked: of two duplicates the one with the lower (`rank`,
`tie`) stays. `rank` and `tie` depend only on the document, so that the order of shards and of workers does not matter.
"""

import pathlib
import typing
from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from jaxlm.corpus.dedup import lines as repeats
from jaxlm.corpus.dedup import signatures
from jaxlm.corpus.stage import Document

ROW_BITS = 32


class Signer:
    """Writes, for one task's documents, the tables in which duplicates are looked for later.

    They are `sign/TASK.parquet`, `sketch/TASK.u32` and `lines/TASK.parquet`.

    Args:
      folder: where `sign/`, `sketch/` and `lines/` are made.
      task: the number of the task.
      priority: the priority of the source; of two duplicates the one with the higher priority stays.
      stages: the stages `exact`, `near` and `lines` that the source takes part in -> their settings.
    """

    def __init__(self, folder: pathlib.Path, task: int, priority: int, stages: Mapping[str, Mapping[str, typing.Any]]):
        self._task, self._priority = task, priority
        self._exact, self._near, self._lines = "exact" in stages, stages.get("near"), stages.get("lines")
        for name in ("sign", "sketch", "lines"):
            (folder / name).mkdir(exist_ok=True)
        self._bands = self._near["bands"] if self._near else 0
        fields = [(name, pa.uint64()) for name in ("doc", "rank", "tie", "site", "h0", "h1", "sketch_start")]
        fields += [("sketch_len", pa.uint32()), ("exact", pa.bool_()), ("id", pa.string())]
        fields += [(f"b{i}", pa.uint64()) for i in range(self._bands)]
        self._sign = Columns(folder / "sign" / f"{task:06d}.parquet", pa.schema(fields))
        schema = pa.schema([("doc", pa.uint64()), ("key", pa.uint64()), ("paragraph", pa.bool_())])
        self._repeats = Columns(folder / "lines" / f"{task:06d}.parquet", schema)
        self._sketches = open(folder / "sketch" / f"{task:06d}.u32", "wb")
        self._row = self._place = 0

    def add(self, document: Document) -> None:
        """Takes the next document; rows count from 0. No line of source code counts as boilerplate."""
        text, source, site = document.text, document.metadata["source"], document.metadata.get("site", "")
        doc = self._task << ROW_BITS | self._row
        self._row += 1
        h0, h1 = signatures.normalised_hash(text)
        words = signatures.word_hashes(text)
        # Higher priority first, then the longer text, then by content.
        rank = (127 - self._priority) << 56 | (0xFFFFFF - min(len(words), 0xFFFFFF)) << 32 | h0 >> 32
        bands, sketch = [None] * self._bands, np.empty(0, np.uint32)
        if self._near and len(shingles := signatures.shingles(words, self._near["ngram"])):
            bands = signatures.band_hashes(shingles, self._bands, self._near["rows"]).tolist()
            sketch = signatures.sketch(shingles)
            self._sketches.write(sketch.tobytes())
        tie, site_hash = signatures.hash64(f"{source}\0{document.id}"), signatures.hash64(f"{source}\0{site}")
        self._sign.add((doc, rank, tie, site_hash, h0, h1, self._place, len(sketch), self._exact, document.id, *bands))
        self._place += len(sketch)
        if self._lines and document.metadata.get("format") != "code":
            for key, paragraph in repeats.keys(text, source, site, self._lines):
                self._repeats.add((doc, key, paragraph))

    def finish(self) -> None:
        """Closes the files."""
        self._sign.close()
        self._repeats.close()
        self._sketches.close()


class Columns:
    """Writes a parquet file row by row, in groups of even size, so that a reader holds kilobytes for each group."""

    def __init__(self, path: pathlib.Path, schema: pa.Schema):
        self._schema, self._rows = schema, []
        self._writer = pq.ParquetWriter(path, schema, compression="zstd")

    def add(self, row: tuple) -> None:
        self._rows.append(row)
        if len(self._rows) >= 1 << 15:
            self._flush()

    def _flush(self) -> None:
        columns = zip(*self._rows, strict=True) if self._rows else [()] * len(self._schema)
        arrays = [pa.array(column, field.type) for column, field in zip(columns, self._schema, strict=True)]
        self._writer.write_table(pa.Table.from_arrays(arrays, schema=self._schema))
        self._rows = []

    def close(self) -> None:
        self._flush()
        self._writer.close()
