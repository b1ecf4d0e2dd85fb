"""Finds and loads the tasks of EleutherAI's lm-evaluation-harness, from the hub or from a folder laid out like it.

Indexing all 14,000 of its files takes it 15 s; here only the folders that hold the tasks are read.
"""

import difflib
import logging
import os
import pathlib
import re
from collections.abc import Iterator, Sequence

import lm_eval.tasks
from lm_eval.api.task import Task
from lm_eval.tasks import TaskManager

from jaxlm.config import ConfigError, RunError
from jaxlm.console import working

_ROOT = pathlib.Path(lm_eval.tasks.__file__).parent
_NAME = re.compile(rb"^(?:task|group|tag): *[\"']?([\w.-]+)", re.MULTILINE)
_SEED = 1234  # of the worked examples, as lm-evaluation-harness has it


def load(names: Sequence[str], data_dir: str, fewshot: int) -> dict[str, dict[str, Task]]:
    """Returns name -> the tasks that it stands for, by their names: itself, or the members of a group.

    Args:
      names: of tasks, groups or tags of the harness.
      data_dir: a folder laid out as the hub is; "" for the hub.
      fewshot: the worked examples before each question; -1 as each task says. Tasks that fix none stay without.

    Raises:
      ConfigError: there is no such task, or `data_dir` lacks its files.
      RunError: its files could not be fetched.
    """
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    with working("looking for tasks"):
        manager = _manager(names)
    found = {}
    for name in names:
        leaves = list(dict.fromkeys(_leaves(manager, name)))
        found[name] = {leaf: _load(manager, leaf, data_dir, fewshot) for leaf in leaves}
    return found


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
    members = (entry.cfg or {}).get("task")
    if entry.yaml_path is None:  # a tag
        yield from sorted(entry.tags)
    elif isinstance(members, list):
        for member in members:
            yield from _leaves(manager, member if isinstance(member, str) else member.get("task", member.get("group")))
    else:
        yield name


def _load(manager: TaskManager, name: str, data_dir: str, fewshot: int) -> Task:
    path, override = (manager.task_index[name].cfg or {}).get("dataset_path", ""), {}
    if data_dir:
        override = {"dataset_path": str(_folder(name, path, data_dir))}
    try:
        # The only way to a task whose dataset lies elsewhere: as a member of a group.
        group = {"group": "here", "task": [{"task": name, **override}]}
        (task,) = manager.load([group])["tasks"].values()
    except (OSError, ValueError, RuntimeError, KeyError, ConnectionError) as error:
        where = f"{data_dir} (see scripts/hub_layout.py)" if data_dir else "https://huggingface.co"
        raise (ConfigError if data_dir else RunError)(
            f"{name}: can't read {path} from {where}: {_line(error)}"
        ) from error
    default = task.get_config("num_fewshot")
    if fewshot >= 0 and default != 0:
        task.set_config(key="num_fewshot", value=fewshot)
    elif default is None:
        task.set_config(key="num_fewshot", value=0)
    task.set_fewshot_seed(seed=_SEED)
    return task


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


def _line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[0][:200]
