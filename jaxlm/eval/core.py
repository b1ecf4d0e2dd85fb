"""CORE: the mean over tasks of accuracy centred on guessing (DCLM, arXiv:2406.11794), as nanochat computes it.

A bundle is a folder with `core.yaml`, `eval_meta_data.csv` and `eval_data/`; karpathy/nanochat has its address. A folder that
holds only .jsonl files of a bundle's row types works too: `multiple_choice`, `schema`, `language_modeling`.
"""

import csv
import dataclasses
import itertools
import pathlib
import random
import typing
from collections.abc import Sequence

import numpy as np

from jaxlm.config import ConfigError, EvalConfig
from jaxlm.corpus.benchmarks import core as layout
from jaxlm.data.tokenizer.ids import document
from jaxlm.eval.likelihood import Request, Score, Scorer
from jaxlm.eval.results import Item, TaskResult, means
from jaxlm.host import console, files

GPT2 = 0.2565  # CORE of the 1.5B GPT-2, as nanochat's README says
_NAMES = {kind: name for name, kind in layout.TYPES.items()}


class Task(typing.NamedTuple):
    """One task of a bundle; `chance` is the accuracy of guessing, None to compute it from the number of choices."""

    name: str
    path: pathlib.Path
    kind: str
    fewshot: int
    delimiter: str
    chance: float | None


def check(part: str, settings: EvalConfig) -> None:
    _tasks(part, settings.data_dir)


def evaluate(scorer: Scorer, part: str, settings: EvalConfig, items: int) -> list[TaskResult]:
    """Returns the results of a bundle's tasks (`acc`, `centred`), then of several tasks `core`, the mean of `centred`.

    Args:
      part: the name of one task; "" for all.
      settings: `data_dir` is the bundle; `fewshot`, if not -1, replaces the tasks' own numbers of few-shot examples.
      items: how many questions of each task, the first in nanochat's order; 0 for all.
    """
    results = []
    for task in _tasks(part, settings.data_dir):
        rows = load(task)
        shots = settings.fewshot if settings.fewshot >= 0 else task.fewshot
        results.append(_evaluate(scorer, task._replace(fewshot=min(shots, len(rows) - 1)), rows, items))
    if len(results) > 1:
        centred = float(np.mean([result.metrics["centred"] for result in results]))
        shots = {result.fewshot for result in results}
        results.append(TaskResult("core", {"centred": centred}, {}, None, shots.pop() if len(shots) == 1 else None, []))
    return results


def _tasks(part: str, data_dir: str) -> list[Task]:
    tasks = read(data_dir)
    chosen = [task for task in tasks if part in ("", task.name)]
    if not chosen:
        raise ConfigError(
            f"no task {part} in eval.data_dir={data_dir}: it has {', '.join(task.name for task in tasks)}"
        )
    return chosen


def read(data_dir: str) -> list[Task]:
    """Returns the tasks of a bundle, or of a folder with .jsonl files of CORE's rows. Raises ConfigError if it is neither."""
    root = pathlib.Path(data_dir).expanduser()
    if not data_dir:
        raise ConfigError("core reads a bundle: set eval.data_dir to the folder that has core.yaml")
    if (root / "core.yaml").is_file():
        return _bundle(root)
    tasks = [task for path in sorted(root.glob("*.jsonl")) if (task := _single(path))]
    if not tasks:
        raise ConfigError(
            f"eval.data_dir={data_dir} has no core.yaml and no file of CORE's rows (query, choices, gold)"
        )
    return tasks


def _bundle(root: pathlib.Path) -> list[Task]:
    import yaml

    try:
        entries = yaml.safe_load((root / "core.yaml").read_text())["icl_tasks"]
        with open(root / "eval_meta_data.csv", encoding="utf-8") as file:
            chances = {row["Eval Task"]: float(row["Random baseline"]) / 100 for row in csv.DictReader(file)}
        tasks = []
        for entry in entries:
            name, path = entry["label"], root / "eval_data" / entry["dataset_uri"]
            delimiter = entry.get("continuation_delimiter", " ")
            tasks.append(Task(name, path, entry["icl_task_type"], entry["num_fewshot"][0], delimiter, chances[name]))
        return tasks
    except (OSError, yaml.YAMLError, csv.Error, *files.MANGLED) as error:
        raise ConfigError(f"{root} is not a bundle of CORE, or is damaged ({error!r}): fetch it again") from error


def _single(path: pathlib.Path) -> Task | None:
    with open(path, encoding="utf-8", errors="replace") as file:
        first = file.readline()
    try:
        row = files.json_of(first)
        kind = _NAMES.get(layout.kind(row))
    except (ValueError, TypeError):
        return None
    if not kind:
        return None
    is_question = str(row.get("query", "")).startswith("Question:")  # such rows have this delimiter in the bundle
    delimiter = "\nAnswer: " if is_question else " "
    return Task(path.stem, path, kind, 0, delimiter, 0.0 if kind == "language_modeling" else None)


def load(task: Task) -> list[dict]:
    """Returns the rows of a task, all of one type. Raises ConfigError if the file is missing, or has rows of another type."""
    rows = layout.rows(str(task.path))
    if type(rows[0]) is not layout.TYPES.get(task.kind):
        raise ConfigError(
            f"{task.path} has rows of {_NAMES[type(rows[0])]}, not of {task.kind}: mend icl_task_type in core.yaml, or the rows"
        )
    return [dataclasses.asdict(row) for row in rows]


def _evaluate(scorer: Scorer, task: Task, rows: list[dict], items: int) -> TaskResult:
    order = list(range(len(rows)))
    random.Random(1337).shuffle(order)  # nanochat's order; with a limit nanochat takes its first questions
    rows = [rows[number] for number in order]
    taken = range(min(items or len(rows), len(rows)))
    requests = [questions(scorer, task, rows, number) for number in taken]
    scores = iter(scorer.score([request for own in requests for request in own], task.name))
    sizes = scorer.tokenizer.token_bytes()
    answered = []
    for number, own in zip(taken, requests, strict=True):
        lengths = [int(sizes[list(scored)].sum()) for _, scored in own]
        answered.append(_item(task, rows[number], order[number], [*itertools.islice(scores, len(own))], lengths))
    chance = task.chance
    if chance is None:
        chance = float(np.mean([1 / len(_choices(task, rows[number])) for number in taken]))
    metrics, stderr = means(answered)
    metrics["centred"] = (metrics["acc"] - chance) / (1 - chance)
    if "acc" in stderr:
        stderr["centred"] = stderr["acc"] / (1 - chance)
    return TaskResult(task.name, metrics, stderr, chance, task.fewshot, answered)


def _item(task: Task, row: dict, number: int, scores: Sequence[Score], sizes: Sequence[int]) -> Item:
    """Returns one question with its scores; `scores` and `sizes` (bytes) are those of the question's requests."""
    choices = _choices(task, row)
    own, shared = scores[: len(choices)], scores[len(choices) :]
    if task.kind == "language_modeling":
        right, gold = own[0].greedy, 0
    else:
        gold = row["gold"]
        right = int(np.argmax([score.logp / score.tokens for score in own])) == gold
    detail = {
        "question": row.get("query", row.get("context", row.get("continuation"))),
        "choices": choices,
        "logp": [score.logp + sum(prefix.logp for prefix in shared) for score in own],
        "bytes": [size + sum(sizes[len(choices) :]) for size in sizes[: len(choices)]],
        "gold": gold,
    }
    return Item(str(number), {"acc": float(right)}, detail)


def _choices(task: Task, row: dict) -> list[str]:
    name = {"multiple_choice": "choices", "schema": "context_options"}.get(task.kind)
    return row[name] if name else [row["continuation"]]


def questions(scorer: Scorer, task: Task, rows: Sequence[dict], number: int) -> list[Request]:
    """Returns a request for each choice of a row, after the few-shot examples, to score the tokens that nanochat scores.

    nanochat scores choices from the first token in which they differ. If all answers begin with the same tokens, one more
    request scores these tokens, so that bits per byte are of the whole answer, as in lm-evaluation-harness.
    """
    others = [other for other in range(len(rows)) if other != number]
    examples = [rows[other] for other in random.Random(1234 + number).sample(others, task.fewshot)]
    shown = "".join(f"{_pair(task, row, row.get('gold', 0))}\n\n" for row in examples)
    row = rows[number]
    prompts = [shown + _pair(task, row, choice) for choice in range(len(_choices(task, row)))]
    ids = [document(scorer.tokenizer, prompt) for prompt in prompts]
    last = min(map(len, ids)) - 1  # a choice keeps at least its last token
    if task.kind == "schema":
        same = max(1, min(_alike([prompt_ids[::-1] for prompt_ids in ids]), last))
        return [(prompt_ids[:-same], prompt_ids[-same:]) for prompt_ids in ids]
    question = shown + (row["query"] if task.kind == "multiple_choice" else row["context"].strip()) + task.delimiter
    begin = min(_alike([document(scorer.tokenizer, question.rstrip()), *ids]), last)
    if task.kind == "language_modeling":
        return [(prompt_ids[:begin], prompt_ids[begin:]) for prompt_ids in ids]
    same = min(_alike(ids), last)
    requests = [(prompt_ids[:same], prompt_ids[same:]) for prompt_ids in ids]
    return [*requests, (ids[0][:begin], ids[0][begin:same])] if begin < same else requests


def _pair(task: Task, row: dict, choice: int) -> str:
    if task.kind == "multiple_choice":
        return f"{row['query']}{task.delimiter}{row['choices'][choice]}"
    if task.kind == "schema":
        return f"{row['context_options'][choice]}{task.delimiter}{row['continuation']}"
    return f"{row['context'].strip()}{task.delimiter}{row['continuation']}"


def _alike(ids: Sequence[Sequence[int]]) -> int:
    shortest = min(map(len, ids))
    return next((place for place in range(shortest) if len({prompt_ids[place] for prompt_ids in ids}) > 1), shortest)


def line(results: Sequence[TaskResult]) -> str:
    core = [result.metrics["centred"] for result in results if result.task == "core"]
    count = sum("centred" in result.metrics for result in results) - 1
    return f"CORE {core[0]:.4f} over {console.count(count)} tasks; GPT-2 (1.5B): {GPT2:.4f} over 22" if core else ""
