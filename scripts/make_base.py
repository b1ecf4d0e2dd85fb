"""Trains the base model of the post-training figures in docs/finetuning.md.

    python scripts/make_base.py TEXT_FOLDER runs/base

6 layers, d 256, 4 query / 2 key-value heads, SwiGLU 704, 8,192 ids of which the last five are ChatML's: 6.5M parameters, and
6M tokens; 37 minutes on 2 cores. TEXT_FOLDER is any folder of text (.jsonl, .jsonl.gz with a field `text`, .txt). The same
command continues after an interruption. GSM8K's rows, which have no field `text`, become question and answer.
"""

import argparse
import gzip
import json
import pathlib
import subprocess
import sys

STEPS, ROWS, TOKENS = 1465, 8, 512  # 6.0M tokens


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("texts", type=pathlib.Path, help="a folder of text")
    parser.add_argument("run", type=pathlib.Path, help="the run's folder")
    given = parser.parse_args()
    texts = given.run / "texts"
    if not texts.is_dir():
        texts.mkdir(parents=True)
        for path in sorted(given.texts.iterdir()):
            copy(path, texts)
    settings = {
        "data.path": texts,
        "data.chat_tokens": True,
        "model.n_layers": 6,
        "model.d_model": 256,
        "model.n_heads": 4,
        "model.n_kv_heads": 2,
        "model.d_ff": 704,
        "model.vocab_size": 8192,
        "train.steps": STEPS,
        "train.batch_size": ROWS,
        "train.seq_len": TOKENS,
        "train.eval_every_steps": 500,
        "optim.lr": 3e-3,
        "optim.warmup_steps": 50,
        "optim.final_lr_ratio": 0.05,
        "checkpoint.every_steps": 500,
        "log.every_steps": 50,
        "sample.every_steps": 500,
    }
    command = [sys.executable, "-m", "jaxlm.main", "--config=local_35m", f"--config.workdir={given.run}"]
    return subprocess.call(command + [f"--config.{key}={value}" for key, value in settings.items()])


def copy(path: pathlib.Path, folder: pathlib.Path) -> None:
    """Copies a text file; a row with question and answer becomes one text."""
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as file:
        if not path.name.removesuffix(".gz").endswith(".jsonl"):
            (folder / path.name).write_text(file.read(), encoding="utf-8")
            return
        rows = [json.loads(line) for line in file]
    lines = [
        json.dumps({"text": row.get("text") or f"Question: {row['question']}\nAnswer: {row['answer']}"}) for row in rows
    ]
    (folder / path.name.removesuffix(".gz")).write_text("".join(line + "\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
