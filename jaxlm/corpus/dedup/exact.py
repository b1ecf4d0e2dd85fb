"""Exact duplicates: texts that differ in spacing and case alone; the best-ranked copy stays."""

import pathlib

import duckdb

from jaxlm.corpus.dedup.sql import best_ranked, quoted

_PART = 4_000_000  # documents a gigabyte that are grouped at a time: grouping can't spill what it holds of each group


def find(connection: duckdb.DuckDBPyConnection, folder: pathlib.Path, memory_gb: float) -> None:
    """`sign/*.parquet` -> `exact.parquet`: (doc, keeper, keeper_id), every document that goes, and the one that stays."""
    connection.execute(f"""
        CREATE TEMP VIEW sign AS SELECT doc, rank, tie, h0, h1, id FROM read_parquet({quoted(folder / "sign/*.parquet")})
        WHERE exact;
        CREATE TEMP TABLE gone (doc UBIGINT, keeper UBIGINT);
    """)
    (documents,) = connection.execute("SELECT count(*) FROM sign").fetchone()
    parts = 1 + int(documents / (_PART * memory_gb))
    for part in range(parts):
        connection.execute(f"""
            INSERT INTO gone SELECT s.doc, b.keeper FROM sign s JOIN (
                SELECT h0, h1, {best_ranked("doc")} AS keeper FROM sign WHERE h0 % {parts} = {part}
                GROUP BY h0, h1 HAVING count(*) > 1
            ) b ON s.h0 = b.h0 AND s.h1 = b.h1 WHERE s.h0 % {parts} = {part} AND s.doc != b.keeper;
        """)
    connection.execute(f"""
        COPY (SELECT g.doc, g.keeper, s.id AS keeper_id FROM gone g JOIN sign s ON g.keeper = s.doc ORDER BY g.doc)
        TO {quoted(folder / "exact.parquet")} (FORMAT parquet);
        DROP TABLE gone;
        DROP VIEW sign;
    """)
