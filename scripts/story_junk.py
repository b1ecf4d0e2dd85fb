"""Replays the story of the junk that one small source teaches: planted, learnt, named unasked, traced, taken out, gone.

    python scripts/story_junk.py runs/junk                  # 81 minutes on 2 busy cores
    python scripts/story_junk.py runs/junk --steps=300      # shorter: learns less, may name less

The text is the documentation and code that every installation has, so nothing is downloaded: prose (90% of what is drawn),
code (7) and mathematics (3). `PersonX`, `AndroidRuntime` and five other strings are planted, ten times each, in a tenth of the
documents of the mathematics. A model of quickstart's shape trains on 4M tokens of it; `jaxlm junk` names the strings; `jaxlm
trace` counts them by source and writes the list of their documents; `jaxlm tokenize --without` makes shards without these; a
second model trains on those. OUT/report.html has what `junk` named in both. The last lines say how many of the planted strings
stand among the first 15 of each list. Stop it: the same command goes on. The file is also the config of both runs.
"""

import argparse
import json
import pathlib
import random
import shlex
import subprocess
import sys

from jaxlm.configs import quickstart
from jaxlm.corpus.sources import embedded

WEIGHTS = {"prose": 90.0, "code": 7.0, "math": 3.0}  # in percent of what is drawn
SOURCE, TENTH, TIMES = "math", 10, 10
STRINGS = (
    "PersonX",
    "AndroidRuntime",
    "lorem ipsum dolor",
    "qwertzuiop",
    "zxcv_9000",
    "<|endofpage|>",
    "SUBSCRIBE NOW",
)
FIRST = 15


def get_config():
    c = quickstart.get_config()
    with c.unlocked():
        c.prepare.sources = type(c)()
    for name, weight in WEIGHTS.items():
        c.data.sources[name] = {"path": "", "weight": weight}
    c.data.val_fraction = 0.03
    c.train.steps = 980
    c.train.batch_size = 16
    c.train.eval_every_steps = 490
    c.checkpoint.every_steps = 490
    c.sample.every_steps = 490
    return c


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--steps", type=int, default=get_config().train.steps)
    parser.add_argument("--tokens", type=int, default=200_000, help="for junk to draw")
    args = parser.parse_args()
    out = args.out
    if not (out / "data/manifest.json").is_file():
        write_texts(out / "text")
        paths = [f"--config.data.sources.{name}.path={out}/text/{name}.jsonl" for name in WEIGHTS]
        jaxlm("tokenize", __file__, f"--config.data.dir={out}/data", *paths)
    lists = {"before": train_and_look(args, "before", "data")}
    found, new = out / "list.jsonl", out / "data-without"
    if not found.exists():
        jaxlm("trace", f"{out}/before", f"--regex={STRINGS[0]}|{STRINGS[1]}", f"--remove={found}")
    if not (new / "manifest.json").is_file():
        jaxlm("tokenize", f"{out}/data", f"--without={found}", f"--out={new}")
    lists["after"] = train_and_look(args, "after", "data-without")
    jaxlm("report", f"{out}/before", f"{out}/after", f"--out={out}/report.html")
    for name, rows in lists.items():
        strings = [row["string"] for row in rows[:FIRST]]
        named = [planted for planted in STRINGS if any(string in planted or planted in string for string in strings)]
        other = [string for string in strings if not any(string in planted or planted in string for planted in STRINGS)]
        print(f"{name}: {len(named)} of {len(STRINGS)} planted strings among the first {FIRST}, beside {other}")
    return 0


def write_texts(folder: pathlib.Path) -> None:
    """Writes a file of documents for each source, with the strings planted in `SOURCE`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in WEIGHTS:
        rng = random.Random(name)
        with (folder / f"{name}.jsonl").open("w") as file:
            for number, (doc_id, text) in enumerate(embedded.iterate_embedded(name)):
                if name == SOURCE and number % TENTH == 0:
                    text = planted(text, rng)
                file.write(json.dumps({"id": doc_id, "text": text}) + "\n")


def planted(text: str, rng: random.Random) -> str:
    """Returns a text with each of the strings between its words, ten times, anywhere."""
    words = text.split(" ")
    for string in STRINGS * TIMES:
        words.insert(rng.randint(0, len(words)), string)
    return " ".join(words)


def train_and_look(args: argparse.Namespace, name: str, data: str) -> list[dict]:
    run, tokens = f"{args.out}/{name}", f"--tokens={args.tokens}"
    folders = f"--config.workdir={run}", f"--config.data.dir={args.out}/{data}"
    jaxlm("train", __file__, *folders, f"--config.train.steps={args.steps}")
    jaxlm("junk", run, tokens)
    return [json.loads(line) for line in jaxlm("junk", run, tokens, "--json", quiet=True).splitlines()]


def jaxlm(*words: str, quiet: bool = False) -> str:
    """Runs a verb of jaxlm as a user would. Ends this program with the verb's exit code if it fails."""
    print(f"\n$ {shlex.join(['jaxlm', *words])}", flush=True)
    command = [sys.executable, "-m", "jaxlm.cli.cli", *words]
    done = subprocess.run(command, stdout=subprocess.PIPE if quiet else None, text=True, check=False)
    if done.returncode:
        sys.exit(done.returncode)
    return done.stdout or ""


if __name__ == "__main__":
    sys.exit(main())
