"""Benchmark results: which questions are asked, scores by item and by task, and the files in RUN/eval/STEP.

`jaxlm eval` and the hook in training write RUN/eval/STEP/TASK.jsonl and results.json; `compare` and the report read them.
"""

import contextlib
import dataclasses
import datetime
import errno
import itertools
import json
import math
import pathlib
import re
from collections.abc import Sequence

import numpy as np

from jaxlm.config import ConfigError, RunError
from jaxlm.host import files
from jaxlm.report import benchmarks
from jaxlm.report.benchmarks import BITS, MARGIN

FOLDER, SUMMARY = "eval", "results.json"
_ROOM = 2**20  # bytes that a trial writes: about as many as a thousand questions take
_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclasses.dataclass(frozen=True)
class Item:
    """One question and the model's scores on it.

    Attributes:
      id: identifies the question; the same in every run that asks it.
      metrics: name -> score, such as `acc` (0 or 1), `acc_norm`, `exact_match`; for a multiple-choice question also
        `bits_per_byte` of the right answer, and its `margin` over the best wrong answer in bits per byte.
      detail: for a reader: the question, log p of each choice in nats, the text that was generated.
    """

    id: str
    metrics: dict[str, float]
    detail: dict = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class TaskResult:
    """A model's scores on one task.

    Attributes:
      metrics: name -> the task's score, as the harness computes it; if items have the metric, their mean.
      stderr: name -> the standard error of the score, if known.
      chance: the accuracy of guessing; None if the task has no choices.
      fewshot: how many few-shot examples each question had; None for a mean over tasks with different numbers.
    """

    task: str
    metrics: dict[str, float]
    stderr: dict[str, float]
    chance: float | None
    fewshot: int | None
    items: list[Item]


# Which questions are asked, and what they score


def spread(size: int, items: int) -> list[int]:
    """Returns the numbers of the questions to ask, ascending: `items` drawn from `size` questions; all if `items` is 0.

    The draw is always the same, and a larger draw contains every smaller draw.
    """
    if not 0 < items < size:
        return list(range(size))
    # Here, because `compare` needs no draw and the import takes a second.
    from jaxlm.data.batches.document_rows import permute

    return sorted(permute(np.arange(items), size, "items").tolist())


def shares(sizes: dict[str, int], items: int) -> dict[str, int]:
    """Returns task -> how many questions to ask: `items` in all, in proportion to the tasks' sizes; all if `items` is 0."""
    total = sum(sizes.values())
    if not 0 < items < total:
        return sizes
    bounds = (end * items // total for end in itertools.accumulate(sizes.values(), initial=0))
    return {name: after - before for name, (before, after) in zip(sizes, itertools.pairwise(bounds), strict=True)}


def means(items: Sequence[Item]) -> tuple[dict[str, float], dict[str, float]]:
    """Returns (metric -> its mean, metric -> the mean's standard error), of the metrics that all items have.

    If all scores are 0 or all are 1, the standard error is computed with two right and two wrong answers added (Agresti and
    Coull 1998): ten wrong answers do not prove that all answers are wrong.
    """
    metrics, stderr = {}, {}
    for name in items[0].metrics if items else ():
        if all(name in item.metrics for item in items):
            scores = np.asarray([item.metrics[name] for item in items], float)
            metrics[name] = float(scores.mean())
            if np.all(scores == 0) or np.all(scores == 1):
                scores = np.append(scores, (0, 0, 1, 1))
            if len(scores) > 1:
                stderr[name] = float(scores.std(ddof=1) / len(scores) ** 0.5)
    return metrics, stderr


# Two measures show differences that accuracy hides. At 10^20 FLOPs accuracy is hardly above chance, while the probability of
# the right answer improves steadily (Heineman et al. 2025, "Signal and Noise", arXiv:2508.13144). Bits per byte is
# -log2 p(answer | question) over the UTF-8 bytes of the answer as scored.
def of_choices(logp: Sequence[float], sizes: Sequence[int], gold: int | Sequence[int]) -> dict[str, float]:
    """Returns the right answer's `bits_per_byte`, and its `margin`: the best wrong answer's bits per byte minus these.

    If several answers are right, `bits_per_byte` is their mean, and the margin is the best one's. If none is wrong, there is
    no margin; if none is right, or a choice is empty, the result is {}. `logp` (nats) and `sizes` (UTF-8 bytes) are of each
    choice.
    """
    right = [gold] if isinstance(gold, int) else list(gold)
    if not right or not all(0 <= choice < len(logp) for choice in right) or min(sizes, default=0) < 1:
        return {}
    bits = [-nats / math.log(2) / size for nats, size in zip(logp, sizes, strict=True)]
    measures = {BITS: sum(bits[choice] for choice in right) / len(right)}
    if wrong := [value for choice, value in enumerate(bits) if choice not in right]:
        measures[MARGIN] = min(wrong) - min(bits[choice] for choice in right)
    return measures


def measured(result: TaskResult) -> TaskResult:
    """Returns a task's result with the measures of `of_choices` added: to items with choices, and as means to the task."""
    items = []
    for item in result.items:
        if {"logp", "bytes", "gold"} <= item.detail.keys():
            own = of_choices(item.detail["logp"], item.detail["bytes"], item.detail["gold"])
            item = dataclasses.replace(item, metrics=item.metrics | own)
        items.append(item)
    metrics, stderr = dict(result.metrics), dict(result.stderr)
    for name in (BITS, MARGIN):
        scores = [item.metrics[name] for item in items if has(item.metrics, name)]
        if scores and len(scores) == len(items):
            metrics[name] = mean = sum(scores) / len(scores)
            if len(scores) > 1:
                squares = sum((score - mean) ** 2 for score in scores)
                stderr[name] = math.sqrt(squares / (len(scores) - 1) / len(scores))
    return dataclasses.replace(result, items=items, metrics=metrics, stderr=stderr)


def has(metrics: dict[str, float], name: str) -> bool:
    return math.isfinite(metrics.get(name, math.nan))


def alarm(result: TaskResult, flops: float) -> str:
    return benchmarks.alarm(result.task, vars(result) | {"n": len(result.items)}, flops)


# RUN/eval/STEP


def unwritable(folder: pathlib.Path, step: int) -> str:
    """Returns why results of a step can't be written ("Read-only file system"), by a trial; "" if they can.

    Raises ConfigError if the step's earlier results are damaged, RunError if the disk is full.
    """
    place = folder / FOLDER / str(step)
    try:
        _tasks_there(place)
        place.mkdir(parents=True, exist_ok=True)
        _write(place / ".trial", "0" * _ROOM)
        (place / ".trial").unlink()
    except OSError as error:
        if error.errno in _FULL:
            raise RunError(f"{place}: {error.strerror}: free some room and run the same command again") from None
        return str(error.strerror)
    finally:
        for made in (place, place.parent):  # if empty
            with contextlib.suppress(OSError):
                made.rmdir()
    return ""


def write(folder: pathlib.Path, results: Sequence[TaskResult], about: dict) -> pathlib.Path:
    """Writes results to `folder`/eval/STEP, keeps the other tasks' results there, and returns that folder.

    `about` has `step`, and how the results were made (fewshot, limit, packages, `moment`).
    """
    place = folder / FOLDER / str(about["step"])
    place.mkdir(parents=True, exist_ok=True)
    new = {}
    for result in results:
        entry = dataclasses.asdict(result)
        items = entry.pop("items")
        lines = "".join(json.dumps(item, ensure_ascii=False) + "\n" for item in items)
        _write(place / f"{_file(result.task)}.jsonl", lines)
        new[result.task] = entry | {"about": about, "n": len(items)}
    content = {"step": about["step"], "tasks": _tasks_there(place) | new}
    _write(place / SUMMARY, json.dumps(content, indent=1, ensure_ascii=False))
    return place


def _write(path: pathlib.Path, content: str) -> None:
    """Writes JSON atomically, a lone surrogate as `\\ud800`. If the write fails, deletes the partial file."""
    try:
        files.write_atomically(path, files.printable(content).encode())
    except OSError:
        with contextlib.suppress(OSError):
            path.with_name(f"{path.name}.tmp").unlink()
        raise


def add(folder: pathlib.Path, result: TaskResult, about: dict) -> str:
    """Writes one result as `write` does, unless an earlier result has more questions, asked in the same way.

    With fewer questions the score would be less certain. Returns a line on the earlier result; "" if there was none.
    """
    place = folder / FOLDER / str(about["step"])
    old = _tasks_there(place).get(result.task)
    new, line = len(result.items), ""
    if old:
        then, had = old.get("about") or {}, int(old.get("n") or 0)
        alike = old.get("fewshot") == result.fewshot and then.get("chat_template") == about.get("chat_template")
        whose = " that the training asked" if then.get("training") else ""
        if alike and had > new and _holds(place, result):
            sentence = f"{place} keeps the {had:,} questions of {result.task}{whose}, not these {new:,}"
            return f"{sentence}; to replace them, delete {_file(result.task)}.jsonl there"
        line = f"{place}: these {new:,} questions of {result.task} replace the {had:,}{whose}"
        line += "" if alike else ", with other worked examples or another template"
    write(folder, [result], about)
    return line


def _holds(place: pathlib.Path, result: TaskResult) -> bool:
    """True if the results there have all the questions of `result`."""
    return {item.id for item in result.items} <= {item.id for item in read(place)[result.task].items}


def steps(folder: pathlib.Path) -> list[int]:
    names = (path.parent.name for path in (folder / FOLDER).glob(f"*/{SUMMARY}"))
    return sorted(int(name) for name in names if files.is_step(name))


def moment(folder: pathlib.Path, clock: files.Clock = datetime.datetime.now) -> str:
    """Returns the present moment that chat templates see in a run's benchmarks: that of earlier results, else now.

    So the questions are the same every day.
    """
    earlier = []
    for step in steps(folder):
        with contextlib.suppress(ConfigError, *files.MANGLED):  # damaged results: their reader reports them
            tasks = _tasks(folder / FOLDER / str(step)).values()
            earlier += [task["about"]["moment"] for task in tasks if files.is_moment(task["about"].get("moment"))]
    return min(earlier, default=files.moment(clock))


_SCORE = files.Leaf("a number", lambda value: value is None or type(value) in (int, float, bool))
_ITEM = {"id": files.TEXT, "metrics": {str: _SCORE}, "detail": {}}
_SCORES = {"metrics": {str: _SCORE}, "stderr": {str: _SCORE}, "chance": _SCORE, "fewshot": _SCORE}


def read(place: pathlib.Path) -> dict[str, TaskResult]:
    """Returns task -> its results in RUN/eval/STEP. Raises ConfigError if a file there is missing or damaged."""
    by_task = {}
    for task, entry in _tasks(place).items():
        try:
            text = (place / f"{_file(task)}.jsonl").read_text(encoding="utf-8")
            lines = [files.json_of(line) for line in text.split("\n") if line]  # splitlines() cuts at U+2028
            if problem := files.problem(lines, [_ITEM]) or files.problem(entry, _SCORES):
                raise ValueError(problem)
            scores = {name: entry[name] for name in ("task", *_SCORES)}
            by_task[task] = TaskResult(items=[Item(**line) for line in lines], **scores)
        except (OSError, *files.MANGLED) as error:
            raise ConfigError(f"{place}: the results of {task} are damaged ({error}): run jaxlm eval again") from None
    return by_task


def _tasks(place: pathlib.Path) -> dict:
    tasks = files.json_there(place / SUMMARY).get("tasks")
    if not isinstance(tasks, dict):
        raise ConfigError(f"{place / SUMMARY} is missing or damaged: run jaxlm eval again")
    return tasks


def _tasks_there(place: pathlib.Path) -> dict:
    return _tasks(place) if (place / SUMMARY).is_file() else {}


def _file(task: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]", "_", task)
