"""A folder in which the commands of the docs find what they name: RUN, DATA, runs/sft, chats.jsonl, corpora/techdocs, ..."""

import json
import pathlib
import shutil
from pydoc_data import topics

import tiny_chats
import tiny_data
import tiny_eval
from documented import ROOT

from jaxlm.cli import cli
from jaxlm.configs.data import techdocs
from jaxlm.serve.arena.store import Store

# A train command with these behind it ends in seconds. The model is that of RUN; of a given origin it is the origin's.
STEPS = 4
SHAPE = {"n_layers": 1, "d_model": 32, "n_heads": 2, "n_kv_heads": 1, "head_dim": 0, "d_ff": 64, "vocab_size": 0}
MODEL = [f"--config.model.{key}={value}" for key, value in SHAPE.items()] + ["--config.model.max_seq_len=1024"]
SHORT = [
    *(f"--config.train.steps={STEPS}", "--config.train.batch_size=8", "--config.train.microbatch_size=0"),
    *("--config.train.eval_every_steps=2", "--config.checkpoint.every_steps=2", "--config.checkpoint.keep_last=9"),
    *("--config.optim.warmup_steps=1", "--config.sample.prompts=()", "--config.log.tensorboard=False"),
    *("--config.data.val_fraction=0.2", "--config.eval.at_start=False"),
]
PRETRAINING = [*MODEL, *SHORT, "--config.train.seq_len=32"]
POSTTRAINING = [*SHORT, "--config.train.seq_len=256"]


# What a command of each kind begins with and learns from, where it leaves that to the reader; and what makes it short.
def _on_sft(data: str) -> list[str]:
    return ["--config.origin=runs/sft", f"--config.{data}"]


TRAINING = {
    "pretrain": (["--config.data.dir=DATA"], PRETRAINING),
    "sft": (_on_sft("data.path=chats.jsonl"), POSTTRAINING),
    **dict.fromkeys(("dpo", "reward"), (_on_sft("data.path=pairs.jsonl"), POSTTRAINING)),
    **dict.fromkeys(("grpo", "ppo"), (_on_sft("reward.tasks=reasoning_gym:chain_sum"), [])),
}
TINY = """from jaxlm.configs import base

def get_config():
    c = base.get_config()
    c.model.n_layers, c.model.d_model, c.model.n_heads, c.model.n_kv_heads, c.model.d_ff = 1, 32, 2, 1, 64
    c.model.vocab_size = 512
    return c
"""


def make(folder: pathlib.Path) -> None:
    """Fills the current folder, which is `folder`. Runs are made by the commands that the README gives, shrunk."""
    for name in ("configs", "docs", "scripts"):
        (folder / name).symlink_to(ROOT / name)
    tiny_data.make(folder / "DATA", {"a": 1.0, "b": 1.0})
    texts(folder)
    assert cli.main(["trace", "DATA", "--string=sea is", "--remove=personx.jsonl"]) == 0
    tiny_chats.chats(folder / "chats.jsonl")
    tiny_chats.pairs(folder / "pairs.jsonl")
    (folder / "prompts.txt").write_text("one two\nthree four\n")
    (folder / "questions.txt").write_text("What is a list?\n")
    (folder / "my_scorers.py").write_text("def shouting(prompts, texts):\n    return [0.5 for text in texts]\n")
    for name in ("score.py", "loss.py"):
        (folder / name).write_text("print('1\\n2\\n3')\n")
    (folder / "answer.txt").write_text("The answer is long enough to hold a copy of 64 bytes, but copies nothing.\n")
    votes = [{"winner": "ab"[i % 2], "item": i} for i in range(8)]
    (folder / "votes.jsonl").write_text("".join(json.dumps(vote) + "\n" for vote in votes))
    (folder / "TOOK").mkdir()
    (folder / "TOOK/01-documents").write_text("3")
    (folder / "FOLDER/a.txt").write_text("one two three four")
    (folder / "tiny.py").write_text(TINY)
    tiny_eval.benchmarks(folder / "benchmarks", examples=6)
    (folder / "BENCHMARKS").symlink_to("benchmarks/hub")
    arena(folder / "arena.sqlite")
    curve = "\n".join(f"{step},{1e-3},{3 + 50 / step}" for step in range(20, 1000, 20))
    (folder / "DIR/curve.csv").write_text(f"step,lr,loss\n{curve}\n")
    ours(folder)


def ours(folder: pathlib.Path) -> None:
    """Runs of each kind, and one exported."""

    def jaxlm(*words: str) -> None:
        assert cli.main([*words]) == 0, words

    more = ["--config.workdir=runs/quickstart", "--config.data.dir=DATA", "--config.optim.schedule_steps=20"]
    jaxlm("train", "quickstart", *PRETRAINING, *more)
    for name, kind, origin in (("sft", "sft", "quickstart"), ("dpo", "dpo", "sft")):
        words = [f"--config.workdir=runs/{name}", f"--config.origin=runs/{origin}"]
        jaxlm("train", kind, *POSTTRAINING, *TRAINING[kind][0], *words)
    for run, name in (("sft", "HF_DIR"), ("quickstart", "HF_BASE")):
        jaxlm("export", f"runs/{run}", "--to=hf", f"--out={name}", "--dtype=f32")
    for run, step in (("quickstart", 2), ("quickstart", 4), ("sft", 4), ("dpo", 4)):
        words = ["--tasks=arc_easy", "--limit=4", "--config.eval.data_dir=BENCHMARKS", f"--checkpoint={step}"]
        jaxlm("eval", f"runs/{run}", *words)
    jaxlm("prepare", "configs/data/techdocs.py", "--config.prepare.workers=1", "--config.prepare.report_mb=0")
    shutil.copytree(folder / "runs/quickstart", folder / "runs/other")
    names = {"RUN": "quickstart", "RUN_A": "quickstart", "RUN_B": "other", "SFT_RUN": "sft"}
    names |= {"runs/a": "quickstart", "runs/b": "other"}
    for name, run in names.items():
        (folder / name).symlink_to(run if name.startswith("runs/") else f"runs/{run}")
    (folder / "HF").symlink_to("HF_DIR")


def texts(folder: pathlib.Path) -> None:
    """Texts as people have them: the topics of `help()`, as Markdown, as lines of JSON, as HTML."""
    few = {name: text for name, text in topics.topics.items() if len(text) > 3000 and name.isalpha()}
    found = {f"{name}{at}": text[at : at + 3000] for name, text in few.items() for at in (0, 3000) if text[at:]}
    manuals = [f"corpora/techdocs/{name}" for name in techdocs.SOURCES if name != "handbook"]
    manuals.append("corpora/techdocs/handbook/a/b/html/en-US")
    for place in ("DIR", "texts", "TEXTS", "FOLDER_OF_TEXT", "FOLDER", *manuals):
        (folder / place).mkdir(parents=True)
    for i, (name, text) in enumerate(found.items()):
        (folder / "DIR" / f"{name}.md").write_text(text)
        page = "".join(f"<p>{part}</p>" for part in text.replace("<", "&lt;").split("\n\n"))
        html = f"<html><body><main><h1>{name}</h1>{page}</main></body></html>"
        (folder / manuals[i % len(manuals)] / f"{name}.html").write_text(html)
    lines = "".join(json.dumps({"text": text}) + "\n" for text in found.values())
    for place in ("texts/a.jsonl", "TEXTS/a.jsonl", "FOLDER_OF_TEXT/a.jsonl", "FILE.jsonl"):
        (folder / place).write_text(lines)


def arena(path: pathlib.Path) -> None:
    """An arena with a few votes."""
    store = Store(path)
    for number in store.enter({"a": "a", "b": "b"}):
        store.answer(number, {f"question {n}?": f"answer {number}" for n in range(8)})
    while ballot := store.ballot("ann"):
        store.vote(ballot.token, "ann", "left" if ballot.left == "answer 1" else "right")
    store.close()
