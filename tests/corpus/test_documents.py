"""Prepared documents are read by their rows."""

import pytest

from jaxlm.corpus import documents
from jaxlm.corpus.stage import Document


@pytest.mark.parametrize("rows", [[], [0], [4], [0, 1, 3, 4], [1, 2]])
def test_rows_are_read_from_their_groups(tmp_path, rows):
    writer = documents.DocumentWriter(tmp_path / "x.parquet")
    for row in range(5):  # two to a group
        writer.add(Document("x" * (documents.GROUP_BYTES // 2 + row), f"id {row}", {"row": row}))
    writer.close()
    found = [(d.id, len(d.text), d.metadata, d.row) for d in documents.read_rows(tmp_path / "x.parquet", rows)]
    assert found == [(f"id {row}", documents.GROUP_BYTES // 2 + row, {"row": row}, row) for row in rows]
