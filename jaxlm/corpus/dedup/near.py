"""Near duplicates: MinHash-LSH finds candidates, their sketches decide, and a chain is resolved from its best end.

Of the documents that resemble one another, the best-ranked stays and takes with it only those that resemble *it*: with
A ~ B ~ C but not A ~ C, A stays, B goes and C stays. That is the lexicographically first maximal independent set of the
graph of similar pairs, found in rounds of joins.
"""

import collections
import pathlib
from collections.abc import Iterator

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from jaxlm.corpus.dedup import signatures
from jaxlm.corpus.dedup.sql import quoted
from jaxlm.corpus.dedup.tables import ROW_BITS

ALL_PAIRS = 32  # a bucket up to this size has all its pairs compared
LEADERS = 32  # of a larger one, documents unlike those before them that all others are compared with,
NEIGHBOURS = 4  # and so many next in rank


def find_pairs(
    connection: duckdb.DuckDBPyConnection, folder: pathlib.Path, band: int, bands: int, threshold: float
) -> None:
    """Similar pairs among documents that share the hash of `band` -> `pairs/BAND.parquet`: (better, worse)."""
    columns = ", ".join(f"b{i}" for i in range(bands))
    documents = f"""
        SELECT * FROM read_parquet({quoted(folder / "sign/*.parquet")}, union_by_name = true)
        WHERE b{band} IS NOT NULL AND doc NOT IN (SELECT doc FROM read_parquet({quoted(folder / "exact.parquet")}))"""
    rows = connection.sql(f"""
        SELECT doc, sketch_start, sketch_len, {columns} FROM ({documents})
        WHERE b{band} IN (SELECT b{band} FROM ({documents}) GROUP BY b{band} HAVING count(*) > 1)
        ORDER BY b{band}, rank, tie, doc""")
    sketches = Sketches(folder)
    (folder / "pairs").mkdir(exist_ok=True)
    schema = pa.schema([("better", pa.uint64()), ("worse", pa.uint64())])
    with pq.ParquetWriter(folder / "pairs" / f"{band:03d}.parquet", schema) as writer:
        for bucket in _buckets(rows, band):
            pairs = list(_similar_pairs(bucket, band, threshold, sketches))
            if pairs:
                writer.write_table(pa.Table.from_arrays(list(map(pa.array, zip(*pairs, strict=True))), schema=schema))


def _buckets(rows: duckdb.DuckDBPyRelation, band: int) -> Iterator[np.ndarray]:
    """uint64[documents, 3 + bands], one array for each hash of the band, in its order of ranks."""
    rest = None
    for batch in rows.to_arrow_reader(1 << 14):
        table = np.stack([column.to_numpy(zero_copy_only=False).astype(np.uint64) for column in batch.columns], axis=1)
        table = table if rest is None else np.concatenate([rest, table])
        edges = np.flatnonzero(np.diff(table[:, 3 + band])) + 1
        *whole, rest = np.split(table, edges)
        yield from whole
    if rest is not None and len(rest):
        yield rest


def _similar_pairs(bucket: np.ndarray, band: int, threshold: float, sketches: "Sketches") -> Iterator[tuple[int, int]]:
    docs, bands = bucket[:, 0].tolist(), bucket[:, 3:]
    held = [sketches.read(*row) for row in bucket[:, :3].tolist()] if len(docs) <= ALL_PAIRS else None

    def sketch(i: int) -> np.ndarray:
        return held[i] if held else sketches.read(*bucket[i, :3].tolist())

    leaders: list[int] = []
    for i in range(1, len(docs)):
        if held:
            others = range(i)
        else:
            leaders = leaders or [0]
            others = [*leaders, *(j for j in range(max(0, i - NEIGHBOURS), i) if j not in leaders)]
        mine, alone = sketch(i), True
        for j in others:
            if (bands[i, :band] == bands[j, :band]).any():
                alone = False  # compared with that band already
            elif signatures.similarity(mine, sketch(j)) >= threshold:
                alone = False
                yield docs[j], docs[i]
        if alone and not held and len(leaders) < LEADERS:
            leaders.append(i)


class Sketches:
    """Reads sketches by document, with a bounded number of files open."""

    def __init__(self, folder: pathlib.Path, open_files: int = 256):
        self._folder, self._limit = folder / "sketch", open_files
        self._open: collections.OrderedDict[int, np.memmap] = collections.OrderedDict()

    def read(self, doc: int, start: int, length: int) -> np.ndarray:
        """uint32[length], see `signatures.sketch`."""
        task = doc >> ROW_BITS
        if task not in self._open:
            if len(self._open) >= self._limit:
                self._open.popitem(last=False)
            self._open[task] = np.memmap(self._folder / f"{task:06d}.u32", np.uint32, "r")
        self._open.move_to_end(task)
        return np.asarray(self._open[task][start : start + length])


def resolve(connection: duckdb.DuckDBPyConnection, folder: pathlib.Path) -> None:
    """`pairs/*.parquet` -> `near.parquet`: (doc, keeper, keeper_id), every document that goes and the one that it resembles."""
    connection.execute(f"""
        CREATE TEMP TABLE pairs AS SELECT DISTINCT better, worse FROM read_parquet({quoted(folder / "pairs/*.parquet")});
        CREATE TEMP TABLE gone (doc UBIGINT, keeper UBIGINT);
    """)
    while connection.execute("SELECT count(*) FROM pairs").fetchone()[0]:
        connection.execute("""
            CREATE TEMP TABLE kept AS SELECT DISTINCT better AS doc FROM pairs
            WHERE better NOT IN (SELECT worse FROM pairs);
            CREATE TEMP TABLE going AS SELECT worse AS doc, min(better) AS keeper FROM pairs
            WHERE better IN (SELECT doc FROM kept) GROUP BY worse;
            INSERT INTO gone SELECT * FROM going;
            CREATE TEMP TABLE left_over AS SELECT better, worse FROM pairs
            WHERE better NOT IN (SELECT doc FROM going) AND worse NOT IN (SELECT doc FROM going);
            DROP TABLE pairs; DROP TABLE kept; DROP TABLE going;
            ALTER TABLE left_over RENAME TO pairs;
        """)
    connection.execute(f"""
        COPY (
            SELECT gone.doc, keeper, id AS keeper_id FROM gone
            JOIN (SELECT doc, id FROM read_parquet({quoted(folder / "sign/*.parquet")})) s ON keeper = s.doc ORDER BY gone.doc
        ) TO {quoted(folder / "near.parquet")} (FORMAT parquet)
    """)
    connection.execute("DROP TABLE pairs; DROP TABLE gone;")
