"""Finds exact duplicates: texts that differ only in spacing and case. The best-ranked copy stays.

Sorts on disk and reads in order, because grouping would hold every distinct text in memory.
"""

import pathlib

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from jaxlm.corpus.dedup.sql import quoted

_BATCH = 1 << 16


def find(connection: duckdb.DuckDBPyConnection, folder: pathlib.Path) -> None:
    """Finds the exact duplicates in `sign/*.parquet`, and writes one row to `exact.parquet` for each document to remove.

    The columns are doc (the removed document), keeper (the copy that stays) and keeper_id (the id of that copy).
    """
    sign = f"read_parquet({quoted(folder / 'sign/*.parquet')})"
    rows = connection.sql(f"SELECT h0, h1, doc FROM {sign} WHERE exact ORDER BY h0, h1, rank, tie, doc")
    schema = pa.schema([("doc", pa.uint64()), ("keeper", pa.uint64())])
    last = np.zeros(3, np.uint64)  # hash and keeper of the group that the batch before ended in
    began = False
    with pq.ParquetWriter(folder / "copies.parquet", schema) as writer:
        for batch in rows.to_arrow_reader(_BATCH):
            h0, h1, doc = (column.to_numpy(zero_copy_only=False) for column in batch.columns)
            if not len(doc):
                continue
            before0, before1 = np.concatenate([last[:1], h0[:-1]]), np.concatenate([last[1:2], h1[:-1]])
            same = (h0 == before0) & (h1 == before1)
            same[0] &= began
            group = np.maximum.accumulate(np.where(same, -1, np.arange(len(doc))))
            keeper = np.where(group < 0, last[2], doc[group])
            writer.write_table(pa.table({"doc": doc[same], "keeper": keeper[same]}, schema=schema))
            last, began = np.array([h0[-1], h1[-1], keeper[-1]], np.uint64), True
    connection.execute(f"""
        COPY (
            SELECT c.doc, c.keeper, s.id AS keeper_id FROM read_parquet({quoted(folder / "copies.parquet")}) c
            JOIN {sign} s ON c.keeper = s.doc ORDER BY c.doc
        ) TO {quoted(folder / "exact.parquet")} (FORMAT parquet)""")
    (folder / "copies.parquet").unlink()
