"""Stages that look at all documents together: exact and near duplicates, lines and paragraphs that come again.

Memory holds a task's share of the corpus at most: the tables of hashes lie on disk, and DuckDB joins them within
`prepare.memory_gb`.
"""
