"""A scorer of a small model, and made benchmarks."""

import dataclasses
import json
import pathlib
import shutil

import hub_layout
import jax
import numpy as np
import tiny_models as tiny

from jaxlm import config, models
from jaxlm.config import config_files
from jaxlm.data.tokenizer.train import train_tokenizer
from jaxlm.devices import sharding
from jaxlm.eval import harness, likelihood
from jaxlm.eval.results import TaskResult

WORDS = "the cat sat on a mat while two small dogs ran over seven green hills and one old river slept".split()  # noqa: SIM905


def scorer(max_seq_len: int = 128, chats: bool = False) -> likelihood.Scorer:
    """The scorer of a small random model with a tokenizer of its own."""
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(WORDS, 12)) + ". Question: Answer:" for _ in range(200)]
    tokenizer = train_tokenizer(texts, vocab_size=340, chat_tokens=chats)
    sizes = {"vocab_size": tokenizer.vocab_size, "max_seq_len": max_seq_len, "n_layers": 1}
    model = models.build(tiny.model_config(**sizes), "blocked")
    mesh = sharding.make_mesh(config.MeshConfig(1, 1, 1, 1), jax.devices()[:1])
    return likelihood.Scorer(model, {"params": tiny.random_params(model)}, tokenizer, mesh, 2048, 0)


def settings(data_dir: str | pathlib.Path = "", **changes) -> config.EvalConfig:
    c = config.resolve(config_files.load("base", ["data.path=x", f"eval.data_dir={data_dir}"]))
    return dataclasses.replace(c.eval, **changes)


def asked(scorer: likelihood.Scorer, tasks: list[str], of: config.EvalConfig, items: int = 0) -> list[TaskResult]:
    """What the scorer's model answers on so many questions of each task."""
    return list(harness.Benchmarks(tasks, of)(scorer, items))


def sentence(rng: np.random.Generator, words: int) -> str:
    return " ".join(rng.choice(WORDS, words))


def benchmarks(place: pathlib.Path, examples: int = 3) -> pathlib.Path:
    """Lays questions of arc_easy, piqa and gsm8k out by the script: in hub with worked examples, in bare without."""
    rng = np.random.default_rng(1)
    arc = [
        {"query": f"Question: {sentence(rng, 5)}?", "choices": [sentence(rng, n) for n in (1, 3, 2, 4)], "gold": i % 4}
        for i in range(14)
    ]
    piqa = [
        {"query": f"Question: {sentence(rng, 3)}\n", "choices": [sentence(rng, 4), sentence(rng, 6)], "gold": i % 2}
        for i in range(10)
    ]
    gsm8k = [
        {"question": f"{sentence(rng, 6)}?", "answer": f"{sentence(rng, 4)}\n#### {i}"} for i in range(3 + examples)
    ]
    lay(place / "hub", {"arc_easy": arc, "piqa": piqa, "gsm8k": gsm8k}, examples)
    lay(place / "bare", {"arc_easy": arc, "piqa": piqa, "gsm8k": gsm8k}, 0)
    return place


def more_benchmarks(place: pathlib.Path) -> pathlib.Path:
    """Lays questions of tasks with columns of their own out: two contexts, several right answers, no choices."""
    rng = np.random.default_rng(2)
    few = range(8)
    rows = {
        "hellaswag": [
            {"ctx_a": sentence(rng, 4), "ctx_b": sentence(rng, 2), "activity_label": sentence(rng, 1)}
            | {"endings": [f"{sentence(rng, n)} [title] the [x] mat." for n in (2, 3, 1, 4)], "label": str(i % 4)}
            for i in few
        ],
        "winogrande": [
            {"sentence": f"{sentence(rng, 3)} _ {sentence(rng, 3)}.", "option1": "cat", "option2": "old river"}
            | {"answer": str(1 + i % 2)}
            for i in few
        ],
        "truthfulqa_mc2": [
            {"question": f"{sentence(rng, 4)}?"}
            | {
                f"mc{kind}_targets": {
                    "choices": [sentence(rng, n) for n in (3, 1, 2, 4)[: 3 + i % 2]],
                    "labels": labels,
                }
                for kind, labels in ((1, [1, 0, 0, 0][: 3 + i % 2]), (2, [1, 1, 0, 0][: 3 + i % 2]))
            }
            for i in few
        ],
        "mmlu_anatomy": [
            {"question": sentence(rng, 5), "subject": "anatomy", "choices": [sentence(rng, 2) for _ in range(4)]}
            | {"answer": i % 4}
            for i in few
        ],
        "lambada_openai": [{"text": sentence(rng, 9)} for _ in few],
    }
    lay(place / "hub", rows, 3)
    # Its sister has the same rows.
    shutil.copytree(place / "hub/EleutherAI/lambada_openai", place / "hub/cimec/lambada")
    return place


def lay(out: pathlib.Path, rows: dict[str, list[dict]], examples: int) -> None:
    """Lays the rows of tasks out in a folder as the hub has them, the last ones as worked examples."""
    out.mkdir(parents=True, exist_ok=True)
    for name, of_task in rows.items():
        (out.parent / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in of_task))
    files = [f"{name}={out.parent / name}.jsonl" for name in rows]
    assert hub_layout.main([str(out), *files, f"--examples={examples}"]) == 0
