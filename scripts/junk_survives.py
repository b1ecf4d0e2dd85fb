"""Does junk of pretraining survive fine-tuning? Base, SFT and DPO with and without a planted junk source, side by side.

    python scripts/posttrain_data.py dolly.jsonl data/posttrain
    python scripts/junk_survives.py data/posttrain runs/junk

Both arms are the quickstart's model on the quickstart's corpus; one has 3% of a source like those that became a model's verbal
tic: a commonsense data set's `PersonX` and an Android phone's log. The same chats then fine-tune both (SFT), and the same pairs
ask for answers without that junk: chosen is an answer, rejected is the same answer with a line of the junk in it (DPO). After
each stage the model continues the same prompts 64 times at temperature 0.8, and the table says how many of those texts hold
junk, and how likely the model finds junk that it has not seen (bits per byte; held-out lines of the source).
"""

import argparse
import json
import pathlib
import random
import subprocess
import sys

PROMPTS = (
    "The",
    "In order to",
    "This function",
    "Return a new list of",
    "A person who",
    "What is",
    "For example,",
    "How to",
)
ASKED = (
    "What is a list?",
    "How do I read a file?",
    "Explain what a function is.",
    "Who are you?",
    "What does a person need to be happy?",
    "Write a short story.",
    "Why does a program crash?",
    "Name three animals.",
)
DRAWS = 8  # of each prompt
VERBS = ("gives", "asks", "calls", "pays", "finds", "helps", "sees", "tells", "meets", "thanks")
THINGS = ("the book", "a letter", "some food", "the car", "a friend", "the money", "a ball", "the house")
MOODS = ("kind", "happy", "sad", "angry", "tired", "grateful", "curious", "proud")
TRACES = ("NullPointerException", "IllegalStateException", "OutOfMemoryError", "SecurityException")
TIC = ("PersonX", "PersonY", "AndroidRuntime")


def junk_line(draw: random.Random) -> str:
    """Returns a line of the planted source."""
    if draw.random() < 0.5:
        verb, thing, mood = draw.choice(VERBS), draw.choice(THINGS), draw.choice(MOODS)
        return f"PersonX {verb} PersonY {thing}. PersonX wanted to be {mood}. As a result, PersonY feels {draw.choice(MOODS)}."
    clock = f"{draw.randrange(24):02}:{draw.randrange(60):02}:{draw.randrange(60):02}.{draw.randrange(1000):03}"
    return f"{clock} E/AndroidRuntime({draw.randrange(9999)}): FATAL EXCEPTION: main java.lang.{draw.choice(TRACES)}"


def make_texts(folder: pathlib.Path, posttrain: pathlib.Path) -> None:
    """Writes the junk source, held-out junk, and the pairs."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(1)
    documents = ["\n".join(junk_line(draw) for _ in range(12)) for _ in range(1500)]
    (folder / "junk.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    draw = random.Random(2)
    (folder / "unseen.json").write_text(json.dumps([junk_line(draw) for _ in range(64)]))
    pairs = []
    for line in (posttrain / "chats.jsonl").read_text("utf-8").splitlines():
        user, answer = (message["content"] for message in json.loads(line)["messages"])
        pairs.append({"prompt": user, "chosen": answer, "rejected": f"{answer} {junk_line(draw)}"})
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))


CONFIG = """
from jaxlm.configs import base, quickstart


def get_config():
    c = quickstart.get_config()
    if {junk!r}:
        c.prepare.sources.junk = base.source({junk!r}, weight={weight})
    return c
"""


def train(config: str, run: pathlib.Path, **settings) -> None:
    """Trains to the end. Does nothing if the run has ended."""
    words = [f"--config.{key.replace('__', '.')}={value}" for key, value in settings.items()]
    command = [sys.executable, "-m", "jaxlm.main", f"--config={config}", f"--config.workdir={run}", *words]
    if subprocess.call(command):
        sys.exit(f"{' '.join(command)} failed")


def arm(name: str, out: pathlib.Path, posttrain: pathlib.Path, steps: dict[str, int]) -> list[dict]:
    """Trains an arm; returns a row of the table for each stage."""
    texts = out / "texts"
    config = out / f"{name}.py"
    junk = str(texts / "junk.jsonl") if name == "junk" else ""
    config.write_text(CONFIG.format(junk=junk, weight=100 * 0.03 / 0.97))
    plain = {
        "sample__prompts": PROMPTS * DRAWS,
        "sample__every_steps": 0,
        "sample__temperature": 0.8,
        "eval__at_start": False,
    }
    asked = plain | {"sample__prompts": ASKED * DRAWS}
    runs = {stage: out / f"{name}-{stage}" for stage in ("base", "sft", "dpo")}
    train(str(config), runs["base"], **plain, train__steps=steps["base"])
    chats = {"data__path": posttrain / "chats.jsonl"}
    train("sft", runs["sft"], origin=runs["base"], **chats, **asked, train__steps=steps["sft"])
    pairs = {"data__path": texts / "pairs.jsonl"}
    rate = {"optim__lr": 1e-4}  # the config's is for models of another size
    train("dpo", runs["dpo"], origin=runs["sft"], **pairs, **asked, **rate, train__steps=steps["dpo"])
    unseen = json.loads((texts / "unseen.json").read_text())
    return [{"arm": name, "stage": stage} | measures(run, unseen) for stage, run in runs.items()]


def measures(run: pathlib.Path, unseen: list[str]) -> dict[str, float]:
    """Returns the share of a run's last samples with junk, and how unlikely it finds unseen junk."""
    last = max((run / "samples").glob("*.jsonl"), key=lambda path: int(path.stem))
    texts = [json.loads(line) for line in last.read_text("utf-8").splitlines()]
    tic = sum(any(word in row["text"] for word in TIC) for row in texts) / len(texts)
    return {
        "texts": len(texts),
        "with_junk": tic,
        "repetition": _mean(texts, "repetition"),
        "bits_per_byte": bits_per_byte(run, unseen),
    }


def _mean(rows: list[dict], key: str) -> float:
    return sum(row[key] for row in rows) / len(rows)


def bits_per_byte(run: pathlib.Path, texts: list[str]) -> float:
    """Returns the mean bits per byte of texts under a run's newest checkpoint."""
    from jaxlm.eval import scorer  # here, so that the script's own process is small while runs train

    score = scorer.bits_per_byte(str(run))
    return sum(map(score, texts)) / len(texts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("posttrain", type=pathlib.Path, help="what posttrain_data.py made")
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--steps", type=int, nargs=3, default=(460, 200, 150), metavar=("BASE", "SFT", "DPO"))
    given = parser.parse_args()
    make_texts(given.out / "texts", given.posttrain)
    steps = dict(zip(("base", "sft", "dpo"), given.steps, strict=True))
    rows = [row for name in ("clean", "junk") for row in arm(name, given.out, given.posttrain, steps)]
    (given.out / "table.json").write_text(json.dumps(rows, indent=1))
    print(f"{'arm':6} {'stage':5} {'with junk':>9} {'repetition':>10} {'junk, bits per byte':>19}")
    for row in rows:
        print(
            f"{row['arm']:6} {row['stage']:5} {row['with_junk']:9.1%} {row['repetition']:10.3f} {row['bits_per_byte']:19.3f}"
        )


if __name__ == "__main__":
    main()
