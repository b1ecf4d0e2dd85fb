"""Benchmarks: lm-evaluation-harness's tasks on made questions, beside its own `hf` model; HumanEval's and CORE's own rules."""

import json
import os
import sys

import hub_layout
import numpy as np
import pytest
import tiny_eval

from jaxlm.config import ConfigError
from jaxlm.data import chat
from jaxlm.data.ids import document
from jaxlm.eval import completions, core, harness, humaneval, items


@pytest.fixture(scope="module")
def scorer():
    return tiny_eval.scorer()


def test_texts_end_at_stop_strings_and_long_prompts_are_cut(scorer, capsys):
    """A stop may lie across tokens; a prompt that leaves no room is cut on the left, and told."""
    coder, asked = scorer.tokenizer, completions.greedy(24)
    long = document(coder, " ".join(tiny_eval.WORDS * 9))
    prompts = [document(coder, "the cat"), document(coder, "two small dogs ran over"), long, long[-104:]]
    assert len(long) > 128
    whole = completions.complete(scorer, prompts, [], asked, 0, "writing")
    assert whole[2] == whole[3]
    assert "writing: 1 of 4 prompts leave no room for 24 new tokens in the model's context of 128: cut on the left" in (
        capsys.readouterr().err
    )
    stop = whole[0][5:9]
    assert len(coder.encode(stop)) > 1
    assert completions.complete(scorer, prompts, [stop, ""], asked, 0, "writing") == [
        text.partition(stop)[0] for text in whole
    ]


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    pytest.importorskip("lm_eval")
    return tiny_eval.benchmarks(tmp_path_factory.mktemp("bench")) / "hub"


def test_the_worked_examples_of_a_question_are_always_the_same(scorer, hub):
    """At each evaluation in training, and whichever other questions are asked."""
    ask = harness.Benchmarks(["arc_easy", "gsm8k"], tiny_eval.settings(hub, fewshot=2))
    every, some, again = [list(ask(scorer, items)) for items in (0, 4, 0)]
    for whole, part, same in zip(every, some, again, strict=True):
        assert [item.detail for item in whole.items] == [item.detail for item in same.items]
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
    assert capsys.readouterr().err.count("takes no worked examples") == 1
    (tmp_path / "HumanEval.jsonl").write_text(json.dumps(PROBLEM))
    harness.Benchmarks(["humaneval"], tiny_eval.settings(tmp_path, fewshot=2, run_code=True))
    assert "humaneval takes no worked examples: not the 2 of eval.fewshot" in capsys.readouterr().err


def test_what_a_chat_template_lacks_is_told(scorer, hub, tmp_path, capsys, monkeypatch):
    """No template is an error; a template without system messages gets none."""
    ask = harness.Benchmarks(["arc_easy"], tiny_eval.settings(hub, chat_template=True))
    with pytest.raises(ConfigError, match=r"^this model has no chat template: ask it plain text"):
        list(ask(scorer, 2))
    from jaxlm.eval.lm_eval_model import ScorerLM

    strict = "{% for m in messages %}{{ raise_exception('no') if m.role == 'system' else m.content }}{% endfor %}"
    monkeypatch.setattr(chat, "template", lambda _: strict)
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "the cat"}]
    assert ScorerLM(scorer, "made", chats=True).apply_chat_template(talk) == "the cat"
    assert "made: without system messages, which the model's chat template refuses" in capsys.readouterr().err
    (tmp_path / "HumanEval.jsonl").write_text(json.dumps(PROBLEM))
    harness.Benchmarks(["humaneval"], tiny_eval.settings(tmp_path, chat_template=True, run_code=True))
    assert "humaneval gives plain text: eval.chat_template is for" in capsys.readouterr().err


def test_what_ifeval_lacks_is_one_line(tmp_path, monkeypatch):
    nltk = pytest.importorskip("nltk")
    rows = [{"key": 1, "prompt": "Write.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}]
    tiny_eval.lay(tmp_path / "hub", {"ifeval": rows}, 0)
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    with pytest.raises(
        ConfigError, match=r"^ifeval cuts sentences by data of NLTK: python -m nltk.downloader punkt_tab$"
    ):
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
    from jaxlm.eval.lm_eval_tasks import Examples

    docs = [{"n": n} for n in range(9)]
    theirs, ours = samplers.ContextSampler(docs, rnd=1234), Examples(samplers.ContextSampler(docs))
    want = [theirs.sample(3, doc if own else None) for doc in docs]
    assert [ours.sample(3, doc if own else None) for doc in docs] == want
    ours.ask([2, 7])
    assert [ours.sample(3, docs[number] if own else None) for number in (2, 7)] == [want[2], want[7]]


def test_some_questions_are_spread_over_all():
    assert items.spread(10, 3) == [0, 3, 6]
    assert items.spread(3, 0) == items.spread(3, 9) == [0, 1, 2]
    assert items.shares({"a": 30, "b": 10}, 8) == {"a": 6, "b": 2}


def bundle(place):
    """A bundle with a task of each type."""
    words = tiny_eval.WORDS
    rows = {
        "choose": [{"query": f"{w} is", "choices": ["a cat", "seven green hills"], "gold": i % 2} for i, w in enumerate(words)],
        "schema": [{"context_options": [f"the {w}", "the mat"], "continuation": "sat on a mat", "gold": 0} for w in words],
        "write": [{"context": f"the {w} sat on a ", "continuation": "mat"} for w in words],
    }  # fmt: skip
    kinds = {"choose": "multiple_choice", "schema": "schema", "write": "language_modeling"}
    (place / "eval_data").mkdir()
    entries = []
    for name, content in rows.items():
        (place / f"eval_data/{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
        entries.append(
            {"label": name, "dataset_uri": f"{name}.jsonl", "icl_task_type": kinds[name], "num_fewshot": [2]}
        )
    (place / "core.yaml").write_text(json.dumps({"icl_tasks": entries}))  # JSON is YAML
    (place / "eval_meta_data.csv").write_text("Eval Task,Random baseline\nchoose,50.0\nschema,50\nwrite,0.0\n")
    return place


def test_core_scores_its_three_types_as_plain_passes_do(scorer, tmp_path):
    found = tiny_eval.asked(scorer, ["core"], tiny_eval.settings(bundle(tmp_path)), 6)
    assert [result.task for result in found] == ["choose", "schema", "write", "core"]
    for result in found[:3]:
        chance = 0.0 if result.task == "write" else 0.5
        assert result.metrics["centred"] == pytest.approx((result.metrics["acc"] - chance) / (1 - chance))
        assert len(result.items) == 6
    assert found[3].metrics["centred"] == pytest.approx(np.mean([r.metrics["centred"] for r in found[:3]]))
    assert "over 3 tasks; GPT-2 (1.5B): 0.2565" in core.line(found)
    # One item by hand: two examples, then the question, every choice in a pass of its own.
    (task,) = [task for task in core.read(str(tmp_path)) if task.name == "choose"]
    item, rows = found[0].items[0], core.load(task)
    row = rows[int(item.id)]
    requests = core.questions(scorer, task, [row, *(other for other in rows if other is not row)], 0)
    text = scorer.tokenizer.decode([*requests[0][0], *requests[0][1]])
    assert text.count("\n\n") == 2
    assert text.endswith(f"{row['query']} a cat")
    assert requests[0][0][0] == scorer.tokenizer.eos_id
    means = [scorer.score([request])[0] for request in requests]
    right = int(np.argmax([score.logp / score.tokens for score in means]) == row["gold"])
    assert right in (0, 1)


def test_core_says_what_is_missing(tmp_path):
    with pytest.raises(ConfigError, match=r"no core\.yaml and no file of CORE's rows"):
        harness.Benchmarks(["core"], tiny_eval.settings(tmp_path))
    bundle(tmp_path)
    with pytest.raises(ConfigError, match=r"no task chose in eval.data_dir=.*: it has choose, schema, write"):
        harness.Benchmarks(["core:chose"], tiny_eval.settings(tmp_path))


PROBLEM = {
    "task_id": "Made/0",
    "prompt": "def double(x):\n",
    "entry_point": "double",
    "test": "def check(f):\n    assert f(2) == 4",
}


def test_humaneval_reads_its_layout_and_names_what_is_missing(tmp_path):
    with pytest.raises(ConfigError, match=r"humaneval reads openai/openai_humaneval, which .* does not have"):
        humaneval.read(str(tmp_path))
    odd = PROBLEM | {"prompt": "def double(x):  # a\u2028b\n"}
    (tmp_path / "HumanEval.jsonl").write_text(json.dumps(odd, ensure_ascii=False), encoding="utf-8")
    assert humaneval.read(str(tmp_path)) == [odd]
    (tmp_path / "more.jsonl").write_text(json.dumps(odd, ensure_ascii=False), encoding="utf-8")
    assert hub_layout.read(tmp_path / "more.jsonl") == [odd]


def test_humaneval_counts_the_programs_whose_tests_pass():
    allowed = tiny_eval.settings(run_code=True)
    found = humaneval.grade([PROBLEM] * 2, ["    return 2 * x\n", "    return x\n"], allowed)
    assert [item.metrics["pass_at_1"] for item in found.items] == [1.0, 0.0]
    assert found.metrics == {"pass_at_1": 0.5}
    with pytest.raises(ConfigError, match=r"run_code"):
        humaneval.grade([PROBLEM], ["    return 2 * x\n"], tiny_eval.settings())
