"""Makes the data that scripts/story.sh was not given, from Python and its installed packages: downloads nothing.

    python scripts/story_data.py docs DIR --megabytes=6      # raw documents: HTML pages of a manual, READMEs, source files
    python scripts/story_data.py chats DIR                   # questions on functions: chats, pairs, both also held out
    python scripts/story_data.py sums FILE --task=TASK       # worked examples of a task of reasoning-gym, as chats
    python scripts/story_data.py price                       # dollars an hour of this machine's GPUs, by configs/prices.toml
    python scripts/story_data.py flags CONFIG                # are BASE_FLAGS, SFT_FLAGS, DPO_FLAGS, GRPO_FLAGS known keys?

A chat asks what a function does; the answer is the first sentence of the function's documentation. A pair prefers this
sentence to another function's. One function in twenty is held out, with all questions about it.
"""

import argparse
import builtins
import hashlib
import html
import importlib
import importlib.metadata
import inspect
import itertools
import json
import os
import pathlib
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence

from jaxlm.config import ConfigError, config_files, resolve
from jaxlm.corpus.sources import embedded
from jaxlm.plan import accelerators

# Modules in C, whose documentation is in no source file that `embedded` reads.
IN_C = ("builtins", "math", "itertools", "time", "zlib", "select", "binascii", "array", "cmath", "errno")
SHARES = {"html": 0.7, "readme": 0.1, "code": 0.2}  # of the raw documents
OLDER = 8  # one in 8 pages has an older version
HELD_OUT = 20  # one in 20 functions
QUESTIONS = ("What does {} do?", "What is {} for?", "Explain {}.")
ASKED = "str.split"  # story.sh asks about it at the end, so it is never held out, and asked in all wordings
FIRST_SUM = 3_000_000_000  # the number of the first example; training begins at small numbers
MENU = ("Index", "Modules", "Search", "Previous topic", "Next topic", "Report a bug", "Show source")


def main(argv: Sequence[str] | None = None) -> int:
    given = parser().parse_args(argv)
    try:
        given.run(given)
    except ConfigError as error:
        print(f"story_data.py: {error}", file=sys.stderr)
        return 2
    return 0


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line; its result has `run`, the function of the verb."""
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    verbs = made.add_subparsers(required=True, metavar="WHAT")
    docs = verbs.add_parser("docs", help="raw documents")
    docs.add_argument("out", type=pathlib.Path)
    docs.add_argument("--megabytes", type=float, default=6.0)
    docs.set_defaults(run=lambda given: write_docs(given.out, int(given.megabytes * 1e6)))
    chats = verbs.add_parser("chats", help="chats and pairs")
    chats.add_argument("out", type=pathlib.Path)
    chats.add_argument("--megabytes", type=float, default=20.0, help="of documentation that is read for them")
    chats.set_defaults(run=lambda given: write_chats(given.out, int(given.megabytes * 1e6)))
    sums = verbs.add_parser("sums", help="worked examples")
    sums.add_argument("out", type=pathlib.Path)
    sums.add_argument("--task", required=True)
    sums.add_argument("--count", type=int, default=400)
    sums.set_defaults(run=lambda given: write_sums(given.out, given.task, given.count))
    price = verbs.add_parser("price", help="dollars an hour")
    price.set_defaults(run=lambda given: print(f"{usd_per_hour():g}"))
    flags = verbs.add_parser("flags", help="are the flags of the stages known keys?")
    flags.add_argument("config", help="of the base")
    flags.set_defaults(run=lambda given: check_flags(given.config, os.environ))
    return made


def check_flags(base: str, environment: Mapping[str, str]) -> None:
    """Raises ConfigError if a stage's variable has a word that is not --config.KEY=VALUE or not valid for its config."""
    given = {
        "BASE": (base, ["data.dir=x"]),
        "SFT": ("sft", ["origin=x", "data.path=x"]),
        "DPO": ("dpo", ["origin=x", "data.path=x"]),
        "GRPO": ("grpo", ["origin=x", "reward.tasks=x"]),
    }
    for variable, (config, needed) in given.items():
        words = environment.get(f"{variable}_FLAGS", "").split()
        try:
            if strange := [word for word in words if not re.match(r"--config\.[\w.]+=", word)]:
                raise ConfigError(f"{strange[0]} is not --config.KEY=VALUE")
            keys = [word.removeprefix("--config.") for word in words]
            resolve(config_files.load(config, ["workdir=x", *needed, *keys]))
        except ConfigError as error:
            raise ConfigError(f"{variable}_FLAGS: {error}") from None


def write_docs(out: pathlib.Path, size: int) -> None:
    """Writes raw documents: pages of a manual with menus and notices around them, READMEs, sources."""
    for folder in SHARES:
        (out / folder).mkdir(parents=True, exist_ok=True)
    written = dict.fromkeys(SHARES, 0)
    pages: dict[str, list[tuple[str, str]]] = {}
    for dotted, doc in documented(int(SHARES["html"] * size)):
        pages.setdefault(module_of(dotted), []).append((dotted, doc))
    for name, entries in pages.items():
        (out / "html" / f"{_file(name)}.html").write_text(page(name, entries), "utf-8", "replace")
        written["html"] += 1
        if number_of(name) % OLDER == 0:  # like real sites, keeps older versions of some pages
            (out / "html" / f"{_file(name)}.old.html").write_text(
                page(name, entries[:-1] or entries), "utf-8", "replace"
            )
            written["html"] += 1
    for name, text in within(readmes(), int(SHARES["readme"] * size)):
        (out / "readme" / _file(name)).write_text(text, "utf-8", "replace")
        written["readme"] += 1
    for name, text in embedded.iterate_embedded("code", int(SHARES["code"] * size)):
        (out / "code" / _file(name)).write_text(text, "utf-8", "replace")
        written["code"] += 1
    print(", ".join(f"{count:,} {kind} files" for kind, count in written.items()), f"in {out}")


def documented(size: int) -> Iterator[tuple[str, str]]:
    """Yields (dotted name, documentation) of modules, classes and functions, about `size` bytes."""
    found = itertools.chain(in_c(), embedded.iterate_embedded("prose", size))
    yield from within(((name, text.removeprefix(name).strip("\n")) for name, text in found), size)


def in_c() -> Iterator[tuple[str, str]]:
    """Yields (dotted name, documentation) of functions written in C: `str.split`, `math.sqrt`, `itertools.chain`."""
    for module_name in IN_C:
        module = importlib.import_module(module_name)
        prefix = "" if module_name == "builtins" else f"{module_name}."
        for name, value in vars(module).items():
            if name.startswith("_") or not callable(value):
                continue
            if inspect.isclass(value) and issubclass(value, BaseException):
                continue
            owned = vars(value).items() if inspect.isclass(value) else ()
            members = [(f"{name}.{own}", member) for own, member in owned if not own.startswith("_")]
            for dotted, one in [(name, value), *members]:
                if doc := inspect.getdoc(one):
                    yield prefix + dotted, doc


def module_of(dotted: str) -> str:
    """Returns the name of the page that documents `dotted`: its module's, as far as the name shows the module."""
    *owners, last = dotted.split(".")
    owners = list(itertools.takewhile(str.islower, owners))[:2]
    return ".".join(owners) or (last if last.islower() and not hasattr(builtins, last) else "builtins")


def readmes() -> Iterator[tuple[str, str]]:
    """Yields (file name, README) of the installed packages."""
    kinds = {"text/markdown": "md", "text/x-rst": "rst"}
    for package in sorted(importlib.metadata.distributions(), key=lambda found: found.name.lower()):
        about = package.metadata.json
        kind = str(about.get("description_content_type", "")).partition(";")[0].strip()
        if text := about.get("description"):
            yield f"{package.name}.{kinds.get(kind, 'txt')}", text


def within(texts: Iterator[tuple[str, str]], size: int) -> Iterator[tuple[str, str]]:
    """Yields texts until they have about `size` bytes."""
    left = size
    for name, text in texts:
        left -= len(text.encode("utf-8", "replace"))
        if left < 0:
            return
        yield name, text


def page(name: str, entries: list[tuple[str, str]]) -> str:
    """Returns the HTML of a manual's page, as on a web site."""
    menu = "".join(f'<li><a href="#">{word}</a></li>' for word in MENU)
    parts = []
    for dotted, doc in entries:
        parts.append(f"<h2><code>{html.escape(dotted)}</code></h2>")
        for part in re.split(r"\n\s*\n", doc):
            verbatim = part.startswith((" ", "\t", ">>>")) or "\n " in part
            kind = "pre" if verbatim else "p"
            parts.append(f"<{kind}>{html.escape(part if verbatim else ' '.join(part.split()))}</{kind}>")
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(name)} - manual</title>'
        f'<style>body {{ margin: 1em }}</style></head>\n<body><nav class="menu"><ul>{menu}</ul></nav>\n'
        f"<main><article><h1>{html.escape(name)}</h1>\n{chr(10).join(parts)}\n</article></main>\n"
        "<footer><p>This site uses cookies. Accept all cookies.</p><p>Share on social media | Privacy policy</p></footer>"
        "</body></html>\n"
    )


def write_chats(out: pathlib.Path, size: int) -> None:
    """Writes chats.jsonl and pairs.jsonl, and both also to held_out/ for other functions."""
    told = {name: said for name, doc in questioned(size) if (said := first_sentence(doc))}
    if ASKED not in told:
        raise ConfigError(f"this Python has no documentation of {ASKED}: it runs without docstrings (-OO)")
    parts: dict[bool, list[str]] = {True: [], False: []}
    for name in told:
        parts[name != ASKED and number_of(name) % HELD_OUT == 0].append(name)
    for held_out, names in parts.items():
        folder = out / "held_out" if held_out else out
        chats, pairs = [], []
        for name in names:
            wordings = QUESTIONS if name == ASKED else (QUESTIONS[number_of(name) // HELD_OUT % len(QUESTIONS)],)
            other = random.Random(name).choice([n for n in names if told[n] != told[name]])
            for wording in wordings:
                prompt = wording.format(name)
                chats.append({"prompt": prompt, "response": told[name]})
                pairs.append({"prompt": prompt, "chosen": told[name], "rejected": told[other]})
        write(folder / "chats.jsonl", chats)
        write(folder / "pairs.jsonl", pairs)


def questioned(size: int) -> Iterator[tuple[str, str]]:
    """Yields (name as it appears in the question, documentation)."""
    every = itertools.chain(in_c(), embedded.iterate_embedded("prose", size), embedded.iterate_embedded("math", size))
    for name, text in every:
        words = name.split(".")
        if not any(word.startswith("_") for word in words) and "python-topic" not in name:
            yield name if len(words) < 3 else ".".join(words[-2:]), text.removeprefix(name).strip("\n")


def first_sentence(doc: str) -> str:
    """Returns the first sentence of some documentation; "" if no sentence can be an answer."""
    for part in re.split(r"\n\s*\n", doc.strip())[:2]:  # many begin with the signature
        line = " ".join(part.split()).replace("`", "")
        said = re.match(r"[A-Z][a-z]+ .{12,150}?(?<!e\.g)(?<!i\.e)\.(?= |$)", line)
        if said and not re.search(r"::|>>>|[<>{}|\\]|\.\.\.", said[0]) and said[0].isascii():
            return said[0]
    return ""


def number_of(name: str) -> int:
    """Returns a number that depends only on the name."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest())


def write_sums(out: pathlib.Path, task: str, count: int) -> None:
    """Writes questions of a task with their answers, as chats."""
    from jaxlm.train.rl import judges, prompts  # only this needs reasoning-gym, of the extra `rl`

    (spec,) = prompts.parse_tasks(task)
    try:
        gym = judges.Gym(spec.name, spec.options)
    except judges.Refused as error:
        raise ConfigError(str(error)) from None
    entries = [gym.entry(FIRST_SUM + number) for number in range(count)]
    asked = [
        entry for entry in entries if not prompts.for_evaluation(entry["question"])
    ]  # the other questions measure GRPO
    write(out, [{"prompt": entry["question"], "response": str(entry["answer"])} for entry in asked])


def usd_per_hour() -> float:
    """Returns the dollars per hour of all NVIDIA GPUs of this machine; 0 if it has none, or one without a price."""
    if not (program := shutil.which("nvidia-smi")):
        return 0.0
    ask = [program, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    done = subprocess.run(ask, capture_output=True, text=True, check=False)
    lines = [line.rsplit(",", 1) for line in done.stdout.splitlines() if "," in line]
    return sum(price_of(name, float(megabytes) * 2**20) for name, megabytes in lines)


def price_of(name: str, memory: float) -> float:
    """Returns the dollars per hour of a GPU, by its name and bytes of memory; 0 if it has no price."""
    rows = [row for row in accelerators.load().accelerators if re.search(rf"\b{row.kind}\b", name, re.IGNORECASE)]
    longest = max((len(row.kind) for row in rows), default=0)
    rows = [row for row in rows if len(row.kind) == longest]
    return min(rows, key=lambda row: abs(row.memory - memory)).usd if rows else 0.0


def write(path: pathlib.Path, rows: list[dict]) -> None:
    """Writes a jsonl file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    print(f"{len(rows):6,} {path}")


def _file(name: str) -> str:
    return re.sub(r"[^\w.-]+", "_", name)[-80:]


if __name__ == "__main__":
    sys.exit(main())
