"""Gathers what a run's files say, for its report: curves, bill, samples, spikes, starts.

Reads files alone and never fails on one that is absent or cut short, since a report may be asked for at any moment.
"""

import contextlib
import math
import pathlib
import typing

from jaxlm import config as config_lib
from jaxlm.config import ConfigError, config_files
from jaxlm.host.files import MANGLED, is_number, is_step, json_lines, json_of
from jaxlm.plan.flops import count_params
from jaxlm.run import clock, differences, ledger, lineage

# The metrics of the report's curves.
_CURVES = ("step", "tokens", "cost_usd", "train/loss", "train/grad_norm", "train/lr", "tokens_per_second", "mfu_palm")


def gather(folder: pathlib.Path) -> dict[str, typing.Any]:
    """Returns the summary that `report.run.write` takes, of the run in `folder`, without the futures."""
    records, book, origins = lineage.records(folder), ledger.read(folder), lineage.origins(folder)
    config, last, held_out = lineage.config_of(folder), lineage.latest(records), _held_out(records)
    logged = [record for record in records if record.get("train/loss") is not None]
    return {
        "run": _run(folder, records, held_out, book),
        "curves": {name.removeprefix("train/"): [record.get(name) for record in logged] for name in _CURVES},
        "held_out": held_out,
        "figures": lineage.curves(config.program, records) if config else {},
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
    planned = {"model": "", "data": "", "steps": 0, "params": 0, "tokens_per_step": 0}
    with contextlib.suppress(ConfigError, OSError):
        config = config_lib.resolve(config_files.from_run(folder / "config.json"))
        model, train = config.model, config.train
        planned = {
            "model": f"{model.family}, {model.n_layers} layers of d {model.d_model}, "
            f"{train.batch_size} rows of {train.seq_len} tokens a step",
            "data": config.data.dir,
            "steps": train.steps,
            "params": count_params(model),
            "tokens_per_step": train.batch_size * train.seq_len,
        }
    latest, last = lineage.latest(records), records[-1] if records else {}
    trained = [r["train/loss"] for r in records if r.get("train/loss") is not None]
    evaluated = [{"step": step, "loss": loss} for step, loss in held_out.get("", ()) if math.isfinite(loss)]
    ended = (book["starts"][-1].get("ended") or {}) if book["starts"] else {}
    return {
        "name": folder.resolve().name,
        **planned,
        "step": last.get("step", 0),
        "tokens": last.get("tokens") or 0,
        "loss": trained[-1] if trained else None,
        "held_out": evaluated[-1]["loss"] if evaluated else None,
        "best": min(evaluated, key=lambda point: point["loss"], default=None),
        "wall_s": latest.get("wall_s") or 0.0,
        "cost_usd": latest.get("cost_usd") or 0.0,
        "goodput": latest.get("goodput"),
        "ended": ended.get("why", ""),
    }


def _held_out(records: list[dict]) -> dict[str, list[tuple[int, float]]]:
    """Source -> (step, loss) at each evaluation; "" is the mean of all sources."""
    losses: dict[str, list[tuple[int, float]]] = {}
    for record in records:
        for name, loss in record.items():
            if name.startswith("val/") and name.endswith("loss") and isinstance(loss, int | float):
                source = name.removeprefix("val/").removesuffix("loss").rstrip("/")
                losses.setdefault(source, []).append((record["step"], loss))
    return losses


def _samples(folder: pathlib.Path) -> dict[str, list[dict]]:
    """Prompt -> its continuations, by step."""
    texts: dict[str, list[dict]] = {}
    for path in sorted(folder.glob("*.jsonl"), key=lambda path: int(path.stem) if is_step(path.stem) else -1):
        for line in json_lines(path):
            if isinstance(line.get("prompt"), str) and isinstance(line.get("text"), str):
                texts.setdefault(line["prompt"], []).append(line)
    return texts


def _benchmarks(folder: pathlib.Path) -> dict[str, list[dict]]:
    """Task -> its scores, by step. Another program writes these files, so each is taken for what it says."""
    scores: dict[str, list[dict]] = {}
    paths = [path for path in folder.glob("*/results.json") if is_step(path.parent.name)]
    for step, path in sorted((int(path.parent.name), path) for path in paths):
        with contextlib.suppress(OSError, *MANGLED):
            for task, entry in json_of(path.read_text(encoding="utf-8", errors="replace"))["tasks"].items():
                point = {"step": step} | {key: _numbers(entry.get(key)) for key in ("metrics", "stderr")}
                for key in ("chance", "n", "fewshot"):
                    point[key] = entry.get(key) if is_number(entry.get(key)) else None
                scores.setdefault(task, []).append(point)
    return scores


def _numbers(scores: object) -> dict[str, float]:
    return {name: score for name, score in scores.items() if is_number(score)} if isinstance(scores, dict) else {}


def _before(origin: pathlib.Path, last: float) -> dict[str, typing.Any]:
    """What an earlier run scored and wrote, each at its last up to the step `last`, at which it was taken over."""

    def until(lines: list[dict]) -> list[dict]:
        return [line for line in lines if is_number(line.get("step")) and line["step"] <= last]

    points = {task: until(points)[-1:] for task, points in _benchmarks(origin / "eval").items()}
    texts = {prompt: until(lines) for prompt, lines in _samples(origin / "samples").items()}
    return {
        "name": origin.resolve().name,
        "benchmarks": {task: point for task, point in points.items() if point},
        "samples": {prompt: lines for prompt, lines in texts.items() if lines},
    }


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
