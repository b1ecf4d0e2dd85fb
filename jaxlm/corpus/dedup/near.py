"""Finds exact and near duplicates: MinHash-LSH finds candidate pairs, sketches decide, the best-ranked document stays.

Removes only documents that are similar to one that stays: if A ~ B ~ C but not A ~ C, only B goes (what stays is a
maximal independent set of the graph). `doc` is a document's place: task << 32 | row. A document's rank depends on this
document alone, so the order of shards does not matter. The thresholds are keys: `config/prepare_stages.py`.
"""

import functools
import os
import pathlib
import typing
from collections.abc import Iterator, Mapping

import duckdb
import numpy as np
import pyarrow as pa

from jaxlm.corpus.dedup import compared, signatures
from jaxlm.corpus.dedup import lines as repeats
from jaxlm.corpus.dedup.sql import quoted
from jaxlm.corpus.documents import TableWriter
from jaxlm.corpus.stage import Document

ROW_BITS = 32
_GROUP_ROWS = 1 << 13  # small groups, so that a writer holds ten megabytes, and a reader kilobytes for each
_HASHES = {"use_dictionary": False, "compression": "lz4"}  # zstd and dictionaries hold megabytes for each column


class Signer:
    """Writes a task's tables for deduplication: `sign/TASK.parquet`, `sketch/TASK.u32` and `lines/TASK.parquet`.

    `stages`: the source's stages among `exact`, `near` and `lines` -> their settings.
    """

    def __init__(self, folder: pathlib.Path, task: int, priority: int, stages: Mapping[str, Mapping]):
        self._task, self._priority = task, priority
        self._exact, self._near, self._lines = "exact" in stages, stages.get("near"), stages.get("lines")
        self._bands = self._near["bands"] if self._near else 0
        fields = [(name, pa.uint64()) for name in ("doc", "rank", "tie", "site", "h0", "h1", "sketch_start")]
        fields += [("sketch_len", pa.uint32()), ("exact", pa.bool_()), ("id", pa.string())]
        fields += [(f"b{i}", pa.uint64()) for i in range(self._bands)]
        self._sign = TableWriter(folder / "sign" / f"{task:06d}.parquet", pa.schema(fields), _GROUP_ROWS, **_HASHES)
        schema = pa.schema([("doc", pa.uint64()), ("key", pa.uint64()), ("paragraph", pa.bool_())])
        self._repeats = TableWriter(folder / "lines" / f"{task:06d}.parquet", schema, _GROUP_ROWS, **_HASHES)
        self._sketches = open(folder / "sketch" / f"{task:06d}.u32", "wb")
        self._row = self._place = 0

    def add(self, document: Document) -> None:
        """Adds the next document; rows count from 0. Lines of source code never count as boilerplate."""
        text, source, site = document.text, document.metadata["source"], document.metadata.get("site", "")
        doc = self._task << ROW_BITS | self._row
        self._row += 1
        h0, h1 = signatures.normalised_hash(text)
        words = signatures.word_hashes(text, operators=True)
        # Higher priority first, then the longer text, then by content.
        rank = (127 - self._priority) << 56 | (0xFFFFFF - min(len(words), 0xFFFFFF)) << 32 | h0 >> 32
        bands, sketch = [None] * self._bands, np.empty(0, np.uint32)
        if self._near:
            own = words if (part := compared.of(document)) is text else signatures.word_hashes(part, operators=True)
            ngram = self._near["ngram"] if len(own) >= _FEW_WORDS else len(own)  # few words must be equal
            if len(shingles := signatures.shingles(own, ngram)):
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
        self._sign.close()
        self._repeats.close()
        self._sketches.close()


ALL_PAIRS = 32  # a bucket up to this size has all its pairs compared
LEADERS = 32  # in a larger bucket, a document is compared with up to this many leaders, which were unlike all before,
NEIGHBOURS = 4  # and with this many documents just before it in rank
_OPEN_FILES = 256
_FEW_WORDS = 20  # documents of fewer are similar only if they are equal


def find_copies(connection: duckdb.DuckDBPyConnection, folder: pathlib.Path, part: int, parts: int) -> None:
    """Writes exact duplicates (apart from spacing and case) to `exact/PART.parquet`: (doc, keeper, keeper_id).

    Looks at those of `parts` parts of the hashes. Only documents whose hash comes again are sorted.
    """
    signs = f"read_parquet({quoted(folder / 'sign/*.parquet')})"
    connection.execute(f"""
        COPY (
            SELECT doc, first_value(doc) OVER same AS keeper, first_value(id) OVER same AS keeper_id
            FROM {signs} SEMI JOIN (
                SELECT h0 FROM {signs} WHERE exact AND h0 % {parts} = {part} GROUP BY h0 HAVING count(*) > 1
            ) USING (h0)
            WHERE exact
            WINDOW same AS (PARTITION BY h0, h1 ORDER BY rank, tie, doc) QUALIFY doc != keeper ORDER BY doc
        ) TO {quoted(folder / f"exact/{part:03d}.parquet")} (FORMAT parquet)""")


def find_pairs(connection: duckdb.DuckDBPyConnection, folder: pathlib.Path, band: int, threshold: float) -> None:
    """Writes to `pairs/BAND.parquet` the pairs with equal hashes of `band` and Jaccard similarity >= `threshold`."""
    signs = f"read_parquet({quoted(folder / 'sign/*.parquet')}, union_by_name = true)"
    rows = connection.sql(f"""
        SELECT s.doc, s.sketch_start, s.sketch_len, s.b{band} FROM {signs} s
        ANTI JOIN read_parquet({quoted(folder / "exact/*.parquet")}) e ON s.doc = e.doc
        SEMI JOIN (SELECT b{band} FROM {signs} GROUP BY b{band} HAVING count(*) > 1) m ON s.b{band} = m.b{band}
        ORDER BY s.b{band}, s.rank, s.tie, s.doc""")
    sketches = Sketches(folder)
    schema = pa.schema([("better", pa.uint64()), ("worse", pa.uint64())])
    pairs = TableWriter(folder / "pairs" / f"{band:03d}.parquet", schema, _GROUP_ROWS, **_HASHES)
    for bucket in _buckets(rows):
        for pair in _similar_pairs(bucket, threshold, sketches):
            pairs.add(pair)
    pairs.close()


def _buckets(rows: duckdb.DuckDBPyRelation) -> Iterator[np.ndarray]:
    """Yields an array for each hash of the band, uint64[documents, 4], sorted by rank."""
    rest = None
    for batch in rows.to_arrow_reader(1 << 14):
        table = np.stack([column.to_numpy(zero_copy_only=False).astype(np.uint64) for column in batch.columns], axis=1)
        table = table if rest is None else np.concatenate([rest, table])
        edges = np.flatnonzero(np.diff(table[:, 3])) + 1
        *whole, rest = np.split(table, edges)
        yield from whole
    if rest is not None and len(rest):
        yield rest


def _similar_pairs(bucket: np.ndarray, threshold: float, sketches: "Sketches") -> Iterator[tuple[int, int]]:
    places = bucket[:, :3].tolist()
    held = [sketches.read(*place) for place in places] if len(places) <= ALL_PAIRS else None
    leaders: list[int] = [0]
    for i in range(1, len(places)):
        mine, alone = held[i] if held else sketches.read(*places[i]), True
        others = range(i) if held else [*leaders, *(j for j in range(max(0, i - NEIGHBOURS), i) if j not in leaders)]
        for j in others:
            if signatures.similarity(mine, held[j] if held else sketches.read(*places[j])) >= threshold:
                alone = False
                yield places[j][0], places[i][0]
        if alone and len(leaders) < LEADERS:
            leaders.append(i)


class Sketches:
    """Reads sketches by document, with a bounded number of open files. Does not map files, which would count as memory."""

    def __init__(self, folder: pathlib.Path):
        def opened(task: int) -> typing.BinaryIO:
            return (folder / "sketch" / f"{task:06d}.u32").open("rb", buffering=0)

        self._opened = functools.lru_cache(_OPEN_FILES)(opened)  # a file that it forgets is closed

    def read(self, doc: int, start: int, length: int) -> np.ndarray:
        """Returns the sketch of a document, uint32[length]; see `signatures.sketch`."""
        return np.frombuffer(os.pread(self._opened(doc >> ROW_BITS).fileno(), 4 * length, 4 * start), np.uint32)


def resolve(connection: duckdb.DuckDBPyConnection, folder: pathlib.Path) -> None:
    """Writes to `near/000.parquet` which near duplicates in `pairs/*.parquet` to remove: (doc, keeper, keeper_id)."""
    connection.execute("""
        CREATE TEMP TABLE pairs (better UBIGINT, worse UBIGINT);
        CREATE TEMP TABLE gone (doc UBIGINT, keeper UBIGINT);
    """)
    if any((folder / "pairs").iterdir()):  # a source uses the stage
        files = quoted(folder / "pairs/*.parquet")
        connection.execute(f"INSERT INTO pairs SELECT DISTINCT better, worse FROM read_parquet({files})")
    while connection.execute("SELECT count(*) FROM pairs").fetchone()[0]:
        connection.execute("""
            CREATE OR REPLACE TEMP TABLE kept AS
            SELECT DISTINCT p.better AS doc FROM pairs p ANTI JOIN pairs w ON p.better = w.worse;
            CREATE OR REPLACE TEMP TABLE going AS SELECT p.worse AS doc, min(p.better) AS keeper
            FROM pairs p SEMI JOIN kept k ON p.better = k.doc GROUP BY p.worse;
            INSERT INTO gone SELECT * FROM going;
            CREATE OR REPLACE TEMP TABLE pairs AS SELECT p.better, p.worse FROM pairs p
            ANTI JOIN going b ON p.better = b.doc ANTI JOIN going w ON p.worse = w.doc;
        """)
    connection.execute(f"""
        COPY (
            SELECT gone.doc, keeper, id AS keeper_id FROM gone
            JOIN (SELECT doc, id FROM read_parquet({quoted(folder / "sign/*.parquet")})) s ON keeper = s.doc ORDER BY gone.doc
        ) TO {quoted(folder / "near/000.parquet")} (FORMAT parquet)
    """)
