"""Benchmarks: which questions and worked examples are asked, what ends a text, what is missing; the rules of HumanEval."""

import dataclasses
import json
import math
import os
import sys

import hub_layout
import numpy as np
import pytest
import tiny_eval
import tiny_hf

from jaxlm.config import ConfigError
from jaxlm.data.chats import chat
from jaxlm.data.tokenizer import coder
from jaxlm.data.tokenizer.ids import document
from jaxlm.eval import completions, harness, humaneval, results
from jaxlm.eval.results import Item
from jaxlm.models.decode import schedule


@pytest.fixture(scope="module")
def scorer():
    return tiny_eval.scorer()


def test_texts_end_at_stop_strings_and_long_prompts_are_cut(scorer, capsys):
    """A stop may lie across tokens; a prompt that leaves no room is cut on the left, and told."""
    tokenizer, asked = scorer.tokenizer, completions.greedy(24)
    long = document(tokenizer, " ".join(tiny_eval.WORDS * 9))
    prompts = [document(tokenizer, "the cat"), document(tokenizer, "two small dogs ran over"), long, long[-104:]]
    assert len(long) > 128
    whole = completions.complete(scorer, prompts, [], asked, "writing")
    assert whole[2] == whole[3]
    assert "writing: 1 of 4 prompts leave no room for 24 new tokens in the model's context of 128: cut on the left" in (
        capsys.readouterr().err
    )
    stop = whole[0][5:9]
    assert len(tokenizer.encode(stop)) > 1
    assert completions.complete(scorer, prompts, [stop, ""], asked, "writing") == [
        text.partition(stop)[0] for text in whole
    ]


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    pytest.importorskip("lm_eval")
    return tiny_eval.benchmarks(tmp_path_factory.mktemp("bench")) / "hub"


def test_the_worked_examples_of_a_question_are_always_the_same(scorer, hub):
    """At each evaluation in training, and whichever other questions are asked."""
    ask = harness.Benchmarks(["arc_easy", "gsm8k"], tiny_eval.settings(hub, fewshot=2))
    every, some = [list(ask(scorer, items)) for items in (0, 4)]
    for whole, part in zip(every, some, strict=True):
        shown = {item.id: item.detail["question"] for item in whole.items}
        assert len({text.rpartition("Question: ")[0] for text in shown.values()}) > 1
        assert all(item.detail["question"] == shown[item.id] for item in part.items)


def test_of_a_group_only_means_are_scores(scorer, tmp_path, monkeypatch, capsys):
    """LAMBADA's two tasks: what the harness keeps of a perplexity by question is a log p. No fork bootstraps an error."""
    pytest.importorskip("lm_eval")
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("a fork"))
    place = tiny_eval.settings(tiny_eval.more_benchmarks(tmp_path) / "hub")
    capsys.readouterr()
    group, one = tiny_eval.asked(scorer, ["lambada", "lambada_openai"], place)
    assert len(group.items) == 2 * len(one.items)
    assert group.metrics.keys() == group.stderr.keys() == {"acc", "bits_per_byte"}
    assert all(item.metrics.keys() == {"acc", "bits_per_byte"} for item in (*group.items, *one.items))
    assert one.metrics["perplexity"] == pytest.approx(np.exp(-np.mean([item.detail["logp"] for item in one.items])))
    assert capsys.readouterr().out == ""  # the harness prints there, where --json is


def test_worked_examples_that_a_task_does_not_take_are_told(tmp_path, capsys):
    pytest.importorskip("lm_eval")
    place = tiny_eval.more_benchmarks(tmp_path) / "hub"
    harness.Benchmarks(["truthfulqa_mc2", "mmlu_anatomy"], tiny_eval.settings(place, fewshot=2))
    assert capsys.readouterr().err.count("is always zero-shot") == 1
    (tmp_path / "HumanEval.jsonl").write_text(json.dumps(PROBLEM))
    harness.Benchmarks(["humaneval"], tiny_eval.settings(tmp_path, fewshot=2, run_code=True))
    assert "humaneval is always zero-shot: eval.fewshot=2 is ignored" in capsys.readouterr().err


def test_what_a_chat_template_lacks_is_told(scorer, hub, tmp_path, capsys, monkeypatch):
    """No template is an error; a template without system messages gets none."""
    ask = harness.Benchmarks(["arc_easy"], tiny_eval.settings(hub, chat_template=True))
    with pytest.raises(ConfigError, match=r"^this model has no chat template: ask it plain text"):
        list(ask(scorer, 2))
    from jaxlm.eval.lm_harness import ScorerLM

    strict = "{% for m in messages %}{{ raise_exception('no') if m.role == 'system' else m.content }}{% endfor %}"
    monkeypatch.setattr(chat, "template", lambda _: strict)
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "the cat"}]
    assert ScorerLM(scorer, "made", chats=True).apply_chat_template(talk) == "the cat"
    assert "made: without system messages, which the model's chat template refuses" in capsys.readouterr().err
    (tmp_path / "HumanEval.jsonl").write_text(json.dumps(PROBLEM))
    harness.Benchmarks(["humaneval"], tiny_eval.settings(tmp_path, chat_template=True, run_code=True))
    assert "humaneval ignores eval.chat_template" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("task", "runs"),
    [
        ("minerva_math_algebra", True),  # sympy
        ("prompt_robustness_math_algebra", True),  # its scorer imports another file of its folder
        ("mbpp", True),  # marked as unsafe
        ("hendrycks_math_algebra", False),
    ],
)
def test_a_task_whose_scorer_runs_what_the_model_wrote_asks_for_consent(tmp_path, task, runs):
    """With consent the next thing that is wrong is told: the folder is empty."""
    pytest.importorskip("lm_eval")
    if runs:
        with pytest.raises(
            ConfigError, match=rf"^{task}'s scorer runs what the model wrote.*: --config.eval.run_code=True allows it$"
        ):
            harness.Benchmarks([task], tiny_eval.settings(tmp_path))
    with pytest.raises(ConfigError, match=rf"^{task} reads "):
        harness.Benchmarks([task], tiny_eval.settings(tmp_path, run_code=runs))


def test_what_ifeval_lacks_is_one_line(tmp_path, monkeypatch):
    nltk = pytest.importorskip("nltk")
    rows = [{"key": 1, "prompt": "Write.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}]
    tiny_eval.lay(tmp_path / "hub", {"ifeval": rows}, 0)
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    with pytest.raises(ConfigError, match=r"^ifeval needs NLTK's sentence data: python -m nltk.downloader punkt_tab$"):
        harness.Benchmarks(["ifeval"], tiny_eval.settings(tmp_path / "hub"))
    (tmp_path / "tokenizers/punkt_tab").mkdir(parents=True)
    for name in [name for name in sys.modules if "ifeval" in name]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "langdetect", None)
    with pytest.raises(ConfigError, match=r"^ifeval needs langdetect: pip install langdetect$"):
        harness.Benchmarks(["ifeval"], tiny_eval.settings(tmp_path / "hub"))


@pytest.mark.parametrize("own", [False, True])
def test_all_questions_get_the_examples_that_the_harness_draws(own):
    """`own`: they come from the questions themselves, so that the harness draws one more."""
    samplers = pytest.importorskip("lm_eval.api.samplers")
    from jaxlm.eval.lm_harness import Examples

    docs = [{"n": n} for n in range(9)]
    theirs, ours = samplers.ContextSampler(docs, rnd=1234), Examples(samplers.ContextSampler(docs))
    want = [theirs.sample(3, doc if own else None) for doc in docs]
    assert [ours.sample(3, doc if own else None) for doc in docs] == want
    ours.ask([2, 7])
    assert [ours.sample(3, docs[number] if own else None) for number in (2, 7)] == [want[2], want[7]]


def test_some_questions_are_spread_over_all():
    few, many = results.spread(1000, 40), results.spread(1000, 100)
    assert few == sorted(set(few))
    assert len(few) == 40
    assert set(few) < set(many)
    assert np.histogram(many, 4, (0, 1000))[0].min() > 10  # drawn from all
    assert results.spread(3, 0) == results.spread(3, 9) == [0, 1, 2]
    assert results.shares({"a": 30, "b": 10}, 8) == {"a": 6, "b": 2}


def test_all_wrong_is_not_certain():
    answers = [Item(str(n), {"acc": 0.0, "f1": 0.5}, {}) for n in range(10)]
    _, errors = results.means(answers)
    assert errors["acc"] == pytest.approx(math.sqrt(2 / 14 * 12 / 14 / 13))
    assert errors["f1"] == 0.0
    assert results.means([*answers, Item("10", {"acc": 1.0}, {})])[1]["acc"] == pytest.approx(1 / 11)


def test_a_file_of_another_benchmark_is_not_laid_out(tmp_path, capsys):
    """Rows of CORE look alike; a benchmark's number of choices tells them apart. No worked examples may take all questions."""
    four = {"query": "Question: of what?", "choices": ["a", "b", "c", "d"], "gold": 0}
    rows = {"four": [four] * 3, "two": [four | {"choices": ["a", "b"]}] * 3, "mixed": [four, four | {"choices": ["a"]}]}
    for name, content in rows.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    for task, name, flags, said in (
        ("piqa", "four", [], "no rows of piqa, which have 2 choices: row 1 has 4"),
        ("arc_easy", "two", [], "no rows of arc_easy, which have 3 or 4 or 5 choices: row 1 has 2"),
        ("arc_challenge", "mixed", [], "row 2 has 1"),
        ("mmlu_anatomy", "four", [], "no rows of mmlu_anatomy"),
        ("arc_easy", "four", ["--examples=3"], "--examples=3 leaves no question of its 3 rows"),
    ):
        assert hub_layout.main([str(tmp_path / "hub"), f"{task}={tmp_path / name}.jsonl", *flags]) == 2
        assert said in capsys.readouterr().err
    assert not (tmp_path / "hub").exists()


def test_a_split_without_questions_is_one_line(tmp_path):
    pytest.importorskip("lm_eval")
    hub = tiny_eval.benchmarks(tmp_path) / "hub"
    (hub / "allenai/ai2_arc/ARC-Easy/test.jsonl").write_text("")
    with pytest.raises(ConfigError, match=r"^arc_easy: allenai/ai2_arc of .* has no questions"):
        harness.Benchmarks(["arc_easy"], tiny_eval.settings(hub))


PROBLEM = {
    "task_id": "Made/0",
    "prompt": "def double(x):\n",
    "entry_point": "double",
    "test": "def check(f):\n    assert f(2) == 4",
}


def test_humaneval_reads_its_layout_and_names_what_is_missing(tmp_path):
    with pytest.raises(ConfigError, match=r"humaneval reads openai/openai_humaneval, and eval.data_dir=.* lacks it"):
        humaneval.read(str(tmp_path))
    odd = PROBLEM | {"prompt": "def double(x):  # a\u2028b\n"}
    (tmp_path / "HumanEval.jsonl").write_text(json.dumps(odd, ensure_ascii=False), encoding="utf-8")
    assert humaneval.read(str(tmp_path)) == [odd]
    (tmp_path / "more.jsonl").write_text(json.dumps(odd, ensure_ascii=False), encoding="utf-8")
    assert hub_layout.read(tmp_path / "more.jsonl") == [odd]


def test_a_program_keeps_its_indentation(scorer, tmp_path, monkeypatch):
    """Llama 2's tokenizer takes a space from the beginning of a text; two lines of a body then disagree."""
    tiny_hf.byte_fallback(tmp_path)
    (tmp_path / "HumanEval.jsonl").write_text(json.dumps(PROBLEM))
    tokenizer, body = coder.load(tmp_path), "    y = 2 * x\n    return y\n"
    given = document(tokenizer, PROBLEM["prompt"])
    written = document(tokenizer, PROBLEM["prompt"] + body)[len(given) :]
    assert tokenizer.decode(written) == body[1:]

    def writes(engine, tickets, rows):
        assert [ticket.ask.ids for ticket in tickets] == [tuple(given)]
        yield 0, schedule.Update(tuple(map(schedule.Token, written)), ended="stop")

    monkeypatch.setattr(schedule, "answers", writes)
    writer = dataclasses.replace(scorer, tokenizer=tokenizer)
    (found,) = humaneval.evaluate(writer, "", tiny_eval.settings(tmp_path, run_code=True), 0)
    assert found.items[0].detail["answer"] == body
    assert found.metrics == {"pass_at_1": 1.0}
