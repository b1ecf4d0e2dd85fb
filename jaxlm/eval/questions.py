"""One's own questions: `jaxlm eval RUN --tasks=mine.jsonl`. A file has rows of one type:

{"query": ..., "choices": [...], "gold": 1}   which choice is likeliest after the query (`acc`; `acc_norm`: per byte)
{"context": ..., "continuation": ...}         is each token of the continuation the likeliest (`acc`)
{"prompt": ..., "answer": ...}                what the model writes up to a newline, compared without case (`exact_match`)
"""

import collections
import functools
import hashlib
import json
import pathlib
from collections.abc import Callable, Sequence

import numpy as np

from jaxlm.config import ConfigError, EvalConfig
from jaxlm.corpus.benchmarks import core as layout
from jaxlm.corpus.benchmarks import reading
from jaxlm.data.tokenizer.ids import document
from jaxlm.eval import completions
from jaxlm.eval.likelihood import Request, Scorer
from jaxlm.eval.results import Item, TaskResult, means, spread

_TYPES = (("query", "choices", "gold"), ("context", "continuation"), ("prompt", "answer"))
_LEAST_TOKENS = 16  # that an answer may have


def is_file(name: str) -> bool:
    return name.endswith(".jsonl")


def check(path: str, settings: EvalConfig) -> None:
    read(path)


@functools.cache  # in training the same questions at each step, whatever becomes of the file
def read(path: str) -> list[dict]:
    """Returns the rows of a file of questions. Raises ConfigError for the first row that is of no type, or of another type."""
    if not pathlib.Path(path).expanduser().is_file():
        raise ConfigError(f"--tasks={path}: there is no such file (a name that ends in .jsonl is a file of questions)")
    rows: list[dict] = []
    for number, row in reading.records(str(pathlib.Path(path).expanduser())):
        keys = next((keys for keys in _TYPES if all(key in row for key in keys)), None)
        if keys is None:
            known = " or ".join(f"{{{', '.join(keys)}}}" for keys in _TYPES)
            raise ConfigError(f"{path}:{number} has the keys {', '.join(row) or 'none'}: a question has {known}")
        if rows and keys != tuple(rows[0]):
            raise ConfigError(
                f"{path}:{number} has {', '.join(keys)}, the first row {', '.join(rows[0])}: make two files"
            )
        try:
            if keys != _TYPES[2]:
                layout.row({key: row[key] for key in keys})
            elif not all(isinstance(row[key], str) for key in keys):
                raise ValueError("prompt and answer must be texts")
            elif not _folded(row["answer"]) or "\n" in row["answer"].strip():
                raise ValueError(
                    "an answer must be one line of text: what the model writes is read up to the first newline"
                )
            if any(not text for text in row.get("choices", [row.get("continuation", "x")])):
                raise ValueError("a choice or continuation is empty")
        except ValueError as error:
            raise ConfigError(f"{path}:{number}: {error}") from None
        rows.append({key: row[key] for key in keys})
    if not rows:
        raise ConfigError(f"{path} holds no question")
    return rows


def evaluate(scorer: Scorer, path: str, settings: EvalConfig, items: int) -> list[TaskResult]:
    """Returns one result, named as the file; `items` questions drawn from all, 0 for all."""
    rows, name = read(path), pathlib.PurePath(path).name
    numbers = spread(len(rows), items)
    ask: Callable = _written if "prompt" in rows[0] else _chosen
    drawn = [rows[number] for number in numbers]
    ids = _ids(rows)
    answers = ask(scorer, drawn, name)
    answered = [Item(ids[number], *answer) for number, answer in zip(numbers, answers, strict=True)]
    chance = float(np.mean([1 / len(row["choices"]) for row in drawn])) if "choices" in rows[0] else None
    return [TaskResult(name, *means(answered), chance, 0, answered)]


def _ids(rows: Sequence[dict]) -> list[str]:
    """Returns a digest of each row, with a number if it is there again: an edited question is another one."""
    seen, ids = collections.Counter(), []
    for row in rows:
        digest = hashlib.blake2b(json.dumps(row, sort_keys=True).encode(), digest_size=6).hexdigest()
        seen[digest] += 1
        ids.append(digest if seen[digest] == 1 else f"{digest}-{seen[digest]}")
    return ids


def _chosen(scorer: Scorer, rows: Sequence[dict], name: str) -> list[tuple[dict, dict]]:
    """Returns (metrics, detail) of each row, by the log p of its choices or its continuation."""
    texts = []  # of each row: the question, what may follow it
    for row in rows:
        question, choices = row.get("query", row.get("context")), row.get("choices") or [row["continuation"]]
        texts.append((question, [_after(question, choice) for choice in choices]))
    requests = [_request(scorer, question, choice) for question, choices in texts for choice in choices]
    scores, answered = iter(scorer.score(requests, name)), []
    for row, (question, choices) in zip(rows, texts, strict=True):
        own = [next(scores) for _ in choices]
        logp, sizes = [score.logp for score in own], [len(choice.encode()) for choice in choices]
        gold = row.get("gold", 0)
        if "gold" in row:
            by_byte = np.divide(logp, np.maximum(sizes, 1))
            metrics = {"acc": float(np.argmax(logp) == gold), "acc_norm": float(np.argmax(by_byte) == gold)}
        else:
            metrics = {"acc": float(own[0].greedy)}
        detail = {"question": question, "choices": choices, "logp": logp, "bytes": sizes, "gold": gold}
        answered.append((metrics, detail))
    return answered


def _after(before: str, text: str) -> str:
    """Returns a text as it follows another: after a space, unless one of the two has white space there."""
    return text if not before or before[-1:].isspace() or text[:1].isspace() else f" {text}"


def _request(scorer: Scorer, before: str, text: str) -> Request:
    """Returns the ids before a text and those of the text, as lm-evaluation-harness cuts them: spaces go to the text."""
    head = before.rstrip()
    ids, whole = document(scorer.tokenizer, head), document(scorer.tokenizer, before + text)
    return ids or [scorer.opening], whole[len(ids) :]


def _written(scorer: Scorer, rows: Sequence[dict], name: str) -> list[tuple[dict, dict]]:
    """Returns (metrics, detail) of each row, by what the model writes up to the first newline."""
    prompts = [document(scorer.tokenizer, row["prompt"].rstrip(" ")) for row in rows]
    longest = max(len(scorer.tokenizer.encode(row["answer"])) for row in rows)
    texts = completions.complete(scorer, prompts, ("\n",), completions.greedy(2 * longest + _LEAST_TOKENS), name)
    return [
        (
            {"exact_match": float(_folded(text) == _folded(row["answer"]))},
            {"question": row["prompt"], "answer": text, "right": row["answer"]},
        )
        for row, text in zip(rows, texts, strict=True)
    ]


def _folded(text: str) -> str:
    return " ".join(text.split()).casefold()
