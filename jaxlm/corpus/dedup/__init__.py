"""What looks at all documents together: exact and near duplicates, lines and paragraphs that come back.

Nothing here holds more of the corpus in memory than a task's share: the tables of hashes lie on disk and DuckDB joins
them within `prepare.memory_gb`.
"""
