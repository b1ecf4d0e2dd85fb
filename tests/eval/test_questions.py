"""One's own questions: three types of rows beside plain passes, and files that are refused with the row's number."""

import json
import math

import numpy as np
import pytest
import tiny_eval
from tiny_eval import WORDS

from jaxlm.config import ConfigError
from jaxlm.data.tokenizer.ids import document
from jaxlm.eval import completions, questions, results
from jaxlm.eval.results import measured

CHOICES = [
    {"query": f"the {w} sat", "choices": ["on a mat", w, f"over {w} hills"], "gold": i % 3} for i, w in enumerate(WORDS)
]
NEXT = [{"context": f"the {w} sat on ", "continuation": "a mat"} for w in WORDS]
SPELT = [{"prompt": f"the {w} sat on a", "answer": "mat"} for w in WORDS[:5]]


@pytest.fixture(scope="module")
def scorer():
    return tiny_eval.scorer()


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def alone(scorer, before, text):
    """The score of a text after another, in a pass of its own."""
    ids, whole = document(scorer.tokenizer, before), document(scorer.tokenizer, before + text)
    assert whole[: len(ids)] == ids
    return scorer.score([(ids, whole[len(ids) :])])[0]


def test_choices_are_judged_by_log_p_and_per_byte(scorer, tmp_path):
    path = write(tmp_path / "mine.jsonl", CHOICES)
    (result,) = tiny_eval.asked(scorer, [path], tiny_eval.settings())
    assert (result.task, result.chance, result.fewshot, len(result.items)) == (
        "mine.jsonl",
        pytest.approx(1 / 3),
        0,
        len(CHOICES),
    )
    for row, item in zip(CHOICES, result.items, strict=True):
        texts = [f" {choice}" for choice in row["choices"]]
        logp = np.array([alone(scorer, row["query"], text).logp for text in texts])
        np.testing.assert_allclose(item.detail["logp"], logp, rtol=1e-4)
        assert item.metrics["acc"] == (logp.argmax() == row["gold"])
        sizes = np.array([len(text.encode()) for text in texts])
        assert item.metrics["acc_norm"] == ((logp / sizes).argmax() == row["gold"])
        bits = -logp[row["gold"]] / math.log(2) / sizes[row["gold"]]
        assert item.metrics["bits_per_byte"] == pytest.approx(bits, rel=1e-4)
    assert result.metrics["acc"] == pytest.approx(np.mean([item.metrics["acc"] for item in result.items]))
    assert 0 < result.metrics["acc"] < 1  # else nothing above compares
    assert len({item.id for item in result.items}) == len(CHOICES)
    few = tiny_eval.asked(scorer, [path], tiny_eval.settings(), 4)[0].items
    assert len(few) == 4
    assert {item.id for item in few} <= {item.id for item in result.items}


def test_a_continuation_is_right_if_each_token_is_the_likeliest(scorer, tmp_path):
    (result,) = tiny_eval.asked(scorer, [write(tmp_path / "next.jsonl", NEXT)], tiny_eval.settings())
    for row, item in zip(NEXT, result.items, strict=True):
        score = alone(scorer, row["context"].rstrip(), " a mat")  # the space goes to the text
        assert item.detail["logp"] == [pytest.approx(score.logp, rel=1e-4)]
        assert item.metrics["acc"] == score.greedy
    assert result.chance is None
    assert result.metrics["bits_per_byte"] > 0


def test_what_is_written_is_compared_up_to_a_newline_without_case_and_spaces(scorer, tmp_path, monkeypatch):
    texts = ["mat", "  MAT ", "mats", "", "a mat"]
    monkeypatch.setattr(
        completions, "complete", lambda scorer, prompts, stops, *rest: texts if stops == ("\n",) else 1 / 0
    )
    path = write(tmp_path / "spelt.jsonl", SPELT)
    (result,) = questions.evaluate(scorer, path, tiny_eval.settings(), 0)
    assert [item.metrics["exact_match"] for item in result.items] == [1, 1, 0, 0, 0]
    assert measured(result).metrics == {"exact_match": pytest.approx(0.4)}
    monkeypatch.undo()
    (result,) = tiny_eval.asked(scorer, [path], tiny_eval.settings())  # by the model
    assert all("\n" not in item.detail["answer"] for item in result.items)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "holds no question"),
        ([*CHOICES[:2], NEXT[0]], r":3 has context, continuation, the first row query, choices, gold: make two files"),
        (
            [SPELT[0], {"prompt": "x", "anwser": "y"}],
            r":2 has the keys prompt, anwser: a question has \{query, choices, gold\} or",
        ),
        ([SPELT[0], {"prompt": "x", "answer": 5}], ":2: prompt and answer must be texts"),
        ([SPELT[0] | {"answer": "two\nlines"}], ":1: an answer must be one line of text"),
        ([CHOICES[0] | {"choices": ["a", "", "b"]}], ":1: a choice or continuation is empty"),
        ([CHOICES[0] | {"gold": 3}], ":1: gold is 3, of 3 options"),
        ([CHOICES[0] | {"choices": "abc"}], ":1: choices is no list of texts"),
    ],
)
def test_a_wrong_row_is_named(tmp_path, rows, message):
    with pytest.raises(ConfigError, match=message):
        tiny_eval.asked(None, [write(tmp_path / "q.jsonl", rows)], tiny_eval.settings())


def test_questions_that_were_edited_are_others_and_replace_the_old(scorer, tmp_path):
    about = {"step": 3, "chat_template": False}

    def ask(rows, name):
        return tiny_eval.asked(scorer, [write(tmp_path / name / "q.jsonl", rows)], tiny_eval.settings())[0]

    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
    assert results.add(tmp_path, ask(NEXT[:5], "a"), about) == ""
    line = results.add(tmp_path, ask(NEXT[:2], "b"), about)
    assert "keeps the 5 questions" in line
    assert "delete q.jsonl.jsonl there" in line
    edited = [NEXT[0], NEXT[1] | {"continuation": "two hills"}, NEXT[1], NEXT[1]]
    assert "these 4 questions of q.jsonl replace the 5" in results.add(tmp_path, ask(edited, "c"), about)
    assert len({item.id for item in results.read(tmp_path / "eval/3")["q.jsonl"].items}) == 4


@pytest.mark.parametrize("name", ["mine.json", "mine.jsonl.gz", "mine.txt"])
def test_another_suffix_is_told(name):
    with pytest.raises(ConfigError, match=r"the name of a file of questions ends in \.jsonl"):
        tiny_eval.asked(None, [name], tiny_eval.settings())


def test_two_files_of_one_name_are_refused(tmp_path):
    (tmp_path / "b").mkdir()
    paths = [write(tmp_path / place / "q.jsonl", NEXT) for place in (".", "b")]
    with pytest.raises(ConfigError, match=r"two files of questions are called q\.jsonl"):
        tiny_eval.asked(None, paths, tiny_eval.settings())


def test_a_file_that_is_not_there_is_refused_and_is_no_task():
    with pytest.raises(ConfigError, match=r"mien\.jsonl: there is no such file"):
        tiny_eval.asked(None, ["mien.jsonl"], tiny_eval.settings())
