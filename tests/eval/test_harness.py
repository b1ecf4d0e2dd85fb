"""Benchmarks: lm-evaluation-harness's tasks on made questions, beside its own `hf` model; HumanEval's and CORE's own rules."""

import json
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
import tiny_models as tiny

from jaxlm import config, models, sharding
from jaxlm.config import ConfigError
from jaxlm.data.ids import document
from jaxlm.data.tokenizer import train_tokenizer
from jaxlm.eval import completions, core, harness, humaneval, items, likelihood

ROOT = pathlib.Path(__file__).resolve().parents[2]
WORDS = "the cat sat on a mat while two small dogs ran over seven green hills and one old river slept".split()


@pytest.fixture(scope="module")
def scorer():
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(WORDS, 12)) + ". Question: Answer:" for _ in range(200)]
    tokenizer = train_tokenizer(texts, vocab_size=340, chat_tokens=False)
    model = models.build(tiny.model_config(vocab_size=tokenizer.vocab_size, max_seq_len=128), "blocked")
    mesh = sharding.make_mesh(config.MeshConfig(1, 1, 1, 1), jax.devices()[:1])
    return likelihood.Scorer(model, {"params": tiny.random_params(model)}, tokenizer, mesh, 2048, 0)


def settings(data_dir="", **changes):
    c = config.resolve(tiny.config_files.load("base", ["data.path=x", f"eval.data_dir={data_dir}"]))
    return tiny.dataclasses.replace(c.eval, **changes)


def sentence(rng, words):
    return " ".join(rng.choice(WORDS, words))


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    """Questions of arc_easy, piqa and gsm8k, laid out by the script."""
    place, rng = tmp_path_factory.mktemp("bench"), np.random.default_rng(1)
    arc = [
        {"query": f"Question: {sentence(rng, 5)}?", "choices": [sentence(rng, n) for n in (1, 3, 2, 4)], "gold": i % 4}
        for i in range(14)
    ]
    piqa = [
        {"query": f"Question: {sentence(rng, 3)}\n", "choices": [sentence(rng, 4), sentence(rng, 6)], "gold": i % 2}
        for i in range(10)
    ]
    gsm8k = [{"question": f"{sentence(rng, 6)}?", "answer": f"{sentence(rng, 4)}\n#### {i}"} for i in range(6)]
    for name, rows in (("arc_easy", arc), ("piqa", piqa), ("gsm8k", gsm8k)):
        (place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = [f"{name}={place / name}.jsonl" for name in ("arc_easy", "piqa", "gsm8k")]
    script = ROOT / "scripts/hub_layout.py"
    subprocess.run([sys.executable, script, place / "hub", *files, "--examples=2"], check=True, capture_output=True)
    return place


def test_stop_strings_end_a_text_across_tokens(scorer):
    prompts = [document(scorer.tokenizer, text) for text in ("the cat", "two small dogs ran over")]
    whole = completions.complete(scorer, prompts, [], completions.greedy(24), 0, "writing")
    assert all(len(text) > 8 for text in whole)
    stop = whole[0][5:9]
    cut = completions.complete(scorer, prompts, [stop, ""], completions.greedy(24), 0, "writing")
    assert cut == [text.partition(stop)[0] for text in whole]


def test_a_prompt_that_leaves_no_room_is_cut_on_the_left_and_told(scorer, capsys):
    long = document(scorer.tokenizer, " ".join(WORDS * 9))
    assert len(long) > 128
    (cut,) = completions.complete(scorer, [long], [], completions.greedy(16), 0, "writing")
    (same,) = completions.complete(scorer, [long[-112:]], [], completions.greedy(16), 0, "writing")
    assert cut == same
    assert "1 of 1 prompts leave no room for 16 new tokens in the model's context of 128" in capsys.readouterr().err


def test_some_questions_are_spread_over_all():
    assert items.spread(10, 3) == [0, 3, 6]
    assert items.spread(3, 0) == items.spread(3, 9) == [0, 1, 2]
    assert items.shares({"a": 30, "b": 10}, 8) == {"a": 6, "b": 2}


def bundle(place):
    """A bundle with a task of each type."""
    rows = {
        "choose": [{"query": f"{w} is", "choices": ["a cat", "seven green hills"], "gold": i % 2} for i, w in enumerate(WORDS)],
        "schema": [{"context_options": [f"the {w}", "the mat"], "continuation": "sat on a mat", "gold": 0} for w in WORDS],
        "write": [{"context": f"the {w} sat on a ", "continuation": "mat"} for w in WORDS],
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
    found = harness.evaluate(scorer, ["core"], settings(bundle(tmp_path)), 6)
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
        harness.Benchmarks(["core"], settings(tmp_path))
    bundle(tmp_path)
    with pytest.raises(ConfigError, match="no task chose in eval.data_dir=.*: it has choose, schema, write"):
        harness.Benchmarks(["core:chose"], settings(tmp_path))


PROBLEM = {
    "task_id": "Made/0",
    "prompt": "def double(x):\n",
    "entry_point": "double",
    "test": "def check(f):\n    assert f(2) == 4",
}


def test_humaneval_reads_its_layout_and_names_what_is_missing(tmp_path):
    with pytest.raises(ConfigError, match="humaneval reads openai/openai_humaneval, which .* does not have"):
        humaneval.read(str(tmp_path))
    (tmp_path / "HumanEval.jsonl").write_text(json.dumps(PROBLEM))
    assert humaneval.read(str(tmp_path)) == [PROBLEM]
