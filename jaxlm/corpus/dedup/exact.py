"""Exact duplicates: texts that differ in spacing and case alone; the best-ranked copy stays."""

import pathlib

import duckdb

from jaxlm.corpus.dedup.sql import quoted


def find(connection: duckdb.DuckDBPyConnection, folder: pathlib.Path) -> None:
    """`sign/*.parquet` -> `exact.parquet`: (doc, keeper, keeper_id), every document that goes, and the one that stays."""
    connection.execute(f"""
        CREATE TEMP VIEW sign AS SELECT doc, rank, tie, h0, h1, id FROM read_parquet({quoted(folder / "sign/*.parquet")})
        WHERE exact;
        CREATE TEMP TABLE best AS
        SELECT h0, h1, arg_min(doc, (rank, tie, doc)) AS keeper, arg_min(id, (rank, tie, doc)) AS keeper_id
        FROM sign GROUP BY h0, h1 HAVING count(*) > 1;
        COPY (SELECT doc, keeper, keeper_id FROM sign JOIN best USING (h0, h1) WHERE doc != keeper ORDER BY doc)
        TO {quoted(folder / "exact.parquet")} (FORMAT parquet);
        DROP TABLE best;
        DROP VIEW sign;
    """)
