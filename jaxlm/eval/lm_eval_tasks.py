"""Finds and loads the tasks of EleutherAI's lm-evaluation-harness, from the hub or from a folder laid out like it.

Indexing all 14,000 of its files takes it 15 s; here only the folders that hold the tasks are read.
"""

import difflib
import itertools
import logging
import os
import pathlib
import random
import re
from collections.abc import Iterable, Iterator, Sequence

import lm_eval.tasks
from lm_eval.api.samplers import ContextSampler
from lm_eval.api.task import Task
from lm_eval.tasks import TaskManager

from jaxlm.config import ConfigError, RunError
from jaxlm.console import working
from jaxlm.processes import say

_ROOT = pathlib.Path(lm_eval.tasks.__file__).parent
_NAME = re.compile(rb"^(?:task|group|tag): *[\"']?([\w.-]+)", re.MULTILINE)
_SPLITS = ("training_split", "validation_split", "fewshot_split")
_OFFLINE = "; without network: scripts/hub_layout.py lays files out for --config.eval.data_dir=BENCHMARKS"
# What is in a scorer that runs what a model wrote; sympy's parsers evaluate.
_RUNS = re.compile(r"(?<![\w.])(?:eval|exec)\(|\b(?:sympy|math_verify|code_eval)\b|\bsubprocess\.")
_SEED = 1234  # of the worked examples, as lm-evaluation-harness has it


def load(
    names: Sequence[str], data_dir: str, fewshot: int, cache: str, run_code: bool = False
) -> dict[str, dict[str, Task]]:
    """Returns name -> the tasks that it stands for, by their names: itself, or the members of a group.

    Args:
      names: of tasks, groups or tags of the harness.
      data_dir: a folder laid out as the hub is; "" for the hub.
      fewshot: the worked examples before each question; -1 as each task says. Tasks that fix none stay without.
      cache: an empty folder for what `datasets` makes of `data_dir`. In its own cache it would find another folder's files.
      run_code: True to load tasks whose scorers run what a model wrote.

    Raises:
      ConfigError: there is no such task, `data_dir` lacks its files, or it runs code.
      RunError: its files could not be fetched.
    """
    for library in ("lm_eval", "datasets", "huggingface_hub"):  # what they raise is told in one line
        logging.getLogger(library).setLevel(logging.ERROR)
    with working("looking for tasks"):
        manager = _manager(names)
    found = {}
    for name in names:
        leaves = list(dict.fromkeys(_leaves(manager, name)))
        if not run_code and (runs := next((leaf for leaf in leaves if _runs_code(_fields(manager, leaf))), "")):
            raise ConfigError(
                f"{runs} is scored by code that runs what the model wrote, in this process, with your files and environment: "
                "--config.eval.run_code=True consents"
            )
        found[name] = {leaf: _load(manager, leaf, data_dir, fewshot, cache) for leaf in leaves}
    return found


class Examples(ContextSampler):
    """Draws for each question the worked examples that a run of all questions draws for it, whichever are asked.

    The harness draws them one question after another from one sequence of random numbers. So those of a question would change
    with which others are asked, and from one evaluation in training to the next. Here `ask` says which are asked. Only where
    the drawn examples hold the question itself twice the harness draws again, and its later ones differ from ours.
    """

    def __init__(self, drawn: ContextSampler):
        super().__init__(drawn.df, fewshot_indices=drawn.fewshot_indices)
        self.ask(itertools.count())

    def ask(self, numbers: Iterable[int]) -> None:
        """Says the numbers of the questions whose examples are drawn next, in order."""
        self._numbers, self._walk, self._at = iter(numbers), random.Random(_SEED), 0

    def sample(self, n: int, eval_doc=None, df=None, **kwargs) -> Sequence[dict]:
        """Returns the examples of the next question."""
        number, size = next(self._numbers), len(self.fewshot_docs())
        for _ in range(number - self._at):
            self._walk.sample(range(size), n + bool(eval_doc))
        self._at = number
        self.rnd.setstate(self._walk.getstate())
        return super().sample(n, eval_doc, df, **kwargs)


def ask(task: Task, numbers: Sequence[int]) -> None:
    """Prepares a task for these questions, in order: the worked examples of each are the same whenever it is asked."""
    task.set_fewshot_seed(seed=_SEED)
    if isinstance(getattr(task, "sampler", None), Examples):
        task.sampler.ask(numbers)


def _manager(names: Sequence[str]) -> TaskManager:
    """Returns a manager that knows the names. Raises ConfigError with the nearest ones if there is no such task."""
    # Most tasks lie in a folder of their name, or of its first words.
    begins = {"_".join(name.split("_")[:words]) for name in names for words in range(1, name.count("_") + 2)}
    manager = TaskManager(
        include_path=[_ROOT / part for part in begins if (_ROOT / part).is_dir()], include_defaults=False
    )
    if all(name in manager.task_index for name in names):
        return manager
    folders: dict[str, set[str]] = {}
    for path in _files():
        for match in _NAME.finditer(path.read_bytes()):
            folders.setdefault(match.group(1).decode(), set()).add(path.relative_to(_ROOT).parts[0])
    for name in names:
        if name not in folders:
            near = difflib.get_close_matches(name, folders, n=3)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise ConfigError(f"no task {name} in lm-evaluation-harness{hint}")
    needed = set().union(*(folders[name] for name in names))
    return TaskManager(include_path=[_ROOT / part for part in sorted(needed)], include_defaults=False)


def _files() -> Iterator[pathlib.Path]:
    for folder, _, names in os.walk(_ROOT):
        yield from (pathlib.Path(folder, name) for name in names if name.endswith(".yaml"))


def _leaves(manager: TaskManager, name: str) -> Iterator[str]:
    """Yields the tasks of a task, a group or a tag."""
    entry = manager.task_index[name]
    members = entry.cfg and entry.cfg["task"]
    if entry.yaml_path is None:  # a tag
        yield from sorted(entry.tags)
    elif isinstance(members, list):
        for member in members:
            yield from _leaves(manager, member if isinstance(member, str) else member["task"])
    else:
        yield name


def _fields(manager: TaskManager, name: str) -> dict:
    """Returns what a task's file says."""
    return dict(manager.task_index[name].cfg)


def _runs_code(fields: dict) -> bool:
    """True if a task says so, or the folder of a function that it names has a scorer that evaluates."""
    functions = re.findall(re.escape(str(_ROOT)) + "[^']*", repr(fields))
    files = {file for function in functions for file in pathlib.Path(function).parent.glob("*.py")}
    return bool(fields.get("unsafe_code")) or any(_RUNS.search(file.read_text(encoding="utf-8")) for file in files)


def _load(manager: TaskManager, name: str, data_dir: str, fewshot: int, cache: str) -> Task:
    fields = _fields(manager, name)
    path, default = str(fields.get("dataset_path") or ""), int(fields.get("num_fewshot") or 0)
    fixed = "num_fewshot" in fields and not default
    shots = default if fewshot < 0 or fixed else fewshot
    if shots < fewshot:
        say(f"{name} takes no worked examples: not the {fewshot} of eval.fewshot")
    if "ifeval" in name:
        _check_sentences(name)
    override = {"num_fewshot": shots}
    if data_dir:
        kwargs = dict(fields.get("dataset_kwargs") or ()) | {"cache_dir": cache}
        override |= {"dataset_path": str(_folder(name, path, data_dir)), "dataset_kwargs": kwargs}
    where = f"{data_dir} (see scripts/hub_layout.py)" if data_dir else "https://huggingface.co"
    while True:
        try:
            # The only way to a task whose dataset lies elsewhere: as a member of a group.
            with working(f"reading {name}", end=False):
                (task,) = manager.load([{"group": "here", "task": [{"task": name, **override}]}])["tasks"].values()
        except KeyError as error:  # no such split; the harness reads the worked examples even if none are shown
            lacking = [key for key in _SPLITS if fields.get(key) == error.args[0] and key not in override]
            if shots or not lacking:
                raise ConfigError(
                    f"{name}: no {error.args[0]} in {path} of {where}, from where its {shots} worked examples come: "
                    "hub_layout.py --examples=N lays them out, --fewshot=0 does without"
                ) from None
            override |= dict.fromkeys(lacking)
        except ImportError as error:
            raise _lacks(name, error) from None
        except StopIteration:  # of `datasets`: no row
            raise ConfigError(f"{name}: no question in {_empty(path, data_dir)} of {where}: lay it out again") from None
        except (OSError, ValueError, RuntimeError) as error:
            kind, mend = (ConfigError, "") if data_dir else (RunError, _OFFLINE)
            raise kind(f"{name}: can't read {path} from {where}: {_line(error)}{mend}") from error
        else:
            _check_examples(name, task, shots, where)
            if type(getattr(task, "sampler", None)) is ContextSampler:
                task.sampler = Examples(task.sampler)
            return task


def _lacks(name: str, error: ImportError) -> ConfigError:
    return ConfigError(f"{name} needs {error.name or error}: pip install {error.name or error}")


def _check_sentences(name: str) -> None:
    """Raises ConfigError without the data by which IFEval cuts sentences: the harness would fetch them."""
    try:
        import nltk
    except ImportError as error:
        raise _lacks(name, error) from None
    try:
        nltk.data.find("tokenizers/punkt_tab")
    except LookupError:
        raise ConfigError(f"{name} cuts sentences by data of NLTK: python -m nltk.downloader punkt_tab") from None


def _check_examples(name: str, task: Task, shots: int, where: str) -> None:
    """Raises ConfigError if there are too few worked examples. The harness draws one more than it shows."""
    held = len(task.sampler.df) if shots else 0
    if held < shots + (shots > 0 and type(task.sampler) is ContextSampler):
        raise ConfigError(f"{name}: {held} worked examples in {where}, too few to draw {shots} from")


def _folder(name: str, path: str, data_dir: str) -> pathlib.Path:
    """Returns the folder of a task's dataset. Raises ConfigError if there is none, or the task has no dataset of its own."""
    root = pathlib.Path(data_dir).expanduser().resolve()
    if not root.is_dir():
        raise ConfigError(f"eval.data_dir={data_dir} is no folder")
    if path and (root / path).is_dir():
        return root / path
    raise ConfigError(
        f"{name} reads {path or 'no dataset by name'}, which eval.data_dir={data_dir} does not have: lay its files there with "
        "scripts/hub_layout.py, or set eval.data_dir= to fetch it from the hub"
    )


def _empty(path: str, data_dir: str) -> str:
    """Returns the names of a dataset's files that hold no rows."""
    root = pathlib.Path(data_dir).expanduser()
    empty = [file for file in sorted((root / path).rglob("*.*")) if file.is_file() and not file.read_bytes().strip()]
    return ", ".join(str(file.relative_to(root)) for file in empty) or path


def _line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[0][:200]
