"""`jaxlm trace`: which documents were in the batch of a step, or which documents hold a string and when they were seen."""

import argparse
import collections
import dataclasses
import os
import pathlib
import re
import shlex

from jaxlm.config import Config, ConfigError
from jaxlm.data.batches import document_rows
from jaxlm.data.batches.document_rows import Rows
from jaxlm.data.batches.open import open_order
from jaxlm.data.shards import removal, search, shards
from jaxlm.data.shards.search import Match
from jaxlm.host import files
from jaxlm.host.console import print_table, say, working
from jaxlm.run import ledger, metrics

_SHOWN = 20  # documents a source in the terminal
_STEPS = 5  # of a document
_MOST_BYTES = 16 << 20  # of a text: a byte takes 64


def run(config: Config, args: argparse.Namespace) -> int:
    asked = (args.step, args.text, args.string, args.string_file, args.regex)
    if sum(value is not None for value in asked) != 1:
        raise ConfigError("give one of --step=N, --string=TEXT, --string-file=FILE, --regex=PATTERN, --text=FILE")
    if args.remove and asked[:2] != (None, None):
        raise ConfigError("--remove writes the documents that hold a string: give --string=TEXT")
    if config.workdir and config.program != "pretrain":
        raise ConfigError(f"{config.workdir} was trained on examples, not on shards: trace the run that it came from")
    folder, done = pathlib.Path(config.workdir) if config.workdir else None, 0
    if folder:
        valid = metrics.valid(folder / "metrics.jsonl", "", ledger.read(folder)["rollbacks"])
        done = max((record["step"] for record in valid), default=0)
    if args.step is not None:
        return _step(config, args, folder, done)
    if args.text is not None:
        return _text(config, args)
    return _string(config, args, folder, done)


def _step(config: Config, args: argparse.Namespace, folder: pathlib.Path | None, done: int) -> int:
    """Prints the documents that step N (counted from 1) trained on."""
    if not config.workdir:
        raise ConfigError("--step needs a run or a config, which has the mixture: jaxlm trace RUN --step=N")
    if args.step < 1:
        raise ConfigError(f"--step={args.step}: steps are counted from 1")
    if args.step > config.train.steps:
        raise ConfigError(f"--step={args.step}: the run ends at step {config.train.steps} (train.steps)")
    if 0 < done < args.step:
        say(f"step {args.step} is still to come, {folder} is at step {done}: this is what it will train on")
    table = []
    for row in document_rows.describe_batch(_order(config, folder), args.step - 1, 200 if args.json else 60):
        for document in row.documents:
            table.append(
                {
                    "slot": row.slot,
                    "source": row.source,
                    "epoch": row.epoch,
                    "row": row.row,
                    "document": document.doc_id,
                    "first_token": document.first_token,
                    "tokens": document.tokens,
                    "text": document.text if args.json else " ".join(document.text.split()),
                }
            )
    print_table(table, args.json)
    return 0


def _order(config: Config, folder: pathlib.Path | None) -> Rows:
    return open_order(config, ledger.read(folder)["passed_over"] if folder else ())


def _string(config: Config, args: argparse.Namespace, folder: pathlib.Path | None, done: int) -> int:
    """Prints the documents that hold a string, by source, with the steps at which the run saw them."""
    pattern, why = _pattern(args)
    path = files.expanded(args.remove) if args.remove else None
    if path:
        removal.check_new(path)
    data, order = shards.open_data(config.data.dir), None
    if folder and done:
        trained = (ledger.read(folder)["starts"] or [{}])[-1].get("manifest_sha256", data.sha256)
        order = _order(config, folder) if trained == data.sha256 else None
        if not order:
            say(f"{data.path} is not the data that {folder} was trained on: no steps")
    with working("searching", search.tokens_to_search(data), "tokens") as tell:
        matches = list(search.matches(data, pattern, tell))
    if args.json:
        print_table([dataclasses.asdict(match) | {"steps": _steps(order, match, done)} for match in matches], True)
    else:
        _show(data, order, matches, done)
    if path and matches:
        removal.write(path, matches, why)
        say(f"wrote {path}: {len(matches)} documents")
    if matches and not args.json:
        file = path or pathlib.Path("list.jsonl")
        again = "" if path else f"the same command with --remove={file}, then "
        out = data.path.with_name(f"{data.path.name}-without")
        say(f"next: {again}{shlex.join(['jaxlm', 'tokenize', str(data.path), f'--without={file}', f'--out={out}'])}")
    return 0


def _text(config: Config, args: argparse.Namespace) -> int:
    """Prints what a text copies verbatim from documents."""
    text, data = _read(args.text), shards.open_data(config.data.dir)
    if len(text) > _MOST_BYTES:
        raise ConfigError(
            f"{args.text} has {len(text):,} bytes, of which {_MOST_BYTES:,} can be traced at a time: split it"
        )
    with working("searching", search.tokens_to_search(data), "tokens") as tell:
        copies = search.copies(data, text, tell)
    print_table([dataclasses.asdict(copy) for copy in (copies if args.json else copies[:_SHOWN])], args.json)
    copied = len(set().union(*(range(copy.start, copy.start + copy.length) for copy in copies)))
    say(f"{copied:,} of {len(text):,} bytes are copied, in {len(copies)} stretches of 64 bytes or more")
    return 0


def _read(path: str) -> bytes:
    try:
        return files.expanded(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from None


def _pattern(args: argparse.Namespace) -> tuple[re.Pattern, str]:
    """Returns (what to search for, the words for it). Raises ConfigError if it is empty, unreadable or no pattern."""
    try:
        if args.regex is None:
            raw = os.fsencode(args.string) if args.string_file is None else _read(args.string_file)
            pattern, why = re.compile(re.escape(raw)), raw.decode("utf-8", "replace")[:200]
        else:
            pattern = re.compile(why := args.regex)
        if pattern.search("" if args.regex is not None else b""):
            raise ConfigError("this is found in every document, since it is, or matches, the empty string")
        return pattern, why
    except (re.error, OverflowError, RecursionError) as error:
        raise ConfigError(f"--regex={args.regex}: {error}, as Python's re writes patterns") from None


def _steps(order: Rows | None, match: Match, done: int) -> list[int]:
    if order is None or match.split != "train":
        return []
    return document_rows.steps_of(order, match.source, match.start, match.tokens, done)


def _show(data: shards.DataDir, order: Rows | None, matches: list[Match], done: int) -> None:
    by_source: dict[str, list[Match]] = collections.defaultdict(list)
    for match in matches:
        by_source[match.source].append(match)
    times = sum(match.times for match in matches)
    sizes = {source: sum(data.entry(source, split)["bytes"] for split in shards.SPLITS) for source in data.sources}
    rows = []
    for source, of_source in sorted(by_source.items(), key=lambda item: -len(item[1])):
        count = sum(match.times for match in of_source)
        rows.append(
            {
                "source": source,
                "documents": len(of_source),
                "held_out": sum(match.split == "val" for match in of_source),
                "times": count,
                "share": f"{count / times:.1%}",
                "of_text": f"{sizes[source] / sum(sizes.values()):.1%}",
            }
        )
    print_table(rows, False)
    for source, of_source in by_source.items():
        print(f"\n{source}")
        print_table([_row(match, _steps(order, match, done)) for match in of_source[:_SHOWN]], False)
        if len(of_source) > _SHOWN:
            print(f"... and {len(of_source) - _SHOWN:,} more of {source} (--json prints all)")
    if not matches:
        say(f"no document of {data.path} holds it")


def _row(match: Match, steps: list[int]) -> dict[str, str | int]:
    seen = ", ".join(map(str, steps[:_STEPS])) + (f" and {len(steps) - _STEPS} more" if len(steps) > _STEPS else "")
    where = match.split if match.split == "val" else seen or "-"
    return {"document": match.doc_id, "times": match.times, "steps": where, "text": match.excerpt}
