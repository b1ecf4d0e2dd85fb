"""CORE beside plain passes and in training: its three types of rows, the same questions at each step, compiled once."""

import dataclasses
import json
import random
import types

import jax
import numpy as np
import pytest
import tiny_data
import tiny_eval
import tiny_models as tiny
from tiny_eval import WORDS

from jaxlm import config, models
from jaxlm.config import ConfigError, config_files
from jaxlm.data.tokenizer.ids import document
from jaxlm.devices import sharding
from jaxlm.eval import core, harness, results
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


TASK = [{"query": f"{word} is", "choices": ["one", "two two"], "gold": n % 2} for n, word in enumerate("abcdefgh")]


@pytest.fixture
def parts(tmp_path):
    folder = tmp_path / "bundle"
    folder.mkdir()
    (folder / "made.jsonl").write_text("".join(json.dumps(row) + "\n" for row in TASK))
    data = tiny_data.make(tmp_path, {"a": 1.0})
    keys = [
        "data.path=x", "eval.tasks=('core:made',)", f"eval.data_dir={folder}", "eval.max_items=6", "eval.batch_size=4",
    ]  # fmt: skip
    c = config.resolve(config_files.load("base", keys))
    model = models.build(tiny.model_config(vocab_size=300, max_seq_len=64, n_layers=1), "blocked")
    return c, model, data, sharding.make_mesh(config.MeshConfig(1, 1, 1, 1), jax.devices()[:1])


def compiled(caplog) -> int:
    return sum("Finished XLA compilation" in message for message in caplog.messages)


def test_metrics_and_files_of_a_step(parts, tmp_path, caplog):
    c, model, data, mesh = parts
    measure = harness.make(harness.find(c.eval), c, model, data, mesh, tmp_path)
    variables = {"params": tiny.random_params(model)}
    found = measure(variables, 5)
    other = jax.tree.map(lambda leaf: leaf * 1.5, variables)
    with jax.log_compiles():
        jax.jit(lambda x: x + 1)(1)
        assert compiled(caplog) == 1
        again = measure(other, 10)
    assert compiled(caplog) == 1
    assert set(found) == set(again) >= {f"eval/made/{name}" for name in ("acc", "bits_per_byte", "margin")}
    assert results.steps(tmp_path) == [5, 10]
    first, second = (results.read(tmp_path / "eval" / step)["made"] for step in ("5", "10"))
    assert len(first.items) == 6
    assert [item.id for item in first.items] == [item.id for item in second.items]
    assert found["eval/made/acc"] == first.metrics["acc"]
    assert found["eval/made/bits_per_byte"] != again["eval/made/bits_per_byte"]  # other weights


def test_a_model_that_diverged_has_no_score_and_goes_on(parts, tmp_path, capsys):
    c, model, data, mesh = parts
    measure = harness.make(harness.find(c.eval), c, model, data, mesh, tmp_path)
    sound = {"params": tiny.random_params(model)}
    assert measure(jax.tree.map(lambda leaf: leaf * float("nan"), sound), 5) == {}
    assert "no benchmark scores at step 5: " in capsys.readouterr().err
    assert measure(sound, 10)
    assert results.steps(tmp_path) == [10]


def test_what_can_not_be_asked_is_refused_before_anything_is_made(parts):
    c = parts[0]
    wrong = types.SimpleNamespace(**{**vars(c.eval), "tasks": ("core:mad",)})
    with pytest.raises(ConfigError, match=r"mad"):
        harness.find(wrong)
    assert harness.find(types.SimpleNamespace(tasks=())) is None
    asked = dataclasses.replace(parts[0], eval=dataclasses.replace(parts[0].eval, chat_template=True))
    with pytest.raises(ConfigError, match=r"^this model has no chat template"):
        harness.make(harness.find(asked.eval), asked, *parts[1:], None)
    assert harness.make(None, *parts[:1], None, None, None, None) is None
