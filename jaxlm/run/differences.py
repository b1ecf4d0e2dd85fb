"""Compares two runs, or two starts of a run: their different inputs, and the first step at which metrics differ."""

import json
import math
import os
import pathlib
import platform
from collections.abc import Mapping, Sequence

import numpy as np

from jaxlm.config import Config, ConfigError, older, to_json
from jaxlm.host import files
from jaxlm.host.redact import redact
from jaxlm.run import held_out_texts, ledger, metrics

_HERE = ("workdir", "data.dir")  # keys that only say where a run is
MOST_TOLD = 12  # changes in a line
_DIGITS = 9  # of a commit, enough to identify it
_NO_NEWS = ("log.", "tune.", "distributed.")  # sections that change neither the training nor its price
_BLOCKS = 10  # of steps, over which two losses are compared

Curve = Mapping[int, dict]  # step -> metrics


def compare(a: pathlib.Path, b: pathlib.Path) -> dict:
    """Returns the differences of two runs as plain values, with a `verdict` of one line. Raises ConfigError.

    `parted` is the first step at which a metric of training or evaluation differs, None if all are equal to the last bit.
    `held_out` is a line if their held-out texts differ; then no `val/` metric counts. `loss` has the mean of loss B - loss A
    over the last half of the common steps, and its standard error by blocks of steps (Flyvbjerg and Petersen 1989); it is
    None below 19 common steps with a loss. `last_held_out` has the last held-out loss of each run, None if it has none.
    """
    paths = [folder / "metrics.jsonl" for folder in (a, b)]
    if absent := [path.parent for path in paths if not path.is_file()]:
        why = "it has no metrics.jsonl" if absent[0].is_dir() else "there is no such folder"
        raise ConfigError(f"no run in {absent[0]}: {why}")
    curves = [metrics.read(path, ledger.read(path.parent)["rollbacks"]) for path in paths]
    common = sorted(curves[0].keys() & curves[1].keys())
    if not common:
        raise ConfigError(f"{a} and {b} have no step in common: nothing to compare")
    then = f", of both, then jaxlm compare {a} {b}"
    line = held_out_texts.differ(held_out_texts.of_run(a), held_out_texts.of_run(b), then)
    parted = _parted(*curves, common, ("train/", "eval/") if line else ("train/", "val/", "eval/"))
    loss = _loss(*curves, common)
    return {
        "inputs": [
            {"what": row["what"], "name": row["name"], "a": row["values"][0], "b": row["values"][1]}
            for row in of_runs((a, b))
        ],
        "steps": sum(map(bool, common)),  # step 0, which only evaluations have, is none
        "held_out": line,
        "parted": parted,
        "loss": loss,
        "verdict": _verdict(parted, loss, common),
        "last_held_out": [_last_held_out(curve) for curve in curves],
    }


def _last_held_out(curve: Curve) -> float | None:
    losses = (curve[step].get(metrics.HELD_OUT) for step in sorted(curve, reverse=True))
    return next(filter(files.is_number, losses), None)


def _of_run(folder: pathlib.Path) -> dict[str, dict]:
    try:
        config = files.json_of((folder / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder} is no run: {folder / 'config.json'}: {error}") from None
    return _facts(config, (ledger.read(folder)["starts"] or [{}])[-1])


def _facts(config: dict, start: dict) -> dict[str, dict]:
    """Returns a start's inputs, kind -> name -> value, without secrets and keys that only say where the run is."""
    hardware = start.get("hardware") or {}
    return {
        "config": {name: key for name, key in _flat(redact(older.known(config))).items() if name not in _HERE},
        "code": start.get("git") or {},
        "data": {"manifest": start.get("manifest_sha256")},
        "packages": (start.get("packages") or {}) | {"python": start.get("python")},
        "hardware": {name: fact for name, fact in hardware.items() if name not in ("host", "boot_id")},
        "choices": start.get("choices") or {},
        "price": {"usd_per_hour": start.get("usd_per_hour")},
    }


def _flat(section: dict, prefix: str = "") -> dict:
    flat: dict = {}
    for key, inner in section.items():
        flat |= _flat(inner, f"{prefix}{key}.") if isinstance(inner, dict) else {f"{prefix}{key}": inner}
    return flat


def of_runs(folders: Sequence[pathlib.Path]) -> list[dict]:
    """Returns the inputs that are not the same in all runs: rows of `what`, `name` and the `values`, one for each run."""
    facts, rows = [_of_run(folder) for folder in folders], []
    for what in facts[0]:
        for name in sorted(set().union(*(each[what] for each in facts))):
            values = [each[what].get(name) for each in facts]
            if any(value != values[0] for value in values):
                rows.append({"what": what, "name": name, "values": values})
    return rows


def since_last_start(folder: pathlib.Path, config: Config, new: dict) -> list[dict]:
    """Returns the inputs changed since the last recorded start, rows of `name`, `was`, `is`; [] without a readable start."""
    starts, before = ledger.read(folder)["starts"], files.json_there(folder / "config.json")
    if not starts or not before:
        return []
    start = {"git": ledger.git(), "packages": ledger.packages(), "python": platform.python_version()} | new
    was, now = _facts(before, starts[-1]), _facts(json.loads(to_json(config)), start)
    changed: list[dict] = []
    for what in ("config", "code", "packages", "hardware", "choices"):
        keys = {row["name"].rpartition(".")[2] for row in changed}  # a choice that follows from a key
        for name, fact in was[what].items():
            news = name not in keys and name != "dirty" and not name.startswith(_NO_NEWS)
            if news and name in now[what] and not _same(fact, now[what][name]):
                key = f"{what}.{name}" if what in ("hardware", "code") else name
                changed.append({"name": key, "was": fact, "is": now[what][name]})
    return changed


def _same(was: object, now: object) -> bool:
    """True if two facts are equal, or a relative and an absolute name of one local path."""
    paths = isinstance(was, str) and isinstance(now, str) and any(map(os.path.isabs, (was, now)))
    return was == now or (paths and os.path.abspath(was) == os.path.abspath(now))


def words(changed: list[dict]) -> list[str]:
    """Returns the rows of `since_last_start` as lines for the user: "optim.lr was 0.0003, is 0.0001"."""
    lines = []
    for row in changed[:MOST_TOLD]:
        was, now = (_shown(row[key])[: _DIGITS if row["name"] == "code.commit" else None] for key in ("was", "is"))
        lines.append(f"{row['name']} was {was}, is {now}")
    rest = len(changed) - len(lines)
    return lines + [f"{rest} more, in run.json"] * bool(rest)


def _shown(fact: object) -> str:
    if isinstance(fact, dict):
        return ", ".join(f"{name} {part}" for name, part in fact.items())
    if isinstance(fact, float):
        return f"{fact:g}"
    text = str(fact) if fact not in ("", [], None) else "none"
    return f"{text[:57]}..." if len(text) > 60 else text


def _parted(a: Curve, b: Curve, common: list[int], kinds: tuple[str, ...]) -> dict | None:
    for step in common:
        names = [name for name in a[step].keys() & b[step].keys() if name.startswith(kinds)]
        parted = [name for name in names if a[step][name] != b[step][name]]
        if parted:
            name = min(parted, key=lambda name: (name != "train/loss", name))  # the loss first: it says most
            return {"step": step, "metric": name, "a": a[step][name], "b": b[step][name]}
    return None


def _loss(a: Curve, b: Curve, common: list[int]) -> dict | None:
    pairs = [(a[step].get("train/loss"), b[step].get("train/loss")) for step in common]
    gaps = [y - x for x, y in pairs if files.is_number(x) and files.is_number(y)]
    gaps = gaps[len(gaps) // 2 :]
    if len(gaps) < _BLOCKS:
        return None
    means = [float(np.mean(block)) for block in np.array_split(np.asarray(gaps), _BLOCKS)]
    error = float(np.std(means, ddof=1) / math.sqrt(_BLOCKS))
    return {"mean": float(np.mean(gaps)), "error": error, "steps": len(gaps)}


def _verdict(parted: dict | None, loss: dict | None, common: list[int]) -> str:
    if not parted:
        return f"identical to the last bit over all {sum(map(bool, common))} common steps, up to step {common[-1]}"
    line = f"{parted['metric']} first differs at step {parted['step']}: {parted['a']!r} and {parted['b']!r}"
    if not loss:
        return line
    gap = f"loss B - loss A is {loss['mean']:+.4f} ± {loss['error']:.4f} over the last {loss['steps']} common logged steps"
    inside = abs(loss["mean"]) <= 2 * loss["error"] or abs(loss["mean"]) < 1e-4
    return f"{line}; {gap}: " + ("within the noise of batches and seeds" if inside else "more than noise")
