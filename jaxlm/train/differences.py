"""Compares two runs, or two starts of a run: what went in differently, and the first step at which metrics part."""

import json
import math
import pathlib
import platform
import typing
from collections.abc import Mapping

import numpy as np

from jaxlm import files
from jaxlm.config import Config, ConfigError, older, to_json
from jaxlm.redact import redact
from jaxlm.train import held_out_texts, ledger, metrics

_HERE = ("workdir", "data.dir")  # keys that only say where a run lies
MOST_TOLD = 12  # changes in a line
_COMMIT = "code.commit"
_DIGITS = 9  # of a commit, that tell it from all others
_NO_NEWS = ("log.", "tune.", "distributed.")  # sections that change neither the training nor its price
_BLOCKS = 10  # of the steps that two losses are compared over


def compare(a: pathlib.Path, b: pathlib.Path) -> dict[str, typing.Any]:
    """Returns the differences of two runs.

    Returns:
      inputs: [{what, name, a, b}, ...], what is one of "config", "code", "data", "packages", "hardware", "price".
      steps: how many steps both have logged.
      parted: {step, metric, a, b} at the first step at which a metric of training or evaluation differs; None if all are
        equal to the last bit.
      held_out: a line if their held-out texts differ, "" else; then no `val/` metric counts as parted.
      loss: {mean, error, steps}: the mean of loss B - loss A over the last half of the common steps, and its standard
        error by blocks of steps (Flyvbjerg and Petersen 1989); None with fewer than 20 common steps.
      verdict: one line.

    Raises:
      ConfigError: one of the folders is no run, or the runs have no step in common.
    """
    curves = [_curve(folder) for folder in (a, b)]
    common = sorted(curves[0].keys() & curves[1].keys())
    if not common:
        raise ConfigError(f"{a} and {b} have no step in common: nothing to compare")
    then = f", of both, then jaxlm compare {a} {b}"
    line = held_out_texts.differ(held_out_texts.of_run(a), held_out_texts.of_run(b), then)
    found = {
        "inputs": _inputs(a, b),
        "steps": len(common),
        "held_out": line,
        "parted": _parted(*curves, common, ("train/", "eval/") if line else ("train/", "val/", "eval/")),
        "loss": _loss(*curves, common),
    }
    return found | {"verdict": _verdict(found, common)}


def _curve(folder: pathlib.Path) -> dict[int, dict]:
    if not (folder / "metrics.jsonl").is_file():
        raise ConfigError(f"no run in {folder}: it has no metrics.jsonl")
    return metrics.read(folder / "metrics.jsonl")


def _inputs(a: pathlib.Path, b: pathlib.Path) -> list[dict]:
    rows = []
    for what, left, right in _facts(a, b):
        for name in sorted(left.keys() | right.keys()):
            if left.get(name) != right.get(name):
                rows.append({"what": what, "name": name, "a": left.get(name), "b": right.get(name)})
    return rows


def _facts(a: pathlib.Path, b: pathlib.Path) -> list[tuple[str, dict, dict]]:
    """(what, facts of a, facts of b). What a start records is that of the last start."""
    configs, starts = [], []
    for folder in (a, b):
        try:
            config = files.json_of((folder / "config.json").read_bytes())
        except (OSError, ValueError) as error:
            raise ConfigError(f"{folder} is no run: {folder / 'config.json'}: {error}") from None
        configs.append(_keys(config))
        starts.append((ledger.read(folder)["starts"] or [{}])[-1])
    return [("config", *configs), *_recorded(*starts)]


def _keys(config: dict) -> dict[str, typing.Any]:
    """The keys of a config that say how a run goes, without secrets."""
    return {name: value for name, value in _flat(redact(older.known(config))).items() if name not in _HERE}


def _recorded(a: dict, b: dict) -> list[tuple[str, dict, dict]]:
    """(what, facts of start a, facts of start b)."""
    keys = {
        "code": lambda s: s.get("git") or {},
        "data": lambda s: {"manifest": s.get("manifest_sha256")},
        "packages": lambda s: (s.get("packages") or {}) | {"python": s.get("python")},
        "hardware": lambda s: {k: v for k, v in (s.get("hardware") or {}).items() if k not in ("host", "boot_id")},
        "choices": lambda s: s.get("choices") or {},
        "price": lambda s: {"usd_per_hour": s.get("usd_per_hour")},
    }
    return [(what, get(a), get(b)) for what, get in keys.items()]


def since_last_start(folder: pathlib.Path, config: Config, found: dict) -> list[dict]:
    """Returns what changed since the run's last start, [{name, was, is}, ...]; [] if there was none, or its files are damaged.

    Call it before the new start is recorded.

    Args:
      config: the config of the new start, with "auto" as the user left it.
      found: what else the new start records: hardware, choices.
    """
    starts, before = ledger.read(folder)["starts"], files.json_there(folder / "config.json")
    if not starts or not before:
        return []
    now = {"git": ledger.git(), "packages": ledger.packages(), "python": platform.python_version()} | found
    was, new = _keys(before), _keys(json.loads(to_json(config)))
    facts = [("", {name: value for name, value in was.items() if not name.startswith(_NO_NEWS)}, new)]
    facts += [(what, *pair) for what, *pair in _recorded(starts[-1], now) if what not in ("data", "price")]
    changed: dict[str, dict] = {}
    for what, old, new in facts:
        told = {name.rpartition(".")[2] for name in changed}  # a choice that follows from a key
        for name in [name for name in old if name in new]:
            if old[name] != new[name] and name not in told and name != "dirty":
                key = f"{what}.{name}" if what in ("hardware", "code") else name
                changed[key] = {"name": key, "was": old[name], "is": new[name]}
    return list(changed.values())


def words(changed: list[dict]) -> list[str]:
    """Returns what `since_last_start` found, for the user: "optim.lr was 0.0003, is 0.0001"."""
    found = []
    for row in changed[:MOST_TOLD]:
        was, now = (_shown(row[key])[: _DIGITS if row["name"] == _COMMIT else None] for key in ("was", "is"))
        found.append(f"{row['name']} was {was}, is {now}")
    rest = len(changed) - len(found)
    return found + [f"{rest} more, in run.json"] * bool(rest)


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {part}" for name, part in value.items())
    if isinstance(value, float):
        return f"{value:g}"
    text = str(value) if value not in ("", [], None) else "none"
    return f"{text[:57]}..." if len(text) > 60 else text


def _flat(value: dict, prefix: str = "") -> dict[str, typing.Any]:
    found: dict[str, typing.Any] = {}
    for key, inner in value.items():
        found |= _flat(inner, f"{prefix}{key}.") if isinstance(inner, dict) else {f"{prefix}{key}": inner}
    return found


def _parted(a: Mapping[int, dict], b: Mapping[int, dict], common: list[int], kinds: tuple[str, ...]) -> dict | None:
    for step in common:
        names = sorted(name for name in a[step].keys() & b[step].keys() if name.startswith(kinds))
        names.sort(key=lambda name: name != "train/loss")  # of several the loss says most
        for name in names:
            if a[step][name] != b[step][name]:
                return {"step": step, "metric": name, "a": a[step][name], "b": b[step][name]}
    return None


def _loss(a: Mapping[int, dict], b: Mapping[int, dict], common: list[int]) -> dict | None:
    pairs = [(a[step].get("train/loss"), b[step].get("train/loss")) for step in common]
    gaps = [y - x for x, y in pairs if x is not None and y is not None and math.isfinite(x) and math.isfinite(y)]
    gaps = gaps[len(gaps) // 2 :]
    if len(gaps) < _BLOCKS:
        return None
    means = [float(np.mean(block)) for block in np.array_split(np.asarray(gaps), _BLOCKS)]
    error = float(np.std(means, ddof=1) / math.sqrt(_BLOCKS))
    return {"mean": float(np.mean(gaps)), "error": error, "steps": len(gaps)}


def _verdict(found: dict, common: list[int]) -> str:
    if not found["parted"]:
        return f"identical to the last bit over all {len(common)} common steps, up to step {common[-1]}"
    parted, loss = found["parted"], found["loss"]
    line = f"{parted['metric']} parts at step {parted['step']}: {parted['a']!r} and {parted['b']!r}"
    if not loss:
        return line
    gap = f"loss B - loss A is {loss['mean']:+.4f} ± {loss['error']:.4f} over the last {loss['steps']} common logged steps"
    inside = abs(loss["mean"]) <= 2 * loss["error"] or abs(loss["mean"]) < 1e-4
    return f"{line}; {gap}: " + ("within the noise of batches and seeds" if inside else "more than noise")
