"""Follows a run back to its origins, and reads the steps, time, cost and main figure of each from their files."""

import contextlib
import math
import pathlib
import typing
from collections.abc import Iterable, Sequence

from ml_collections import config_dict

from jaxlm.config import ConfigError, config_files
from jaxlm.host.files import MANGLED, is_number, json_of
from jaxlm.run import held_out_texts, ledger, metrics

PREPARE = "prepare"  # the "program" of the row for the data
_LOSS = (("val/loss", "held-out loss"), ("train/loss", "training loss"))
_RANKED = (("val/accuracy", "held-out pairs ranked right"), ("train/accuracy", "pairs ranked right"))
_REWARD = (("val/reward", "held-out reward"), ("train/reward", "reward"))
# The main figure of a kind of training: the first of these that was measured.
_FIGURES = {"dpo": _RANKED, "reward": _RANKED, "ppo": _REWARD, "grpo": _REWARD}
_COMMANDS = ("train", "-m", "jaxlm.main")  # words of a command line before the config's name


class Origin(typing.NamedTuple):
    """A run, or a model from elsewhere, from whose step `last` another run began; `last` is infinite if unknown."""

    folder: pathlib.Path
    last: float


def records(folder: pathlib.Path) -> list[dict]:
    """Returns the merged records of a run's metrics.jsonl, by step; [] if the file can't be read."""
    with contextlib.suppress(OSError):
        return [record for _, record in sorted(metrics.read(folder / "metrics.jsonl").items())]
    return []


def latest(records: Iterable[dict]) -> dict:
    """Returns the record with the largest `wall_s`, {} without records. After a rollback its step may not be the highest."""
    return max(records, key=lambda record: record.get("wall_s") or 0.0, default={})


def config_of(folder: pathlib.Path) -> config_dict.ConfigDict | None:
    with contextlib.suppress(ConfigError, OSError):
        config = config_files.from_run(folder / "config.json")
        return config if isinstance(config.train, config_dict.ConfigDict) else None
    return None


def origins(folder: pathlib.Path) -> list[Origin]:
    """Returns the origins of the run in `folder`, first to last."""
    origins, seen = [], {folder.resolve()}
    while (config := config_of(folder)) and config.origin:
        folder, step = pathlib.Path(config.origin), str(config.origin_checkpoint)
        if folder.resolve() in seen:
            break
        seen.add(folder.resolve())
        origins.append(Origin(folder, int(step) if step.isdecimal() else math.inf))
    return origins[::-1]


def stages(before: Sequence[Origin], folder: pathlib.Path) -> list[dict]:
    """Returns a row for each stage that made the run in `folder`, first to last: the data, the earlier runs, the run itself.

    `held_out` is a line if a row's run and the previous run measure different held-out texts. [] if the run has no origin.
    """
    if not before:
        return []
    runs = [*before, Origin(folder, math.inf)]
    rows, texts = [_run(*run) for run in runs], [held_out_texts.of_run(run.folder) for run in runs]
    for row, was, now in zip(rows[1:], texts, texts[1:], strict=False):
        row["held_out"] = held_out_texts.differ(was, now, ", of each")
    return [*_data(before[0].folder), *rows]


def commands(folder: pathlib.Path, usd_per_hour: float) -> list[dict]:
    """Returns a row (name, seconds, dollars) for each file in `folder`, which holds a command's seconds. Raises ConfigError."""
    if not folder.is_dir():
        what = "there is no such folder; it should have a file NAME with the seconds of each command"
        raise ConfigError(f"--took={folder}: {what}")
    rows = []
    for file in sorted(file for file in folder.iterdir() if file.is_file() and not file.name.startswith(".")):
        seconds = math.nan
        with contextlib.suppress(OSError, ValueError):
            seconds = float(file.read_text(encoding="utf-8"))
        if not 0 <= seconds < math.inf:
            raise ConfigError(f"{file}: it should hold a number of seconds, and nothing else")
        rows.append({"name": file.name, "wall_s": seconds, "cost_usd": seconds / 3600 * usd_per_hour})
    return rows


def curves(program: str, records: Sequence[dict]) -> dict[str, list[tuple[int, float]]]:
    """Returns words -> [(step, value)] of a kind of training's main figures, held-out first; {} if these are losses."""
    return {words: points(records, metric) for metric, words in _FIGURES.get(program, ())}


def _row(folder: pathlib.Path, program: str, **known: typing.Any) -> dict:
    unknown = dict.fromkeys(("steps", "tokens", "wall_s", "cost_usd"))
    return {"name": folder.resolve().name, "program": program, "config": "", "phases": []} | unknown | known


def _run(folder: pathlib.Path, last: float) -> dict:
    done = [record for record in records(folder) if record["step"] <= last]
    book, now, config = ledger.read(folder), latest(done), config_of(folder)
    first = book["starts"][0] if book["starts"] else {}
    known = {"wall_s": now.get("wall_s"), "cost_usd": now.get("cost_usd"), "config": _config_name(first.get("command"))}
    if done:
        steps = max(0, done[-1]["step"] - first.get("step", 0))  # a branch begins with its origin's steps
        known |= {"steps": steps, "tokens": steps * config.train.batch_size * config.train.seq_len if config else 0}
    phases = [row["phase"] for row in book["phases"] if row.get("phase") and row.get("last_step", 0) <= last]
    program = config.program if config else ""
    return _row(folder, program, **known, phases=list(dict.fromkeys(phases)), **_figure(program, done))


def _figure(program: str, records: Sequence[dict]) -> dict:
    """Returns the main figure of a kind of training, at the start and at the end; "begin" is None if it was measured once."""
    for metric, words in _FIGURES.get(program, _LOSS):
        if figures := [figure for _, figure in points(records, metric)]:
            return {"figure": words, "begin": figures[0] if len(figures) > 1 else None, "end": figures[-1]}
    return {"figure": "", "begin": None, "end": None}


def points(records: Sequence[dict], metric: str) -> list[tuple[int, float]]:
    """Returns (step, value) of each record that has the metric."""
    return [(r["step"], r[metric]) for r in records if is_number(r.get(metric))]


def _config_name(command: object) -> str:
    """Returns the config that a command line names: "sft" of `jaxlm train sft ...`; "" if it names none."""
    words = [word for word in command if isinstance(word, str)] if isinstance(command, list) else []
    named = [word.removeprefix("--config=") for word in words if word.startswith("--config=")]
    values = {i + 1 for i, word in enumerate(words) if word.startswith("--") and "=" not in word}
    plain = [w for i, w in enumerate(words) if i and i not in values and not w.startswith("-") and w not in _COMMANDS]
    return pathlib.PurePath([*named, *plain, ""][0]).stem


def _data(folder: pathlib.Path) -> list[dict]:
    """Returns a list with one row for the run's prepared data, with documents read and kept; [] without prepared data."""
    config = config_of(folder)
    if not config or config.origin or config.program != "pretrain":
        return []
    place, seconds = pathlib.Path(config.data.dir or folder / "data"), None
    try:
        sources = json_of((place / "prepared.json").read_bytes())["sources"].values()
        read, kept = (sum(int(source[key]["documents"]) for source in sources) for key in ("read", "kept"))
        if folder.resolve() not in place.resolve().parents:  # else the run made it, and its time includes these seconds
            timings = json_of((place / "timings.json").read_bytes())
            seconds = float(sum(sum(stages.values()) for stages in timings.values()))
    except (OSError, *MANGLED):
        return []
    return [_row(place, PREPARE, wall_s=seconds, figure="documents", begin=read, end=kept)]
