"""Gathers what a run's files say, for its report: curves, bill, samples, spikes, starts.

Reads files alone and never fails on one that is absent or cut short, since a report may be asked for at any moment.
"""

import contextlib
import math
import pathlib
import typing

from jaxlm import config as config_lib
from jaxlm import config_files
from jaxlm.config import ConfigError
from jaxlm.files import MANGLED, is_number, is_step, json_lines, json_of
from jaxlm.plan.params import count_params
from jaxlm.train import clock, differences, ledger, lineage

# Column of the report -> metric in metrics.jsonl.
_COLUMNS = {
    "step": "step",
    "tokens": "tokens",
    "cost_usd": "cost_usd",
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "lr": "train/lr",
    "tokens_per_second": "tokens_per_second",
    "mfu_palm": "mfu_palm",
}


def gather(folder: pathlib.Path) -> dict[str, typing.Any]:
    """Returns the summary that `report.run.write` takes, of the run in `folder`, without the futures."""
    records = lineage.records(folder)
    book = ledger.read(folder)
    held_out = _held_out(records)
    last = lineage.latest(records)
    origins = lineage.origins(folder)
    return {
        "run": _run(folder, records, held_out, book),
        "curves": _curves(records),
        "held_out": held_out,
        "figures": _figures(folder, records),
        "activities": {name: last.get(f"time/{name}_s", 0.0) for name in clock.ACTIVITIES},
        "phases": book["phases"],
        "benchmarks": _benchmarks(folder / "eval"),
        "before": [_before(*origin) for origin in origins],
        "stages": lineage.stages(origins, folder),
        "samples": _samples(folder / "samples"),
        "spikes": json_lines(folder / "spikes.jsonl"),
        "rollbacks": book["rollbacks"],
        "starts": [_start(start) for start in book["starts"]],
    }


def _run(folder: pathlib.Path, records: list[dict], held_out: dict, book: dict) -> dict[str, typing.Any]:
    shape, steps, data, params, row_tokens = "", 0, "", 0, 0
    with contextlib.suppress(ConfigError, OSError):
        config = config_lib.resolve(config_files.from_run(folder / "config.json"))
        model, train, steps, data = config.model, config.train, config.train.steps, config.data.dir
        shape = f"{model.family}, {model.n_layers} layers of d {model.d_model}, "
        params, row_tokens = count_params(model), train.batch_size * train.seq_len
        shape += f"{train.batch_size} rows of {train.seq_len} tokens a step"
    last = lineage.latest(records)
    trained = [r["train/loss"] for r in records if r.get("train/loss") is not None]
    evaluated = [(step, loss) for step, loss in held_out.get("", ()) if math.isfinite(loss)]
    ended = (book["starts"][-1].get("ended") or {}) if book["starts"] else {}
    return {
        "name": folder.resolve().name,
        "model": shape,
        "data": data,
        "step": records[-1]["step"] if records else 0,
        "steps": steps,
        "params": params,
        "tokens_per_step": row_tokens,
        "tokens": (records[-1].get("tokens") or 0) if records else 0,
        "loss": trained[-1] if trained else None,
        "held_out": evaluated[-1][1] if evaluated else None,
        "best": min(({"step": step, "loss": loss} for step, loss in evaluated), key=lambda b: b["loss"], default=None),
        "wall_s": last.get("wall_s") or 0.0,
        "cost_usd": last.get("cost_usd") or 0.0,
        "goodput": last.get("goodput"),
        "ended": ended.get("why", ""),
    }


def _figures(folder: pathlib.Path, records: list[dict]) -> dict[str, list[tuple[int, float]]]:
    with contextlib.suppress(ConfigError, OSError, AttributeError):
        return lineage.curves(config_files.from_run(folder / "config.json").program, records)
    return {}


def _curves(records: list[dict]) -> dict[str, list]:
    logged = [record for record in records if record.get("train/loss") is not None]
    return {column: [record.get(name) for record in logged] for column, name in _COLUMNS.items()}


def _held_out(records: list[dict]) -> dict[str, list[tuple[int, float]]]:
    """Source -> (step, loss) at each evaluation; "" is the mean of all sources."""
    found: dict[str, list[tuple[int, float]]] = {}
    for record in records:
        for name, value in record.items():
            if name.startswith("val/") and name.endswith("loss") and isinstance(value, int | float):
                found.setdefault(name[4:].removesuffix("loss").rstrip("/"), []).append((record["step"], value))
    return found


def _samples(folder: pathlib.Path) -> dict[str, list[dict]]:
    """Prompt -> its continuations, by step."""
    found: dict[str, list[dict]] = {}
    for path in sorted(folder.glob("*.jsonl"), key=lambda path: int(path.stem) if is_step(path.stem) else -1):
        for line in json_lines(path):
            if isinstance(line.get("prompt"), str) and isinstance(line.get("text"), str):
                found.setdefault(line["prompt"], []).append(line)
    return found


def _benchmarks(folder: pathlib.Path) -> dict[str, list[dict]]:
    """Task -> its scores, by step. Another program writes these files, so each is taken for what it says."""
    found: dict[str, list[dict]] = {}
    places = (path for path in folder.glob("*/results.json") if is_step(path.parent.name))
    for path in sorted(places, key=lambda path: int(path.parent.name)):
        with contextlib.suppress(OSError, *MANGLED):
            for task, entry in json_of(path.read_text(encoding="utf-8", errors="replace"))["tasks"].items():
                scores = {key: _numbers(entry.get(key)) for key in ("metrics", "stderr")}
                more = {
                    key: entry.get(key) if is_number(entry.get(key)) else None for key in ("chance", "n", "fewshot")
                }
                found.setdefault(task, []).append({"step": int(path.parent.name)} | scores | more)
    return found


def _before(origin: pathlib.Path, last: float) -> dict[str, typing.Any]:
    """What an earlier run scored and wrote, each at its last up to the step `last`, at which it was taken over."""
    kept = {
        task: [point for point in points if point["step"] <= last][-1:]
        for task, points in _benchmarks(origin / "eval").items()
    }
    written = {
        prompt: [line for line in lines if is_number(line.get("step")) and line["step"] <= last]
        for prompt, lines in _samples(origin / "samples").items()
    }
    return {
        "name": origin.resolve().name,
        "benchmarks": {task: points for task, points in kept.items() if points},
        "samples": {prompt: lines for prompt, lines in written.items() if lines},
    }


def _numbers(found: object) -> dict[str, float]:
    pairs = found.items() if isinstance(found, dict) else ()
    return {name: value for name, value in pairs if is_number(value) and math.isfinite(value)}


def _start(start: dict) -> dict[str, typing.Any]:
    hardware, git, ended = start.get("hardware") or {}, start.get("git") or {}, start.get("ended") or {}
    return {
        "time": start.get("time", ""),
        "step": start.get("step", 0),
        "usd_per_hour": start.get("usd_per_hour", 0.0),
        "device": hardware.get("device_kind", "?"),
        "devices": hardware.get("devices", "?"),
        "commit": git.get("commit", ""),
        "dirty": git.get("dirty", False),
        "changed": differences.words(start.get("changed") or []),
        "ended": f"{ended.get('code', '')} {ended.get('why', '')}".strip(),
    }
