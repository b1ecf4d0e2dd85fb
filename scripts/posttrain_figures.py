"""Measures SFT, LoRA, QLoRA, the reward model and DPO on one small base: the tables of docs/finetuning.md.

    python scripts/make_base.py TEXT_FOLDER runs/base
    python scripts/posttrain_data.py dolly.jsonl data/posttrain
    python scripts/posttrain_figures.py runs/base data/posttrain runs/figures --part=sft
    python scripts/posttrain_figures.py runs/base data/posttrain runs/figures --part=pairs

Each part trains its runs one after another (finished runs are kept) and prints a table, also written to `figures.json`.
Full fine-tuning and LoRA have three learning rates each, QLoRA and a LoRA on attention alone the best of LoRA's. A file
`hh.jsonl.gz` among the pairs adds rows for Anthropic's HH. The loss of an answer's text leaves out the end token. `ended` is
the share of 100 held-out prompts whose answer, drawn at temperature 1, ends with <|im_end|> within 256 tokens; `answers` is the
same share for the held-out answers.
"""

import argparse
import dataclasses
import json
import pathlib
import subprocess
import sys

SFT_STEPS, PAIR_STEPS = 100, 100
RATES = {"full": (1e-4, 2e-4, 3e-4), "lora": (1e-3, 2e-3, 3e-3)}
FORGOTTEN = (
    0.02  # the best rate has the lowest loss among rates that raise the loss on the base's text by at most this share
)
BESIDE = {"full": (), "lora": ("attention", "qlora")}  # methods that take the best rate of another
METHODS = {
    "full": ("sft", {}),
    "lora": ("sft_lora", {}),
    "attention": ("sft_lora", {"adapter.targets": ("attn/[qkvo]",)}),
    "qlora": ("sft_qlora", {}),
}
PREFERENCES = {
    "reward": ("reward", {"optim.lr": 3e-4}),
    "dpo": ("dpo", {"optim.lr": 1e-4}),
    "dpo robust": ("dpo", {"optim.lr": 1e-4, "dpo.loss": "robust", "dpo.label_smoothing": 0.2}),
}
PLANTED = ("answer", "shuffled")
HH = "hh.jsonl.gz"  # Anthropic's transcripts; without this file the table lacks their rows
LENGTH = 256  # tokens of an answer, at most


def train(config: str, run: pathlib.Path, settings: dict) -> None:
    """Trains to the end, unless the run has ended; exits if that fails."""
    words = [f"--config.{key}={value}" for key, value in settings.items()]
    command = [sys.executable, "-m", "jaxlm.main", f"--config={config}", f"--config.workdir={run}", *words]
    if not (run / "ended").exists():
        if subprocess.call(command):
            sys.exit(f"{' '.join(command)} failed")
        (run / "ended").touch()


def values(run: pathlib.Path, name: str) -> list[float]:
    """Returns all values of a metric, in order."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
    return [row[name] for row in rows if name in row]


def ended(run: pathlib.Path, chats: pathlib.Path) -> dict[str, float]:
    """Returns the share of answers that end, for the model's answers and for the held-out ones."""
    from jaxlm import config as config_lib  # here, so that this process is small while runs train
    from jaxlm.config import config_files
    from jaxlm.data.chats import chat
    from jaxlm.eval import model
    from jaxlm.models.decode import generate

    c = config_lib.resolve(config_files.from_run(run / "config.json"))
    restored = model.restore(c, "latest")
    rows = [json.loads(line)["messages"] for line in chats.read_text("utf-8").splitlines()]
    tokenizer, end = restored.tokenizer, restored.tokenizer.find(chat.END)
    if end is None:
        return {}
    sample = dataclasses.replace(c.sample, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=LENGTH)
    asked = [chat.ids(tokenizer, row[:1]) for row in rows]
    asked = [ids for ids in asked if len(ids) + LENGTH <= restored.model.config.max_seq_len]
    answers = generate.generate(
        restored.model, restored.variables, asked, sample, stop_ids=(end, tokenizer.eos_id), seed=1
    )
    short = sum(len(chat.ids(tokenizer, row, reply=False)) - len(chat.ids(tokenizer, row[:1])) < LENGTH for row in rows)
    return {
        "ended": sum(end in ids for ids in answers) / len(answers),
        "answers": short / len(rows),
        "prompts": len(asked),
    }


def sft(base: pathlib.Path, data: pathlib.Path, out: pathlib.Path) -> list[dict]:
    """Runs SFT by each method at its rates, then the best again without replay."""
    rows = []
    shared = {
        "origin": base,
        "data.path": data / "chats.jsonl",
        "examples.val_path": data / "chats_held_out.jsonl",
        "train.steps": SFT_STEPS,
        "train.seq_len": 512,
        "train.batch_size": 8,
        "train.eval_every_steps": SFT_STEPS // 2,
        "eval.at_start": True,
    }

    def measure(method: str, rate: float, replay: float) -> dict:
        config, own = METHODS[method]
        run = out / f"{method}-{rate:g}" if replay else out / f"{method}-{rate:g}-no-replay"
        train(config, run, shared | own | {"optim.lr": rate, "replay.share": replay})
        losses, base_bytes = values(run, "val/text_loss"), values(run, "val/base/bits_per_byte")
        row = {
            "method": method,
            "rate": rate,
            "replay": replay,
            "text_loss": losses[-1],
            "gain": losses[0] - losses[-1],
        }
        row |= {"base_change": base_bytes[-1] / base_bytes[0] - 1} | ended(run, data / "chats_held_out.jsonl")
        return row

    for method, rates in RATES.items():
        found = [measure(method, rate, 0.05) for rate in rates]
        best = _best(found)["rate"]
        rows += [*found, measure(method, best, 0.0), *(measure(other, best, 0.05) for other in BESIDE[method])]
    return rows


def _best(rows: list[dict]) -> dict:
    return min(rows, key=lambda row: (row["base_change"] > FORGOTTEN, row["text_loss"]))


def pairs(base: pathlib.Path, data: pathlib.Path, out: pathlib.Path) -> list[dict]:
    """Trains reward models and DPO on the pairs, from the best full SFT."""
    figures = json.loads((out / "figures.json").read_text())["sft"]
    best = _best([row for row in figures if row["method"] == "full" and row["replay"]])
    start = out / f"full-{best['rate']:g}"
    kinds = {
        name: {"data.path": data / f"{name}.jsonl", "examples.val_path": data / f"{name}_held_out.jsonl"}
        for name in (*PLANTED, "other")
    }
    if (data / HH).exists():
        kinds["hh"] = {"data.path": data / HH, "data.val_fraction": 0.1}
    shared = {"origin": start, "train.steps": PAIR_STEPS, "train.seq_len": 512, "train.batch_size": 8}
    shared |= {"train.eval_every_steps": PAIR_STEPS // 2, "eval.at_start": True}
    rows = []
    for kind, paths in kinds.items():
        for name, (config, own) in PREFERENCES.items():
            if "robust" in name and kind not in PLANTED:
                continue  # the share of wrong labels is unknown
            run = out / f"{name.replace(' ', '-')}-{kind}"
            train(config, run, shared | paths | own)
            row = {"pairs": kind, "method": name, "accuracy": values(run, "val/accuracy")[-1]}
            rows.append(row | {"predicted": values(run, "val/predicted")[-1]})
    return rows


PARTS = {"sft": sft, "pairs": pairs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("base", type=pathlib.Path)
    parser.add_argument("data", type=pathlib.Path, help="what posttrain_data.py made")
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--part", choices=list(PARTS), default="sft")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    rows = PARTS[given.part](given.base.resolve(), given.data.resolve(), given.out)
    kept = given.out / "figures.json"
    figures = json.loads(kept.read_text()) if kept.exists() else {}
    kept.write_text(json.dumps(figures | {given.part: rows}, indent=1))
    names = list(dict.fromkeys(name for row in rows for name in row))
    print(*(f"{name:>12}" for name in names))
    for row in rows:
        cells = (row.get(name, "") for name in names)
        print(*(f"{cell:12.4g}" if isinstance(cell, float) else f"{cell:>12}" for cell in cells))


if __name__ == "__main__":
    main()
