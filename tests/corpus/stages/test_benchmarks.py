"""Benchmark files in the layouts in which they are published."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet
import pytest

from jaxlm.config import ConfigError
from jaxlm.corpus.stages import benchmarks

LAYOUTS = {
    "hellaswag": (
        {
            "ind": 24,
            "activity_label": "Roof shingle removal",
            "ctx_a": "A man is sitting on a roof.",
            "ctx_b": "he",
            "ctx": "A man is sitting on a roof. he",
            "endings": ["is using wrap.", "starts pulling up roofing."],
            "label": "1",
            "source_id": "activitynet~v_x",
        },
        ("24", "A man is sitting on a roof. he", ("is using wrap.", "starts pulling up roofing.")),
    ),
    "arc of the hub": (
        {"id": "M_1", "question": "Why?", "choices": {"text": ["so", "not so"], "label": ["A", "B"]}, "answerKey": "A"},
        ("M_1", "Why?", ("so", "not so")),
    ),
    "arc of its authors": (
        {"id": "M_2", "question": {"stem": "Why?", "choices": [{"text": "so", "label": "A"}]}, "answerKey": "A"},
        ("M_2", "Why?", ("so",)),
    ),
    "mmlu": (
        {"question": "Find x.", "subject": "abstract_algebra", "choices": ["0", "4", "2", "6"], "answer": 1},
        ("0", "Find x.", ("0", "4", "2", "6")),
    ),
    "gsm8k": ({"question": "How many?", "answer": "2+2=<<4>>4\n#### 4"}, ("0", "How many?", ("2+2=<<4>>4\n#### 4",))),
    "humaneval": (
        {
            "task_id": "HumanEval/7",
            "prompt": "def f():",
            "entry_point": "f",
            "canonical_solution": "pass",
            "test": "f()",
        },
        ("HumanEval/7", "def f():", ("pass", "f()")),
    ),
    "piqa": (
        {"goal": "To cut", "sol1": "Use a knife", "sol2": "Use a fork", "label": 0},
        ("0", "To cut", ("Use a knife", "Use a fork")),
    ),
    "lm-evaluation-harness": (
        {"query": "Question: Why?\nAnswer:", "choices": ["so", "not so"], "gold": 0},
        ("0", "Why?", ("so", "not so")),
    ),
    "mbpp": (
        {"task_id": 2, "text": "Write f.", "code": "def f(): 0", "test_list": ["assert 1", "assert 2"]},
        ("2", "Write f.", ("def f(): 0", "assert 1", "assert 2")),
    ),
    "with a passage": (
        {"question": "Is it?", "passage": "An article of the encyclopedia.", "answer": True},
        ("0", "Is it?", ()),
    ),
    "another": ({"riddle": "What has keys?", "solution": "A piano."}, ("0", "", ("What has keys?", "A piano."))),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(tmp_path, layout):
    record, (of_record, question, answers) = LAYOUTS[layout]
    path = tmp_path / "bench.jsonl"
    path.write_text(json.dumps(record) + "\n")
    (item,) = benchmarks.read_items(str(path))
    assert (item.benchmark, item.id, item.question.strip(), item.answers) == ("bench", of_record, question, answers)


def test_files_of_every_kind_hold_the_same(tmp_path):
    records = [{"question": f"What is {i}\u2028 plus one?", "answer": str(i + 1)} for i in range(3)]
    lines = "\n".join(json.dumps(record, ensure_ascii=False) for record in records)
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "a.json").write_text(json.dumps(records))
    (tmp_path / "arc").mkdir()
    pa.parquet.write_table(pa.Table.from_pylist(records), tmp_path / "arc" / "test-00000-of-00001.parquet")
    files = benchmarks.files((str(tmp_path), str(tmp_path / "*.jsonl"), f"file://{tmp_path}/a.jsonl"))
    assert len(files) == 5
    items = [list(benchmarks.read_items(file)) for file in files]
    assert {item.benchmark for one in items for item in one} == {"a", "arc"}
    assert all([(i.question, i.answers) for i in one] == [(i.question, i.answers) for i in items[0]] for one in items)
    assert len(items[0]) == 3


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"question": "x"}\n{"question', r"a.jsonl:2 is no JSON object"),
        ("a.jsonl", "[1]\n", "is no JSON object"),
        ("a.jsonl", '{"label": 1}\n', "no record with text"),
        ("a.jsonl", "", "no record with text"),
        ("a.jsonl.gz", "not gzip", "can't be read"),
        ("a.parquet", "not parquet", "can't be read"),
        ("a.json", "[{", "can't be read"),
    ],
)
def test_a_damaged_file_is_one_line(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=message):
        list(benchmarks.read_items(str(tmp_path / name)))


def test_a_path_without_files(tmp_path):
    with pytest.raises(ConfigError, match=r"no file that ends in \.jsonl"):
        benchmarks.files((str(tmp_path),))
