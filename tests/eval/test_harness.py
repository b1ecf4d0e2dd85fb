"""Benchmarks: where written texts end, which questions are asked, and the rules of HumanEval."""

import dataclasses
import json

import pytest
import tiny_eval
import tiny_hf

from jaxlm.config import ConfigError
from jaxlm.data import coder
from jaxlm.data.ids import document
from jaxlm.eval import completions, humaneval, items


@pytest.fixture(scope="module")
def scorer():
    return tiny_eval.scorer()


def test_texts_end_at_stop_strings_and_long_prompts_are_cut(scorer, capsys):
    """A stop may lie across tokens; a prompt that leaves no room is cut on the left, and told."""
    tokenizer, asked = scorer.tokenizer, completions.greedy(24)
    long = document(tokenizer, " ".join(tiny_eval.WORDS * 9))
    prompts = [document(tokenizer, "the cat"), document(tokenizer, "two small dogs ran over"), long, long[-104:]]
    assert len(long) > 128
    whole = completions.complete(scorer, prompts, [], asked, 0, "writing")
    assert whole[2] == whole[3]
    assert "writing: 1 of 4 prompts leave no room for 24 new tokens in the model's context of 128: cut on the left" in (
        capsys.readouterr().err
    )
    stop = whole[0][5:9]
    assert len(tokenizer.encode(stop)) > 1
    assert completions.complete(scorer, prompts, [stop, ""], asked, 0, "writing") == [
        text.partition(stop)[0] for text in whole
    ]


def test_some_questions_are_spread_over_all():
    assert items.spread(10, 3) == [0, 3, 6]
    assert items.spread(3, 0) == items.spread(3, 9) == [0, 1, 2]
    assert items.shares({"a": 30, "b": 10}, 8) == {"a": 6, "b": 2}


PROBLEM = {
    "task_id": "Made/0",
    "prompt": "def double(x):\n",
    "entry_point": "double",
    "test": "def check(f):\n    assert f(2) == 4",
}


def test_humaneval_reads_its_layout_and_names_what_is_missing(tmp_path):
    with pytest.raises(ConfigError, match=r"humaneval reads openai/openai_humaneval, which .* does not have"):
        humaneval.read(str(tmp_path))
    (tmp_path / "HumanEval.jsonl").write_text(json.dumps(PROBLEM))
    assert humaneval.read(str(tmp_path)) == [PROBLEM]


def test_humaneval_counts_the_programs_whose_tests_pass():
    allowed = tiny_eval.settings(run_code=True)
    found = humaneval.grade([PROBLEM] * 2, ["    return 2 * x\n", "    return x\n"], allowed)
    assert [item.metrics["pass_at_1"] for item in found.items] == [1.0, 0.0]
    assert found.metrics == {"pass_at_1": 0.5}
    with pytest.raises(ConfigError, match=r"run_code"):
        humaneval.grade([PROBLEM], ["    return 2 * x\n"], tiny_eval.settings())


def test_a_program_keeps_its_indentation(scorer, tmp_path):
    """Llama 2's tokenizer takes a space from the beginning of a text; two lines of a body then disagree."""
    tiny_hf.byte_fallback(tmp_path)
    (tmp_path / "HumanEval.jsonl").write_text(json.dumps(PROBLEM))
    tokenizer, body = coder.load(tmp_path), "    y = 2 * x\n    return y\n"
    given = document(tokenizer, PROBLEM["prompt"])
    written = document(tokenizer, PROBLEM["prompt"] + body)[len(given) :]
    assert tokenizer.decode(written) == body[1:]

    class Writes:
        def stream(self, prompts, settings, stop_ids, seed):
            assert prompts == [given]
            yield [written]

    writer = dataclasses.replace(scorer, tokenizer=tokenizer)
    writer.__dict__["generator"] = Writes()  # where cached_property keeps it
    (found,) = humaneval.evaluate(writer, "", tiny_eval.settings(tmp_path, run_code=True), 0)
    assert found.items[0].detail["answer"] == body
    assert found.metrics == {"pass_at_1": 1.0}
