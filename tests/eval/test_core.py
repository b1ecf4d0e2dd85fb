"""CORE: its three types of rows beside plain passes over texts written out here, and beside lm-evaluation-harness's tasks."""

import json
import random

import numpy as np
import pytest
import tiny_eval
from tiny_eval import WORDS

from jaxlm.config import ConfigError
from jaxlm.data.tokenizer.ids import document
from jaxlm.eval import core, harness
from jaxlm.eval.likelihood import Score

KINDS = {"choose": "multiple_choice", "schema": "schema", "write": "language_modeling"}
ROWS = {
    "choose": [
        {"query": f" {w} is", "choices": [f"sat on a {w} mat ", f"sat on {w}"][:: 1 - 2 * (i % 2)], "gold": i // 2 % 2}
        for i, w in enumerate(WORDS)
    ],
    "schema": [
        {"context_options": [f"the {w} ran", "the mat"], "continuation": "sat on a mat", "gold": i % 2}
        for i, w in enumerate(WORDS)
    ],
    "write": [{"context": f"the {w} sat on a ", "continuation": f"{w} mat "} for w in WORDS],
}


@pytest.fixture(scope="module")
def scorer():
    return tiny_eval.scorer()


def bundle(place, shots=(2, 2, 2)):
    """A bundle with a task of each type."""
    (place / "eval_data").mkdir()
    entries = []
    for (name, rows), few in zip(ROWS.items(), shots, strict=True):
        (place / f"eval_data/{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        entries.append(
            {"label": name, "dataset_uri": f"{name}.jsonl", "icl_task_type": KINDS[name], "num_fewshot": [few]}
        )
    (place / "core.yaml").write_text(json.dumps({"icl_tasks": entries}))  # JSON is YAML
    (place / "eval_meta_data.csv").write_text("Eval Task,Random baseline\nchoose,50.0\nschema,50\nwrite,0.0\n")
    return place


def whole(kind, row, choice):
    """A row written out with one of its choices: (what stands before the answer, the answer)."""
    if kind == "choose":
        return f"{row['query']}", f" {row['choices'][choice]}"
    if kind == "schema":
        return row["context_options"][choice], f" {row['continuation']}"
    return row["context"].strip(), f" {row['continuation']}"


def alone(scorer, before, scored):
    """(log p, greedy, tokens, bytes) of a text after another, in a pass of its own."""
    given, ids = document(scorer.tokenizer, before), document(scorer.tokenizer, before + scored)
    assert ids[: len(given)] == given
    score = scorer.score([(given, ids[len(given) :])])[0]
    return score.logp, score.greedy, score.tokens, len(scored.encode())


@pytest.mark.parametrize("kind", KINDS)
def test_an_item_is_what_plain_passes_say(scorer, tmp_path, kind):
    """Worked examples and order are nanochat's; choices are judged by their mean log p from where they differ."""
    (found,) = tiny_eval.asked(scorer, [f"core:{kind}"], tiny_eval.settings(bundle(tmp_path)), 8)
    order = list(range(len(WORDS)))
    random.Random(1337).shuffle(order)
    assert [item.id for item in found.items] == [str(number) for number in order[:8]]
    rows = [ROWS[kind][number] for number in order]
    for place, item in enumerate(found.items):
        others = [row for number, row in enumerate(rows) if number != place]
        examples = random.Random(1234 + place).sample(others, 2)
        shown = "".join("".join(whole(kind, row, row.get("gold", 0))) + "\n\n" for row in examples)
        count, row = 1 if kind == "write" else 2, rows[place]
        texts = [whole(kind, row, choice) for choice in range(count)]
        answers = [alone(scorer, shown + before, answer) for before, answer in texts]
        judged, right = answers, float(answers[0][1])
        if kind == "choose":  # the answers begin with "sat on "
            judged = [alone(scorer, f"{shown}{before} sat on", answer[len(" sat on") :]) for before, answer in texts]
        if kind != "write":
            right = float(np.argmax([logp / tokens for logp, _, tokens, _ in judged]) == row["gold"])
        assert item.metrics["acc"] == right
        np.testing.assert_allclose(item.detail["logp"], [logp for logp, *_ in answers], rtol=1e-4)
        assert item.detail["bytes"] == [size for *_, size in answers]
        bits = -answers[row.get("gold", 0)][0] / np.log(2) / answers[row.get("gold", 0)][-1]
        assert item.metrics["bits_per_byte"] == pytest.approx(bits, rel=1e-4)
    if kind != "write":
        assert 0 < found.metrics["acc"] < 1  # else a wrong choice might not be seen


def test_an_answer_is_right_if_each_of_its_tokens_is_the_likeliest(scorer, tmp_path):
    class Judge:
        tokenizer = scorer.tokenizer

        def score(self, requests, what):
            return [Score(-1.0, number % 2 == 0, len(scored)) for number, (_, scored) in enumerate(requests)]

    (found,) = core.evaluate(Judge(), "write", tiny_eval.settings(bundle(tmp_path)), 4)
    assert [item.metrics["acc"] for item in found.items] == [1.0, 0.0, 1.0, 0.0]


def test_core_is_the_mean_of_the_centred_scores(scorer, tmp_path):
    found = tiny_eval.asked(scorer, ["core"], tiny_eval.settings(bundle(tmp_path, (2, 0, 1))), 6)
    assert [result.task for result in found] == [*KINDS, "core"]
    for result in found[:3]:
        chance = 0.0 if result.task == "write" else 0.5
        assert result.metrics["centred"] == pytest.approx((result.metrics["acc"] - chance) / (1 - chance))
        assert len(result.items) == 6
    assert found[3].metrics["centred"] == pytest.approx(np.mean([r.metrics["centred"] for r in found[:3]]))
    assert [result.fewshot for result in found] == [2, 0, 1, None]
    assert "over 3 tasks; GPT-2 (1.5B): 0.2565" in core.line(found)
    alike = tiny_eval.asked(scorer, ["core"], tiny_eval.settings(tmp_path, fewshot=1), 1)
    assert [result.fewshot for result in alike] == [1] * 4


def test_a_choice_that_another_begins_with_keeps_its_last_token(scorer, tmp_path):
    rows = [{"query": "the cat", "choices": ["sat on", "sat on a mat"], "gold": 0}] * 2
    (tmp_path / "begins.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (found,) = tiny_eval.asked(scorer, ["core"], tiny_eval.settings(tmp_path), 1)
    assert found.items[0].detail["bytes"] == [len(" sat on"), len(" sat on a mat")]
    logp = [alone(scorer, "the cat", f" {choice}")[0] for choice in rows[0]["choices"]]
    np.testing.assert_allclose(found.items[0].detail["logp"], logp, rtol=1e-4)


def test_core_says_what_is_missing(tmp_path):
    with pytest.raises(ConfigError, match=r"no core\.yaml and no file of CORE's rows"):
        harness.Benchmarks(["core"], tiny_eval.settings(tmp_path))
    bundle(tmp_path)
    with pytest.raises(ConfigError, match=r"no task chose in eval.data_dir=.*: it has choose, schema, write"):
        harness.Benchmarks(["core:chose"], tiny_eval.settings(tmp_path))
