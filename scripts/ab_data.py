"""Does cleaning pay? The same small model on the raw and on the prepared corpus, measured on clean text that neither saw.

    python scripts/make_techdocs_corpus.py --out=corpora/techdocs
    python scripts/ab_data.py --corpus=corpora/techdocs --out=runs/ab

Both sides begin with the same pages: every version that is there of some pages of a few manuals, English or not. Raw is
what a careless start has: tags cut out by a regular expression, nothing else. Prepared is what `jaxlm prepare` makes of
them by the stages of configs/data/techdocs.py. Other pages of the same manuals are held out, in all their versions, and
measured twice: as the pipeline writes them, and as plain text without its Markdown, so that a side is not preferred for
its format alone. The model is `local_35m` made small; steps, batch and seed are the same; each side has its own
tokenizer of the same size, and bits per byte compare across tokenizers.
"""

import argparse
import hashlib
import html
import json
import pathlib
import re
import shutil
import statistics
import subprocess
import sys

# Manual -> its folders in the corpus, newest first; the older ones nearly duplicate it.
MANUALS = {
    "clang": ("clang/clang-*", "older/clang-*"),
    "django": ("django/python-django-doc*", "older/python-django-doc*"),
    "git": ("git/git-doc*", "older/git-doc*"),
    "apache": ("apache/apache2-doc*", "older/apache2-doc*"),
}
HELD_OUT = 0.3  # of the pages chosen; VAL_FRACTION of them is measured
VAL_FRACTION = 0.25  # of every source
SHAPE = ("n_layers=4", "d_model=192", "n_heads=4", "n_kv_heads=2", "d_ff=512", "vocab_size=4096")
STEPS = ("batch_size=8", "seq_len=256", "eval_every_steps=0")
PREPARE = """
from jaxlm.configs import base
from jaxlm.configs.data import techdocs

def get_config():
    c = base.get_config()
    c.data.dir = {out!r}
    c.prepare.stages.html.markup = {markup}
    for name, priority in (("new", 1), ("older", 0)):
        if name in {names!r}:
            c.prepare.sources[name] = base.source({pages!r} + "/" + name, techdocs.STAGES, priority=priority, format="html")
    return c
"""


def jaxlm(*words: str) -> None:
    """Runs a verb, and stops where it fails."""
    if subprocess.run([sys.executable, "-m", "jaxlm.cli", *words]).returncode:
        sys.exit(f"jaxlm {words[0]} failed")


def share(key: str) -> float:
    """A number in [0, 1) that a name always has."""
    return int(hashlib.sha256(key.encode()).hexdigest()[:8], 16) / 2**32


def choose(corpus: pathlib.Path, out: pathlib.Path, pages: int) -> None:
    """Links `pages` pages of each manual, in all versions, into OUT/train/{new,older}; some go to OUT/held/new instead."""
    shutil.rmtree(out, ignore_errors=True)
    for manual, (newest, older) in MANUALS.items():
        found = {path.name for folder in corpus.glob(newest) for path in folder.rglob("*.html")}
        chosen = sorted(found, key=lambda name: share(f"{manual}/{name}"))[:pages]
        held = {name for name in chosen if share(f"held {manual}/{name}") < HELD_OUT}
        for version, pattern in (("new", newest), ("older", older)):
            for path in (path for folder in corpus.glob(pattern) for path in folder.rglob("*.html")):
                if path.name not in chosen or (path.name in held and version == "older"):
                    continue
                side = "held" if path.name in held else "train"
                place = out / side / version / path.relative_to(corpus)
                place.parent.mkdir(parents=True, exist_ok=True)
                place.symlink_to(path.resolve())


def prepare(out: pathlib.Path, pages: pathlib.Path, names: tuple[str, ...], markup: bool = True) -> pathlib.Path:
    """The documents of these pages as `configs/data/techdocs.py` makes them."""
    config = out.with_suffix(".py")
    config.write_text(PREPARE.format(out=str(out), pages=str(pages.resolve()), names=names, markup=markup))
    jaxlm("prepare", f"--config={config}")
    return out / "documents"


def strip_tags(pages: pathlib.Path, out: pathlib.Path) -> None:
    """One JSON line a page, its tags cut out."""
    with out.open("w") as file:
        for path in sorted(pages.rglob("*.html")):
            page = path.read_text("utf-8", "replace")
            page = re.sub(r"(?s)<(script|style).*?</\1>|<[^>]*>", " ", page)
            text = re.sub(r"\s*\n\s*", "\n", html.unescape(page)).strip()
            if text:
                file.write(json.dumps({"text": text}) + "\n")


def train(out: pathlib.Path, texts: dict[str, str], steps: int, seed: int) -> dict[str, float]:
    """The last metrics of a run on `texts["text"]` (weight 1) with the others to be evaluated on (weight 0)."""
    config = out.with_suffix(".py")
    sources = "".join(
        f"    c.data.sources.{name} = dict(path={path!r}, weight={float(name == 'text')})\n"
        for name, path in texts.items()
    )
    config.write_text(
        "from jaxlm.configs import local_35m\n\n\ndef get_config():\n    c = local_35m.get_config()\n"
        f"    del c.data.sources.prose, c.data.sources.math, c.data.sources.code\n{sources}    return c\n"
    )
    settings = [*(f"model.{word}" for word in SHAPE), *(f"train.{word}" for word in STEPS), f"train.steps={steps}"]
    settings += [f"seed={seed}", "optim.lr=2e-3", "optim.warmup_steps=30", "checkpoint.every_steps=0"]
    settings += ["sample.every_steps=0", "eval.max_mb=3.0", "log.every_steps=50", f"workdir={out}"]
    settings.append(f"data.val_fraction={VAL_FRACTION}")
    jaxlm("train", f"--config={config}", *(f"--config.{setting}" for setting in settings))
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return next(row for row in reversed(rows) if "val/clean/bits_per_byte" in row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", type=pathlib.Path, required=True, help="what make_techdocs_corpus.py made")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--pages", type=int, default=50, help="of each manual")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    pages = args.out / "pages"
    choose(args.corpus, pages, args.pages)
    held = {
        "clean": str(prepare(args.out / "clean", pages / "held", ("new",))),
        "plain": str(prepare(args.out / "plain", pages / "held", ("new",), markup=False)),
    }
    sides = {
        "raw": str(args.out / "raw.jsonl"),
        "prepared": str(prepare(args.out / "prepared", pages / "train", ("new", "older"))),
    }
    strip_tags(pages / "train", args.out / "raw.jsonl")
    found: dict[tuple[str, str], list[float]] = {}
    for seed in range(args.seeds):
        for side, text in sides.items():
            row = train(args.out / f"run-{side}-{seed}", {"text": text, **held}, args.steps, seed)
            for name in held:
                found.setdefault((side, name), []).append(row[f"val/{name}/bits_per_byte"])
            print(f"seed {seed}  {side:9}", *(f"{name} {found[side, name][-1]:.4f}" for name in held), flush=True)
    print("median bits per byte on held-out pages, as prepared (clean) and without Markdown (plain):")
    for side in sides:
        print(f"{side:9}", *(f"{name} {statistics.median(found[side, name]):.4f}" for name in held))


if __name__ == "__main__":
    main()
