"""Finds exact and near duplicates, and repeated lines, by tables of hashes on disk that DuckDB joins."""
