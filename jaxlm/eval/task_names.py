"""Finds tasks of lm-evaluation-harness by their names, in a second, without importing it or JAX."""

import difflib
import importlib.util
import pathlib
import re
from collections.abc import Iterable, Sequence

from jaxlm.config import ConfigError

_OWN = re.compile(r"|(?:humaneval|core|redteam)(?:[:_].*)?|.*\..*")  # tasks of ours; what may be a file
_NAME = rb"[\w.(][\w.()-]*"
_NAMES = re.compile(
    rb"^['\"]?(?:task|group|tag)['\"]?: *['\"]?(%b)|^['\"]?tag['\"]?: *((?:\r?\n *- *['\"]?%b['\"]? *)+)"
    % (_NAME, _NAME),
    re.M,
)


def check(names: Sequence[str]) -> None:
    """Raises ConfigError with the nearest names if the harness is installed and lacks a task."""
    theirs = [name for name in names if not _OWN.fullmatch(name)]
    if theirs and importlib.util.find_spec("lm_eval"):
        folders(theirs)


def folders(names: Sequence[str]) -> list[pathlib.Path]:
    """Returns the harness's folders that hold the tasks, groups and tags. Raises ConfigError with the nearest names."""
    root = pathlib.Path(importlib.util.find_spec("lm_eval").submodule_search_locations[0], "tasks")
    # Most tasks are in a folder that has the task's name, or the first words of it; all 14,000 files take a second.
    begins = {"_".join(name.split("_")[:words]) for name in names for words in range(1, name.count("_") + 2)}
    place = _read(root, (root / part for part in begins))
    if not place.keys() >= {*names}:
        place = _read(root, [root])
    for name in names:
        if name not in place:
            near = difflib.get_close_matches(name, place, n=3)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise ConfigError(f"no task {name} in lm-evaluation-harness{hint}")
    return sorted(set().union(*(place[name] for name in names)))


def _read(root: pathlib.Path, below: Iterable[pathlib.Path]) -> dict[str, set[pathlib.Path]]:
    place: dict[str, set[pathlib.Path]] = {}
    paths = (path for folder in below for path in folder.rglob("*") if path.suffix in ("", ".yaml") and path.is_file())
    for path in paths:  # files without a suffix are included by others
        for match in _NAMES.finditer(path.read_bytes()):
            for name in re.findall(_NAME, match[1] or match[2]):
                place.setdefault(name.decode(), set()).add(root / path.relative_to(root).parts[0])
    return place
