"""Stages that compare all documents: exact and near duplicates, repeated lines and paragraphs.

The tables of hashes are on disk, and DuckDB joins them within `prepare.memory_gb`.
"""
