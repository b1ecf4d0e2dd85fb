"""Does cleaning pay? The same small model on the raw and on the prepared corpus, measured on clean text that neither saw.

    python scripts/make_techdocs_corpus.py --out=corpora/techdocs
    python scripts/ab_data.py --corpus=corpora/techdocs --out=runs/ab

Raw is what a careless start has: tags cut out by a regular expression, every page of every version. Prepared is what
`jaxlm prepare` makes of the same files by the stages of configs/data/techdocs.py. Held out are whole manuals (`--clean`),
prepared; of each side's own held-out text nothing is compared. The model is `local_35m` made small, the steps, batch and
seed are the same, each side has its own tokenizer of the same size; bits per byte compare across tokenizers.
"""

import argparse
import html
import json
import pathlib
import re
import subprocess
import sys

from jaxlm.config_files import load

SHAPE = ("n_layers=4", "d_model=256", "n_heads=4", "n_kv_heads=2", "d_ff=704", "vocab_size=8192")
PREPARE = """
from jaxlm.configs.data import techdocs

def get_config():
    c = techdocs.get_config()
    c.data.dir = {out!r}
    for name in list(c.prepare.sources):
        c.prepare.sources[name].path = {corpus!r} + "/" + name
        if name not in {names!r}:
            del c.prepare.sources[name]
    return c
"""


def jaxlm(*words: str) -> None:
    """Runs a verb, and stops where it fails."""
    if subprocess.run([sys.executable, "-m", "jaxlm.cli", *words]).returncode:
        sys.exit(f"jaxlm {words[0]} failed")


def prepare(out: pathlib.Path, corpus: pathlib.Path, names: list[str]) -> pathlib.Path:
    """The documents of these sources as `configs/data/techdocs.py` makes them."""
    config = out.with_suffix(".py")
    config.write_text(PREPARE.format(out=str(out), corpus=str(corpus.resolve()), names=tuple(names)))
    jaxlm("prepare", f"--config={config}")
    return out / "documents"


def strip_tags(corpus: pathlib.Path, names: list[str], out: pathlib.Path) -> None:
    """One JSON line a page, its tags cut out."""
    with out.open("w") as file:
        for path in (path for name in names for path in sorted((corpus / name).rglob("*.html"))):
            page = path.read_text("utf-8", "replace")
            page = re.sub(r"(?s)<(script|style).*?</\1>|<[^>]*>", " ", page)
            text = re.sub(r"\s*\n\s*", "\n", html.unescape(page)).strip()
            if text:
                file.write(json.dumps({"text": text}) + "\n")


def train(out: pathlib.Path, text: str, clean: str, steps: int, seed: int) -> dict[str, float]:
    """The last metrics of a run on `text` (weight 1) with `clean` to be evaluated on (weight 0)."""
    config = out.with_suffix(".py")
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text(
        "from jaxlm.configs import local_35m\n\n\ndef get_config():\n    c = local_35m.get_config()\n"
        "    del c.data.sources.prose, c.data.sources.math, c.data.sources.code\n"
        f"    c.data.sources.text = dict(path={text!r}, weight=1.0)\n"
        f"    c.data.sources.clean = dict(path={clean!r}, weight=0.0)\n    return c\n"
    )
    settings = [f"model.{word}" for word in SHAPE]
    settings += [
        f"train.steps={steps}",
        "train.batch_size=8",
        "train.seq_len=256",
        "train.eval_every_steps=0",
        f"seed={seed}",
    ]
    settings += ["optim.lr=2e-3", "optim.warmup_steps=30", "checkpoint.every_steps=0", "sample.every_steps=0"]
    settings += ["eval.max_batches=100", "log.every_steps=50", "data.val_fraction=0.2", f"workdir={out}"]
    jaxlm("train", f"--config={config}", *(f"--config.{setting}" for setting in settings))
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return next(row for row in reversed(rows) if "val/clean/bits_per_byte" in row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", type=pathlib.Path, required=True, help="what make_techdocs_corpus.py made")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--train", default="python,postgresql,django,older", help="sources to train on")
    parser.add_argument("--clean", default="handbook,debian,sqlite", help="sources to measure on")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--seeds", type=int, default=1)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    known = load("data/techdocs").prepare.sources
    names, held_out = args.train.split(","), args.clean.split(",")
    if unknown := [name for name in names + held_out if name not in known]:
        sys.exit(f"no source {unknown[0]} in configs/data/techdocs.py; there are {', '.join(known)}")
    clean = prepare(args.out / "clean", args.corpus, held_out)
    prepared = prepare(args.out / "prepared", args.corpus, names)
    raw = args.out / "raw.jsonl"
    if not raw.exists():
        strip_tags(args.corpus, names, raw)
    for seed in range(args.seeds):
        for name, text in (("raw", raw), ("prepared", prepared)):
            row = train(args.out / f"run-{name}-{seed}", str(text), str(clean), args.steps, seed)
            print(
                f"seed {seed}  {name:9} {row['val/clean/bits_per_byte']:.4f} bits per byte on clean held-out text",
                flush=True,
            )


if __name__ == "__main__":
    main()
