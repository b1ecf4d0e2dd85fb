"""A scorer of a small model, and made benchmarks."""

import dataclasses
import json
import pathlib
import subprocess
import sys

import jax
import numpy as np
import tiny_models as tiny

from jaxlm import config, config_files, models, sharding
from jaxlm.data.tokenizer import train_tokenizer
from jaxlm.eval import likelihood

ROOT = pathlib.Path(__file__).resolve().parents[1]
WORDS = "the cat sat on a mat while two small dogs ran over seven green hills and one old river slept".split()  # noqa: SIM905


def scorer(max_seq_len: int = 128) -> likelihood.Scorer:
    """The scorer of a small random model with a tokenizer of its own."""
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(WORDS, 12)) + ". Question: Answer:" for _ in range(200)]
    tokenizer = train_tokenizer(texts, vocab_size=340, chat_tokens=False)
    model = models.build(
        tiny.model_config(vocab_size=tokenizer.vocab_size, max_seq_len=max_seq_len, n_layers=1), "blocked"
    )
    mesh = sharding.make_mesh(config.MeshConfig(1, 1, 1, 1), jax.devices()[:1])
    return likelihood.Scorer(model, {"params": tiny.random_params(model)}, tokenizer, mesh, 2048, 0)


def settings(data_dir: str | pathlib.Path = "", **changes) -> config.EvalConfig:
    """The section `eval`, with these changes."""
    c = config.resolve(config_files.load("base", ["data.path=x", f"eval.data_dir={data_dir}"]))
    return dataclasses.replace(c.eval, **changes)


def sentence(rng: np.random.Generator, words: int) -> str:
    """Some words."""
    return " ".join(rng.choice(WORDS, words))


def benchmarks(place: pathlib.Path) -> pathlib.Path:
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
    gsm8k = [{"question": f"{sentence(rng, 6)}?", "answer": f"{sentence(rng, 4)}\n#### {i}"} for i in range(6)]
    for name, rows in (("arc_easy", arc), ("piqa", piqa), ("gsm8k", gsm8k)):
        (place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = [f"{name}={place / name}.jsonl" for name in ("arc_easy", "piqa", "gsm8k")]
    script = ROOT / "scripts/hub_layout.py"
    subprocess.run([sys.executable, script, place / "hub", *files, "--examples=3"], check=True, capture_output=True)
    subprocess.run([sys.executable, script, place / "bare", *files], check=True, capture_output=True)
    return place
