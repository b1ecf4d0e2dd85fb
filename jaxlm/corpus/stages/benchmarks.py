"""Reads benchmark files as items. An item has a question, and the rest of its text.

Knows the layouts of HellaSwag, ARC, MMLU, GSM8K, HumanEval, PIQA and most others, as their authors, the hub and
lm-evaluation-harness publish them.
"""

import collections.abc
import dataclasses
import glob
import itertools
import json
import pathlib
import re
import typing

import fsspec
import pyarrow.parquet

from jaxlm.config import ConfigError

__all__ = ["Item", "files", "read_items"]


@dataclasses.dataclass(frozen=True)
class Item:
    """One task of a benchmark. A document that holds the question, or a long answer, has leaked it."""

    benchmark: str
    id: str
    question: str
    answers: tuple[str, ...]


_SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".jsonl.zst", ".parquet")
_QUESTIONS = (
    "question",
    "query",
    "prompt",
    "goal",
    "ctx",
    "problem",
    "sentence",
    "text",
)  # HellaSwag has ctx, PIQA goal
_IDS = ("task_id", "id", "ind", "idx", "question_id", "source_id")
# What says little of an item, or (passages, mostly of Wikipedia) is found in clean text too.
_SKIPPED = {
    *_IDS,
    *("ctx_a", "ctx_b", "activity_label", "label", "labels", "answerKey", "gold", "split", "split_type", "subject"),
    *("category", "source", "url", "type", "level", "entry_point", "passage", "context", "article", "support", "title"),
}
_LABEL = re.compile(r"^\s*(?:question|problem|goal|q)\s*:|\banswer\s*:\s*$", re.IGNORECASE)
_SPLIT = re.compile(r"(?:train|test|val|valid|validation|dev)(?:-\d+-of-\d+)?")


def files(paths: tuple[str, ...]) -> list[str]:
    """Returns the files of paths, folders, globs and URLs, each once. Raises ConfigError for a path without files."""
    found: list[str] = []
    for path in paths:
        inside = (
            glob.glob(f"{path}/**", recursive=True) if pathlib.Path(path).is_dir() else glob.glob(path, recursive=True)
        )
        inner = [path] if "://" in path else sorted(f for f in inside if f.endswith(_SUFFIXES))
        if not inner:
            raise ConfigError(
                f"prepare.stages.decontaminate.paths: {path!r} has no file that ends in {', '.join(_SUFFIXES)}"
            )
        found += [file for file in inner if file not in found]
    return found


def read_items(path: str) -> collections.abc.Iterator[Item]:
    """Yields the items of a jsonl, json or parquet file.

    Raises:
      ConfigError: a line is no JSON object, or the file holds no text.
    """
    name = re.sub(r"\.(?:jsonl?|parquet)(?:\.gz|\.zst)?$", "", pathlib.PurePath(path).name)
    if _SPLIT.fullmatch(name):
        name = pathlib.PurePath(path).parent.name or name
    count = 0
    for number, record in enumerate(_records(path)):
        question, answers = _texts(record)
        if question or answers:
            count += 1
            of_record = next((str(record[key]) for key in _IDS if isinstance(record.get(key), (str, int))), str(number))
            yield Item(name, of_record, question, tuple(answers))
    if not count:
        raise ConfigError(f"prepare.stages.decontaminate.paths: {path}: no record with text")


def _records(path: str) -> collections.abc.Iterator[dict]:
    try:
        if path.endswith(".parquet"):
            with fsspec.open(path) as f:
                yield from pyarrow.parquet.read_table(f).to_pylist()
            return
        with fsspec.open(path, "rt", encoding="utf-8", compression="infer") as f:
            text = f.read()
        if path.removesuffix(".gz").endswith(".json") and text.lstrip().startswith("["):
            text = "\n".join(json.dumps(record) for record in json.loads(text))
    except (OSError, EOFError, UnicodeDecodeError, ValueError, pyarrow.ArrowException) as e:
        raise ConfigError(f"prepare.stages.decontaminate.paths: {path} can't be read: {e}") from e
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():  # not splitlines(): U+2028 may stand in a string
            try:
                record = json.loads(line)
            except ValueError:
                record = None
            if not isinstance(record, dict):
                raise ConfigError(f"prepare.stages.decontaminate.paths: {path}:{number} is no JSON object")
            yield record


def _texts(record: dict) -> tuple[str, list[str]]:
    """Returns the question and all other texts of an item: answers, choices, solutions, tests."""
    key = next((key for key in _QUESTIONS if record.get(key)), "")
    question, *inner = _strings(record.get(key)) or [""]  # ARC's own layout has {"stem", "choices"} in there
    others = (_strings(value) for k, value in record.items() if k != key and k not in _SKIPPED)
    return _LABEL.sub(" ", question), [*inner, *itertools.chain.from_iterable(others)]


def _strings(value: typing.Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        value = [v for k, v in value.items() if k not in _SKIPPED]
    return [s for v in value for s in _strings(v)] if isinstance(value, list) else []
