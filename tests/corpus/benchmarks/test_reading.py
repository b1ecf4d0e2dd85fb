"""Files of benchmarks of every kind, and damaged ones."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet
import pytest

from jaxlm.config import ConfigError
from jaxlm.corpus.benchmarks import layouts, reading

RECORDS = [{"question": f"What is {i}\u2028 plus one?", "answer": str(i + 1)} for i in range(3)]


def test_files_of_every_kind_hold_the_same(tmp_path):
    lines = "\n".join(json.dumps(record, ensure_ascii=False) for record in RECORDS)
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "a.json").write_text(json.dumps(RECORDS))
    (tmp_path / "b.json").write_text(json.dumps({"version": "1.1", "data": RECORDS}, indent=1))  # as SQuAD's own
    (tmp_path / "c.json").write_text(lines)
    (tmp_path / "dataset_infos.json").write_text("{}")
    (tmp_path / "arc").mkdir()
    pa.parquet.write_table(pa.Table.from_pylist(RECORDS), tmp_path / "arc" / "test-00000-of-00001.parquet")
    files = reading.files((str(tmp_path), str(tmp_path / "*.jsonl"), f"file://{tmp_path}/a.jsonl"), "paths")
    assert len(files) == 7
    assert all([record for _, record in reading.records(file)] == RECORDS for file in files)
    assert {reading.name(file) for file in files} == {"a", "arc", "b", "c"}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"question": "x"}\n{"question', r"a.jsonl:2 is no JSON object"),
        ("a.jsonl", "[1]\n", "is no JSON object"),
        ("a.jsonl", "", "holds no item"),
        ("a.jsonl", '{"text": ""}\n', "holds no item"),
        ("a.jsonl.gz", "not gzip", "can't be read"),
        ("a.parquet", "not parquet", "can't be read"),
        ("a.json", "[{", "can't be read"),
    ],
)
def test_a_damaged_file_is_one_line(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=message):
        layouts.items(str(tmp_path / name), {})


def test_a_path_without_files(tmp_path):
    with pytest.raises(ConfigError, match=r"a.key: .* has no file that ends in \.jsonl"):
        reading.files((str(tmp_path),), "a.key")
    with pytest.raises(ConfigError, match=r"a.key: there is no file or folder '.*nope\.jsonl'"):
        reading.files((str(tmp_path / "nope.jsonl"),), "a.key")
