"""What a model scored on benchmarks, item by item: RUN/eval/STEP/TASK.jsonl and results.json.

`jaxlm eval` and the hook in training write it; `compare` and the report read it.
"""

import contextlib
import dataclasses
import datetime
import errno
import json
import pathlib
import re
import typing

from jaxlm import files
from jaxlm.config import ConfigError, RunError

FOLDER, SUMMARY = "eval", "results.json"
_ROOM = 2**20  # bytes of a trial: about what a thousand questions take
_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclasses.dataclass(frozen=True)
class Item:
    """One question and what the model scored on it.

    Attributes:
      id: identifies the question; the same in every run that asks it.
      metrics: name -> score, such as `acc` (0 or 1), `acc_norm`, `exact_match`; of a multiple-choice question also
        `bits_per_byte` of the right answer and its `margin` over the best wrong one, in bits a byte.
      detail: what a reader may want to see: the question, log p of each choice in nats, the text that was generated.
    """

    id: str
    metrics: dict[str, float]
    detail: dict[str, typing.Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class TaskResult:
    """What a model scored on one task.

    Attributes:
      task: its name.
      metrics: name -> the task's score, as the harness computes it; those of the items are means over them.
      stderr: name -> the standard error of that score, where there is one.
      chance: the accuracy of guessing; None if the task has no choices.
      fewshot: how many worked examples stood before each question; None for a mean over tasks that differ in it.
      items: the questions, in the task's order.
    """

    task: str
    metrics: dict[str, float]
    stderr: dict[str, float]
    chance: float | None
    fewshot: int | None
    items: list[Item]


def unwritable(folder: pathlib.Path, step: int) -> str:
    """Returns why no results can be written for a step, such as "Read-only file system"; "" if they can. It tries it.

    Raises:
      ConfigError: what is there is damaged.
      RunError: the disk is full.
    """
    place = folder / FOLDER / str(step)
    try:
        if (place / SUMMARY).is_file():
            _summary(place / SUMMARY)
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


def write(folder: pathlib.Path, results: typing.Sequence[TaskResult], about: dict[str, typing.Any]) -> pathlib.Path:
    """Writes results below `folder`/eval/STEP, beside those of other tasks there; returns that folder.

    Args:
      folder: a run, or any folder for a model that is no run.
      about: `step`, and what else says how the results came about (fewshot, limit, packages, `moment`).
    """
    place = folder / FOLDER / str(about["step"])
    place.mkdir(parents=True, exist_ok=True)
    for result in results:
        lines = "".join(json.dumps(dataclasses.asdict(item), ensure_ascii=False) + "\n" for item in result.items)
        _write(place / f"{_file(result.task)}.jsonl", lines)
    old = _summary(place / SUMMARY).get("tasks", {}) if (place / SUMMARY).is_file() else {}
    new = {r.task: {k: v for k, v in dataclasses.asdict(r).items() if k != "items"} | {"about": about} for r in results}
    for result in results:
        new[result.task]["n"] = len(result.items)
    content = json.dumps({"step": about["step"], "tasks": old | new}, indent=1, ensure_ascii=False)
    _write(place / SUMMARY, content)
    return place


def _write(path: pathlib.Path, content: str) -> None:
    """Writes JSON whole, half a character of a question as `\\ud800`. If that fails, no half of it stays on a full disk."""
    try:
        files.write_atomically(path, files.printable(content).encode())
    except OSError:
        with contextlib.suppress(OSError):
            path.with_name(f"{path.name}.tmp").unlink()
        raise


def add(folder: pathlib.Path, result: TaskResult, about: dict[str, typing.Any]) -> str:
    """Writes one result as `write` does, unless there are more questions of that task, asked alike; says which stay in a line.

    With fewer, a score would be less sure, and that step would no longer compare with the others of the run.
    """
    place = folder / FOLDER / str(about["step"])
    old = _summary(place / SUMMARY)["tasks"].get(result.task) if (place / SUMMARY).is_file() else None
    new, line = len(result.items), ""
    if old:
        then, had = old.get("about") or {}, int(old.get("n") or 0)
        alike = old.get("fewshot") == result.fewshot and then.get("chat_template") == about.get("chat_template")
        whose = " that the training asked" if then.get("training") else ""
        if alike and had > new:
            return (
                f"{place} keeps the {had:,} questions of {result.task}{whose}, not these {new:,}; delete it to ask anew"
            )
        line = f"{place}: these {new:,} questions of {result.task} replace the {had:,}{whose}"
        line += "" if alike else ", with other worked examples or another template"
    write(folder, [result], about)
    return line


def steps(folder: pathlib.Path) -> list[int]:
    """Returns the steps of a run that have results, in order."""
    found = (path.parent.name for path in (folder / FOLDER).glob(f"*/{SUMMARY}"))
    return sorted(int(name) for name in found if files.is_step(name))


def moment(folder: pathlib.Path, clock: files.Clock = datetime.datetime.now) -> str:
    """Returns what a run's benchmarks take for now in a chat template: what earlier results of the run did, else now.

    So they ask the same questions on every day.
    """
    earlier = []
    for step in steps(folder):
        with contextlib.suppress(ConfigError, *files.MANGLED):  # damaged: whoever reads them says so
            tasks = _summary(folder / FOLDER / str(step) / SUMMARY)["tasks"].values()
            earlier += [task["about"]["moment"] for task in tasks if files.is_moment(task["about"].get("moment"))]
    return min(earlier, default=files.moment(clock))


_SCORE = files.Leaf("a number", lambda value: value is None or type(value) in (int, float, bool))
_ITEM = {"id": files.TEXT, "metrics": {str: _SCORE}, "detail": {}}
_SCORES = {"metrics": {str: _SCORE}, "stderr": {str: _SCORE}, "chance": _SCORE, "fewshot": _SCORE}


def read(place: pathlib.Path) -> dict[str, TaskResult]:
    """Returns task -> its results in RUN/eval/STEP. Raises ConfigError if a file there is missing or damaged."""
    found = {}
    for task, entry in _summary(place / SUMMARY).get("tasks", {}).items():
        try:
            text = (place / f"{_file(task)}.jsonl").read_text(encoding="utf-8")
            lines = [files.json_of(line) for line in text.split("\n") if line]  # splitlines() cuts at U+2028
            if problem := files.problem(lines, [_ITEM]) or files.problem(entry, _SCORES):
                raise ValueError(problem)
            items = [Item(**line) for line in lines]
            kept = {f.name: entry[f.name] for f in dataclasses.fields(TaskResult) if f.name != "items"}
            found[task] = TaskResult(items=items, **kept)
        except (OSError, *files.MANGLED) as error:
            raise ConfigError(f"{place}: the results of {task} are damaged ({error}): run jaxlm eval again") from None
    return found


def _summary(path: pathlib.Path) -> dict:
    content = files.json_there(path)
    if not isinstance(content.get("tasks"), dict):
        raise ConfigError(f"{path} is missing or damaged: run jaxlm eval again")
    return content


def _file(task: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]", "_", task)
