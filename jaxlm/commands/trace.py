"""`jaxlm trace`: which documents were in the batch of a step, or which documents hold a string and when they were seen."""

import argparse
import collections
import contextlib
import dataclasses
import os
import pathlib
import re
import shlex

from jaxlm.config import Config, ConfigError
from jaxlm.data.batches import document_rows
from jaxlm.data.batches.open import open_order
from jaxlm.data.shards import removal, search, string_index
from jaxlm.data.shards.search import Match
from jaxlm.data.shards.shards import SPLITS
from jaxlm.host import files
from jaxlm.host.console import Tell, print_table, say, several, share, working
from jaxlm.run import ledger, trained_on
from jaxlm.run.trained_on import Trained

_SHOWN = 20  # documents a source in the terminal
_STEPS = 5  # of a document
_MOST_BYTES = 16 << 20  # of a text: a byte takes 64


def run(config: Config, args: argparse.Namespace) -> int:
    asked = (args.step, args.text, args.string, args.string_file, args.regex)
    if sum(value is not None for value in asked) != 1:
        raise ConfigError("give one of --step=N, --string=TEXT, --string-file=FILE, --regex=PATTERN, --text=FILE")
    if args.remove is not None and asked[:2] != (None, None):
        raise ConfigError("--remove writes the documents that hold a string: give --string=TEXT")
    if config.program != "pretrain" and (args.step is not None or args.remove is not None):
        raise ConfigError(
            f"{config.workdir} has examples, --step and --remove are about shards: trace the run it came from"
        )
    if args.step is not None:
        return _step(config, args)
    return _string(config, args) if args.text is None else _text(config, args)


def _step(config: Config, args: argparse.Namespace) -> int:
    """Prints the documents that step N (counted from 1) trained on."""
    if not config.workdir:
        raise ConfigError("--step needs a run or a config, which has the mixture: jaxlm trace RUN --step=N")
    if args.step < 1:
        raise ConfigError(f"--step={args.step}: steps are counted from 1")
    if args.step > config.train.steps:
        raise ConfigError(f"--step={args.step}: the run ends at step {config.train.steps} (train.steps)")
    folder = pathlib.Path(config.workdir)
    if 0 < (done := trained_on.steps_done(folder)) < args.step:
        say(f"step {args.step} is still to come, {folder} is at step {done}: this is what it will train on")
    order = open_order(config, ledger.read(folder)["passed_over"])
    table = [part._asdict() for part in document_rows.describe_batch(order, args.step - 1, 200 if args.json else 60)]
    for row in table if not args.json else ():
        row["text"] = " ".join(row["text"].split())
    print_table(table, args.json)
    return 0


def _string(config: Config, args: argparse.Namespace) -> int:
    """Prints the documents that hold a string, by source, and the steps at which the run saw them."""
    pattern, raw = _pattern(args)
    path = files.expanded(args.remove) if args.remove is not None else None
    if path:
        removal.check_new(path)
    if len(raw) < string_index.SHORTEST:
        say("no index serves --regex, or a string of under 3 bytes: all tokens are searched")
    without = {}  # place -> a line; a run and its origin may have read the same data
    for trained in trained_on.of(config):
        texts = trained.texts(raw)
        with _searching(trained) as tell:
            matches = list(search.matches(texts, trained.decode, pattern, tell))
        if args.json:
            facts = ({"steps": trained.steps(match), "run": trained.run} for match in matches)
            print_table([dataclasses.asdict(match) | more for match, more in zip(matches, facts, strict=True)], True)
        elif matches:
            _show(trained, matches)
        else:
            place = trained.data.path if trained.data else pathlib.Path(trained.run)
            without.setdefault(place.resolve(), f"no {'document' if trained.data else 'example'} of {place} holds it")
    for line in without.values():
        say(line)
    if path and matches:
        removal.write(path, matches, args.regex or raw.decode("utf-8", "replace")[:200])
        say(f"wrote {path}: {several(len(matches), 'document')}")
    elif path:
        say(f"{path} is not written: it would be empty")
    if matches and not args.json and config.program == "pretrain":
        data, file = trained.data, path or pathlib.Path("list.jsonl")
        again = "" if path else f"the same command with --remove={file}, then "
        out = data.path.with_name(f"{data.path.name}-without")
        say(f"next: {again}{shlex.join(['jaxlm', 'tokenize', str(data.path), f'--without={file}', f'--out={out}'])}")
    return 0


def _searching(trained: Trained) -> contextlib.AbstractContextManager[Tell]:
    return working("searching", search.tokens_to_search(trained.data) if trained.data else 0, "tokens")


def _text(config: Config, args: argparse.Namespace) -> int:
    """Prints what a text copies verbatim from documents."""
    text, copies = _read(args.text), []
    if len(text) > _MOST_BYTES:
        raise ConfigError(f"{args.text} has {len(text):,} bytes: split it, {_MOST_BYTES:,} can be traced at a time")
    for trained in trained_on.of(config):
        with _searching(trained) as tell:
            copies += search.copies(trained.texts(b""), trained.decode, text, tell)
    print_table([dataclasses.asdict(copy) for copy in (copies if args.json else copies[:_SHOWN])], args.json)
    copied = len(set().union(*(range(copy.start, copy.end) for copy in copies)))
    words = several(len(copies), "stretch", "es")
    say(f"{copied:,} of {several(len(text), 'byte')} are copied, in {words} of 64 bytes or more")
    return 0


def _read(path: str) -> bytes:
    try:
        return files.expanded(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from None


def _pattern(args: argparse.Namespace) -> tuple[re.Pattern, bytes]:
    """Returns (what to search for, the bytes of a string). Raises ConfigError if it is empty, unreadable or no pattern."""
    try:
        if args.regex is None:
            raw = os.fsencode(args.string) if args.string_file is None else _read(args.string_file)
            pattern = re.compile(re.escape(raw))
        else:
            pattern, raw = re.compile(args.regex), b""
        if pattern.search("" if args.regex is not None else b""):
            raise ConfigError("this is found in every document, since it is, or matches, the empty string")
        return pattern, raw
    except (re.error, OverflowError, RecursionError) as error:
        raise ConfigError(f"--regex={args.regex}: {error}, as Python's re writes patterns") from None


def _show(trained: Trained, matches: list[Match]) -> None:
    """Prints a row for each source, and below it rows of its first documents."""
    data, times = trained.data, sum(match.times for match in matches)
    entries = data.manifest["sources"] if data else {}
    sizes = {source: sum(entry[split]["bytes"] for split in SPLITS) for source, entry in entries.items()}
    by_source = {source: [] for source, _ in collections.Counter(match.source for match in matches).most_common()}
    for match in matches:
        by_source[match.source].append(match)
    rows = []
    for source, own in by_source.items():
        row = {"source": source, "documents": len(own), "held_out": sum(match.split == "val" for match in own)}
        row["times"] = sum(match.times for match in own)
        row["share"] = share(row["times"], times)
        rows.append(row | {"of_text": share(sizes[source], sum(sizes.values())) if data else "100%"})
    print_table(rows, False)
    for source, own in by_source.items():
        print(f"\n{source}")
        print_table([_row(match, trained.steps(match)) for match in own[:_SHOWN]], False)
        if len(own) > _SHOWN:
            print(f"... and {len(own) - _SHOWN:,} more of {source} (--json prints all)")


def _row(match: Match, steps: list[int]) -> dict[str, str | int]:
    seen = ", ".join(map(str, steps[:_STEPS])) + (f" and {len(steps) - _STEPS} more" if len(steps) > _STEPS else "")
    where = match.split if match.split == "val" else seen or "-"
    return {"document": match.doc_id, "times": match.times, "steps": where, "text": match.excerpt}
