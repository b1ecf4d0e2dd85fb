"""Rows of the CORE bundle."""

import json

import pytest

from jaxlm.config import ConfigError
from jaxlm.corpus.benchmarks import core

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
