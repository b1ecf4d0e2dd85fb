"""Compares the recipe that made a folder with the recipe of this run."""

import hashlib
import importlib.metadata
import pathlib
from collections.abc import Mapping

from jaxlm.config import ConfigError, older
from jaxlm.host.console import Say

MANIFEST = "prepared.json"  # here, so that the command line imports no library for it


def own_code(folder: str = "") -> str:
    """Returns a digest of the source code of jaxlm, or of one of its folders: tasks of two versions must not be mixed."""
    here, hasher = pathlib.Path(__file__).parents[1] / folder, hashlib.sha256()
    for path in sorted(here.rglob("*.py")):
        hasher.update(f"{path.relative_to(here)}\0".encode() + path.read_bytes())
    return hasher.hexdigest()[:16]


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None  # finished data is used without the libraries that made it


def check_same(
    built: Mapping[str, object], wanted: Mapping[str, object], *, made: str, manifest: pathlib.Path, again: str
) -> None:
    """Raises ConfigError if two recipes differ: its message names the first key that differs and the file to delete.

    `made` and `again` are words of the message: "DATA was prepared", "prepare it again".
    """
    for key in [*wanted, *(key for key in built if key not in wanted)]:
        was, now = built.get(key), wanted.get(key)
        if was == now:
            continue
        was, now = map(_words, _differing(was, now))
        how = f"with {key} = {was}, now it is {now}"
        if key.startswith("files of "):
            how = f"from {key}, which are not the same now"
        raise ConfigError(f"{made} {how}; set another --config.data.dir, or delete {manifest} to {again}")


def with_newer_settings(
    built: Mapping,
    wanted: Mapping,
    *,
    source: Mapping,
    stages: Mapping[str, Mapping],
    log: Say = print,
) -> dict:
    """Returns the recipe `built`, plus the settings that it lacks and that `wanted` has at their defaults.

    Finished data may be older than a setting, or than its default (`older.CHANGED`).
    """

    def filled(name: str, was: object, now: object, defaults: Mapping) -> object:
        if not isinstance(was, dict) or not isinstance(now, dict):
            return was
        changed = older.CHANGED.get(name, {})
        newer = {k: v for k, v in now.items() if k not in was and k in defaults and defaults[k] == v}
        older_than = {k: v for k, v in now.items() if (was.get(k), v) in changed.get(k, ())}
        for k, v in older_than.items():
            log(
                f"prepared with {name}.{k}={_words(was[k])}, an earlier default, now {_words(v)}: delete {MANIFEST} for that"
            )
        return was | newer | older_than

    recipe = dict(built)
    for key in built.keys() & wanted.keys():
        was, now = built[key], wanted[key]
        kind, _, name = key.partition(" ")
        if key.startswith("stages of ") and isinstance(was, list):
            stages_now = dict(line for line in now if isinstance(line, list))
            recipe[key] = [
                [line[0], filled(line[0], line[1], stages_now.get(line[0]), stages.get(line[0], {}))]
                if isinstance(line, list)
                else line
                for line in was
            ]
        elif kind in ("source", "stage"):
            recipe[key] = filled(name, was, now, source if kind == "source" else stages.get(name, {}))
    return recipe


def _differing(was: object, now: object) -> tuple[object, object]:
    """Returns the parts of two values that differ: keys of settings, stages of a list."""
    if isinstance(was, dict) and isinstance(now, dict):
        was, now = ({k: v for k, v in a.items() if b.get(k) != v} for a, b in ((was, now), (now, was)))
    elif isinstance(was, list) and isinstance(now, list):
        alone = [p for p in was if p not in now], [p for p in now if p not in was]
        was, now = alone if any(alone) else (was, now)  # else only the order differs
        if len(was) == len(now) == 1 and isinstance(was[0], list) and isinstance(now[0], list):
            (name, before), (other, after) = was[0], now[0]
            if name == other:
                before, after = _differing(before, after)
            was, now = [[name, before]], [[other, after]]
    elif isinstance(was or now, dict):  # one is missing: shows what is set in the other
        was, now = ({k: v for k, v in part.items() if v} if isinstance(part, dict) else part for part in (was, now))
    return was, now


def _words(value: object) -> str:
    """Returns a recipe's value as a user would write it: "bands=7", "html, unicode, near"."""
    if isinstance(value, dict):
        return ", ".join(f"{key}={_words(part)}" for key, part in value.items()) or "nothing"
    if isinstance(value, list):  # of stages: a name, or a name with its settings
        alone = len(value) == 1
        parts = (f"{p[0]} {_words(p[1]) if alone else ''}".strip() if isinstance(p, list) else str(p) for p in value)
        return ", ".join(parts) or "nothing"
    return "nothing" if value in (None, "") else str(value)
