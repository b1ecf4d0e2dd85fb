"""Follows a run back to the runs that it was made from, and tells what each of them took.

Reads files alone, and leaves out what is absent or cut short.
"""

import contextlib
import math
import pathlib
import typing
from collections.abc import Sequence

from jaxlm import config_files
from jaxlm.config import ConfigError
from jaxlm.files import MANGLED, is_number, json_of
from jaxlm.train import held_out_texts, ledger, metrics

PREPARE = "prepare"  # the "program" of the row that tells of the data
_LOSS = (("val/loss", "held-out loss"), ("train/loss", "training loss"))
_RANKED = (("val/accuracy", "held-out pairs ranked right"), ("train/accuracy", "pairs ranked right"))
_REWARD = (("val/reward", "held-out reward"), ("train/reward", "reward"))
# The figure that a kind of training is about: the first of these that was measured.
_FIGURES = {"dpo": _RANKED, "reward": _RANKED, "ppo": _REWARD, "grpo": _REWARD}
_COMMANDS = ("train", "-m", "jaxlm.main")  # words of a command line in front of the config's name


class Origin(typing.NamedTuple):
    """A run, or a model from elsewhere, that another run began with; `last`: its step then, as far as the config says it."""

    folder: pathlib.Path
    last: float


def records(folder: pathlib.Path) -> list[dict]:
    """Returns the merged records of a run's metrics.jsonl, by step; none if it can't be read."""
    with contextlib.suppress(OSError):
        return [record for _, record in sorted(metrics.read(folder / "metrics.jsonl").items())]
    return []


def latest(found: Sequence[dict]) -> dict:
    """Returns the record that was written last, with the clocks of the whole run; after a rollback not the last step's."""
    return max(found, key=lambda record: record.get("wall_s") or 0.0, default={})


def origins(folder: pathlib.Path) -> list[Origin]:
    """Returns what the run in `folder` was made from, first to last."""
    found, seen = [], {folder.resolve()}
    while True:
        try:
            config = config_files.from_run(folder / "config.json")
            origin, taken = pathlib.Path(config.origin), config.origin_checkpoint
        except (ConfigError, OSError, AttributeError):
            return found[::-1]
        if not config.origin or origin.resolve() in seen:
            return found[::-1]
        seen.add(origin.resolve())
        found.append(Origin(origin, int(taken) if taken.isdecimal() else math.inf))
        folder = origin


def stages(before: Sequence[Origin], folder: pathlib.Path) -> list[dict[str, typing.Any]]:
    """Returns a row for each stage that made the run in `folder`, first to last: its data, the runs before, itself.

    Each has name, program, config, phases (their names), steps, tokens, wall_s, cost_usd, figure, begin, end. What is not
    known is None or "". There are none if nothing was before the run. `held_out` is a line where a run and the one before it
    measure different held-out texts.
    """
    if not before:
        return []
    runs = [_run(*origin) for origin in before] + [_run(folder, math.inf)]
    texts = [held_out_texts.of_run(place) for place in (*(origin.folder for origin in before), folder)]
    for row, was, now in zip(runs[1:], texts, texts[1:], strict=False):
        row["held_out"] = held_out_texts.differ(was, now, ", of each")
    return [*_data(before[0].folder), *runs]


def commands(folder: pathlib.Path, usd_per_hour: float) -> list[dict[str, typing.Any]]:
    """Returns a row for each command of a script: name, wall_s, cost_usd. The files of a folder hold their seconds.

    Raises:
      ConfigError: there is no such folder, or a file in it holds no number.
    """
    if not folder.is_dir():
        raise ConfigError(
            f"--took={folder}: there is no such folder; it has a file NAME with the seconds of each command"
        )
    rows = []
    for file in sorted(file for file in folder.iterdir() if file.is_file() and not file.name.startswith(".")):
        try:
            seconds = float(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            seconds = math.nan
        if not 0 <= seconds < math.inf:
            raise ConfigError(f"{file}: it should hold a number of seconds, and nothing else")
        rows.append({"name": file.name, "wall_s": seconds, "cost_usd": seconds / 3600 * usd_per_hour})
    return rows


def _run(folder: pathlib.Path, last: float) -> dict[str, typing.Any]:
    """The row of a run, up to its step `last`."""
    found = [record for record in records(folder) if record["step"] <= last]
    book, now = ledger.read(folder), latest(found)
    program, a_step = "", 0
    with contextlib.suppress(ConfigError, OSError, AttributeError):
        config = config_files.from_run(folder / "config.json")
        program, a_step = config.program, config.train.batch_size * config.train.seq_len
    first = book["starts"][0] if book["starts"] else {}
    # A branch begins with its origin's steps.
    steps = max(0, found[-1]["step"] - first.get("step", 0)) if found else None
    phases = [row["phase"] for row in book["phases"] if row.get("phase") and row.get("last_step", 0) <= last]
    return {
        "name": folder.resolve().name,
        "program": program,
        "config": _config_name(first.get("command")),
        "phases": list(dict.fromkeys(phases)),
        "steps": steps,
        "tokens": None if steps is None else steps * a_step,
        "wall_s": now.get("wall_s"),
        "cost_usd": now.get("cost_usd"),
    } | _figure(program, found)


def curves(program: str, found: Sequence[dict]) -> dict[str, list[tuple[int, float]]]:
    """Returns what a kind of training is about, if that is not a loss: words -> (step, value), the held-out figure first."""
    return {words: _points(found, metric) for metric, words in _FIGURES.get(program, ())}


def _figure(program: str, found: Sequence[dict]) -> dict[str, typing.Any]:
    """What a kind of training is about, at the start and at the end; "begin" is None if it was measured once."""
    for metric, words in _FIGURES.get(program, _LOSS):
        if values := [value for _, value in _points(found, metric)]:
            return {"figure": words, "begin": values[0] if len(values) > 1 else None, "end": values[-1]}
    return {"figure": "", "begin": None, "end": None}


def _points(found: Sequence[dict], metric: str) -> list[tuple[int, float]]:
    return [(r["step"], r[metric]) for r in found if is_number(r.get(metric)) and math.isfinite(r[metric])]


def _config_name(command: object) -> str:
    """The config that a command line names: "sft" of `jaxlm train sft ...`; "" if it names none."""
    words = [word for word in command or () if isinstance(word, str)] if isinstance(command, list) else []
    named = [word.partition("=")[2] for word in words if word.startswith("--config=")]
    values = {i + 1 for i, word in enumerate(words) if word.startswith("--") and "=" not in word}
    plain = [w for i, w in enumerate(words) if i and i not in values and not w.startswith("-") and w not in _COMMANDS]
    return pathlib.PurePath((named or plain or [""])[0]).stem


def _data(folder: pathlib.Path) -> list[dict[str, typing.Any]]:
    """The row of the prepared data of the run in `folder`, if it has such: in documents, read -> kept.

    Data in the run's own folder was made by the run, whose time holds its seconds.
    """
    try:
        config = config_files.from_run(folder / "config.json")
        if config.origin or config.program != "pretrain":
            return []
        place = pathlib.Path(config.data.dir or folder / "data")
        sources = json_of((place / "prepared.json").read_bytes())["sources"].values()
        read, kept = (sum(int(source[key]["documents"]) for source in sources) for key in ("read", "kept"))
        seconds = None
        if folder.resolve() not in place.resolve().parents:
            timings = json_of((place / "timings.json").read_bytes())
            seconds = float(sum(sum(stages.values()) for stages in timings.values()))
    except (OSError, *MANGLED):
        return []
    row = {"name": place.resolve().name, "program": PREPARE, "config": "", "phases": [], "steps": None, "tokens": None}
    return [row | {"wall_s": seconds, "cost_usd": None, "figure": "documents", "begin": read, "end": kept}]
