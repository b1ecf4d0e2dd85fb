"""Files of benchmarks: of every kind and layout, rows of the CORE bundle, and damaged ones."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet
import pytest
import tiny_items

from jaxlm.config import ConfigError
from jaxlm.corpus.benchmarks import core, layouts, reading


def items(tmp_path, *records, fields=()):
    path = tmp_path / "bench.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return layouts.items(str(path), layouts.named(fields, "stage.fields"))


ABOUT = "The moon is far.\nIt is cold."
CASES = {
    "CORE multiple_choice, AGIEval": ({"query": f"Passage: {ABOUT}\nQuestion: is it far?\nAnswer:", "choices": ["no",
     "yes"], "gold": 1}, [("0", ("is it far?", ), ("no", "yes"))]),
    "CORE schema": ({"context_options": ["Ann ran because Ann", "Ann ran because Ben"], "continuation": "was late",
     "gold": 0}, [("0", ("Ann ran because Ann was late", "Ann ran because Ben was late"), ())]),
    "CORE language_modeling": ({"context": "They saw the", "continuation": "sea"}, [("0", ("They saw the", ), ("sea",
     ))]),
    "HellaSwag": ({"ind": 24, "ctx_a": "A roof.", "ctx_b": "he", "ctx": "A roof. he", "endings": ["is.", "goes."],
     "source_id": "v"}, [("24", ("A roof. he", ), ("is.", "goes."))]),
    "Winogrande": ({"sentence": "Ann saw Ben as _ came.", "option1": "Ann", "option2": "Ben", "answer": "2"}, [("0",
     ("Ann saw Ben as _ came.", "Ann saw Ben as Ann came.", "Ann saw Ben as Ben came."), ())]),
    "SIQA": ({"context": "Ann ran.", "question": "Why?", "answerA": "so", "answerB": "no", "answerC": "-",
     "label": "1"}, [("0", ("Ann ran. Why?", ), ("so", "no", "-"))]),
    "HumanEval": ({"task_id": "HumanEval/7", "prompt": "def f():", "entry_point": "f", "canonical_solution": "pass",
     "test": "f()"}, [("HumanEval/7", ("def f():", ), ("pass", "f()"))]),
    "CoQA": ({"id": "3", "story": ABOUT, "questions": ["Far?", "Cold?"], "answers": {"input_text": ["yes", "very"]}},
     [("3/0", ("Far?", ), ("yes", )), ("3/1", ("Cold?", ), ("very", ))]),
    "RACE, EleutherAI": ({"article": ABOUT,
     "problems": "[{'question': 'Far?', 'answer': 'B', 'options': ['no', 'yes']}]"}, [("0", ("Far?", ), ("no",
     "yes"))]),
    "SQuAD, original": ({"title": "M", "paragraphs": [{"context": ABOUT, "qas": [{"question": "Far?", "id": "5",
     "answers": [{"text": "y"}]}]}]}, [("0", ("Far?", ), ("y", ))]),
    "TruthfulQA, multiple choice": ({"question": "Far?", "mc1_targets": {"choices": ["y"], "labels": [1]},
     "mc2_targets": {"choices": ["n"], "labels": [0]}}, [("0", ("Far?", ), ("y", "n"))]),
    "ARC, OpenBookQA, CommonsenseQA: original": ({"id": "M_2", "question": {"stem": "Why?", "choices": [{"text": "so",
     "label": "A"}]}, "answerKey": "A"}, [("M_2", ("Why?", ), ("so", ))]),
    "a question with answers": ({"id": "M_1", "question": "Q: Why?", "choices": {"text": ["so", "not"], "label": ["A",
     "B"]}, "passage": ABOUT}, [("M_1", ("Why?", ), ("so", "not"))]),
    "LAMBADA, one text": ({"text": "They saw the sea"}, [("0", ("They saw the sea",), ())]),
}  # fmt: skip


@pytest.mark.parametrize("layout", CASES)
def test_what_is_the_question_and_what_the_answers(tmp_path, layout):
    record, expected = CASES[layout]
    found, names = items(tmp_path, record)
    assert names == [layout]
    assert [(item.id, item.questions, item.answers) for item in found] == expected
    assert {item.benchmark for item in found} == {"bench"}


@pytest.mark.parametrize("layout", tiny_items.MADE)
def test_every_made_layout_is_known_and_no_passage_is_taken(tmp_path, layout):
    fields = ("bench*:body_text+riddle>solved",) if layout is tiny_items.riddles else ()
    for made in tiny_items.made(layout, 3):
        found, _ = items(tmp_path, made.record, fields=fields)
        texts = [text for item in found for text in (*item.questions, *item.answers)]
        assert texts
        assert not made.passage or not any(made.passage[:40] in text for text in texts)


def test_every_layout_fits_a_record_that_has_just_its_fields():
    """No layout stands behind one that takes its records away."""
    for layout in layouts.LAYOUTS:
        record = {}
        for field in layout.needs:
            first, _, rest = field.partition(".")
            record[first] = {rest: "x"} if rest else "x"
        fitting = [each for each in layouts.LAYOUTS if all(layouts._has(record, f) for f in each.needs)]
        assert fitting[0] is layout, (layout.name, fitting[0].name)


def test_a_layout_that_is_not_known_is_refused_and_can_be_named(tmp_path):
    record = {"riddle": "What has keys?", "hint": "music", "solved": "A piano."}
    why = r"bench.jsonl:1 has an unknown layout \(fields: riddle, hint, solved\); name its fields: .*bench.jsonl:QUESTION>A"
    with pytest.raises(ConfigError, match=why):
        items(tmp_path, record)
    found, names = items(tmp_path, record, fields=("*.jsonl:riddle+hint>solved",))
    assert [(item.questions, item.answers) for item in found] == [(("What has keys? music",), ("A piano.",))]
    assert names == ["fields *.jsonl:riddle+hint>solved"]
    with pytest.raises(
        ConfigError, match=r"has no field 'ridle', which fields \*:ridle names; its fields: riddle, hint"
    ):
        items(tmp_path, record, fields=("*:ridle",))
    with pytest.raises(ConfigError, match=r"stage.fields: 'riddle' is not of the form FILE:QUESTION>ANSWER"):
        items(tmp_path, record, fields=("riddle",))


def test_fields_that_hold_something_else_are_told(tmp_path):
    with pytest.raises(ConfigError, match=r"bench.jsonl:1 has the fields of RACE, EleutherAI, but in another form"):
        items(tmp_path, {"article": "x", "problems": "[{"})


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


CHOICE = {"query": "Question: Why?", "choices": ["so", "not so"], "gold": 1}
SCHEMA = {"context_options": ["Ann ran because Ann", "Ann ran because Ben"], "continuation": "was late", "gold": 0}
TEXT = {"context": "They saw the", "continuation": "sea"}


def write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def test_the_three_types(tmp_path):
    found = [core.rows(write(tmp_path / "a.jsonl", row, {**row, "more": 1}))[1] for row in (CHOICE, SCHEMA, TEXT)]
    assert found == [
        core.MultipleChoice("Question: Why?", ("so", "not so"), 1),
        core.Schema(("Ann ran because Ann", "Ann ran because Ben"), "was late", 0),
        core.LanguageModeling("They saw the", "sea"),
    ]
    assert [type(row) for row in found] == list(core.TYPES.values())


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([CHOICE, CHOICE | {"gold": 2}], "a.jsonl:2 is no row of CORE: gold is 2, of 2 options"),
        ([CHOICE | {"gold": True}], "gold is True, of 2 options"),
        ([CHOICE | {"choices": "so"}], "choices is no list of texts"),
        ([SCHEMA | {"context_options": []}], "context_options is no list of texts"),
        ([TEXT | {"continuation": None}], "continuation is no text"),
        ([{"question": "x"}], "it has the fields question, which are no row of CORE"),
        ([CHOICE, TEXT], "a.jsonl:2 is LanguageModeling, the first row MultipleChoice"),
        ([], "holds no row"),
    ],
)
def test_what_is_no_row_is_told(tmp_path, records, message):
    with pytest.raises(ConfigError, match=message):
        core.rows(write(tmp_path / "a.jsonl", *records))
