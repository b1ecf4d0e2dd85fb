"""A sweep as a dict and in SWEEP/sweep.json, which `jaxlm sweep` rewrites after each run. The file holds:

version   1
same      what must not change in a sweep's folder: keys, metric (the name in metrics.jsonl that is compared at each run's last
          step), highest (true if more is better), data (its hash or path), search (its values and ranges, or "")
shape     sweeps of the same shape have the same noise: `same`, program, parameters, steps, batch_size, seq_len
base      key -> the value that the others are compared with, in the words of the arms
arms      key -> value of each; of a search in the order of its runs, {} of those that are not begun
threads   the cores of each run on a CPU: they decide the bits, so they stay, however many runs train at a time
runs      name, arm (its place in `arms`), seed, planned_hours (by the plan, then by finished runs of the arm;
          null: unknown), hours, and the metric as `loss`:
          null until the run is done, and for good if it diverged; then `why` says why
noise     squares and df of what arms and seeds leave (`noise.Noise`); df 0: unknown yet
borrowed  the same of finished sweeps of this shape beside it, whose names are in `of`
smallest  the smallest difference that the whole sweep can tell apart, in `scatters` of a run, and how many seeds half of it
          takes; null: the noise can't be known
result    null until every arm is done on one seed. seeds: how many all arms have done; arms: those without a diverged run,
          with their means and scatters over seeds; differences: key, value, difference from the base's value, half of its
          interval (null: unknown); a difference beyond its half is more than noise, and `saves` is what it is worth: the
          share of a run's tokens that the better value can leave out to reach the other's metric, these tokens and their
          dollars; or null
"""

import bisect
import contextlib
import dataclasses
import itertools
import json
import math
import os
import pathlib
import re
import zlib
from collections.abc import Mapping, Sequence

import numpy as np

from jaxlm.config import Config, ConfigError, with_keys
from jaxlm.host import files
from jaxlm.host.console import dollars, hours, human
from jaxlm.plan import forecast, lower, memory, settle
from jaxlm.plan.flops import count_params
from jaxlm.plan.ladder import rungs
from jaxlm.plan.ladder.ladder import DONE
from jaxlm.plan.sweep.noise import LEVEL, POWER, UNKNOWN, Family, Noise, left_over
from jaxlm.plan.tune import machines
from jaxlm.run import ledger, metrics

FOLDER, FILE, VERSION = "sweeps", "sweep.json", 1  # WORKDIR/sweeps/KEYS/sweep.json, if --out names no other folder
_LONGEST = 80  # characters of an arm's name
PROCESS = 1e9  # bytes of a run beside its step: Python, JAX, its compiler (.65e9 of a quickstart in all), a save
Sweep = dict
Arm = dict[str, str]  # key -> value


def begin(config: Config, folder: pathlib.Path, own: Arm, arms: Sequence[Arm], seeds: int, same: Sweep) -> Sweep:
    """Returns the sweep with its runs, seed by seed; what a run in the folder has done is in it. Writes nothing.

    Args:
      own: the config's own values of the swept keys.
      arms: {} for each run of a search.
      same: what must not change in a folder: metric, highest, data, search.

    Raises ConfigError if the folder holds another sweep.
    """
    t, search = config.train, "search" in same
    shape = {"program": config.program, "parameters": count_params(config.model), **same}
    shape |= {"steps": t.steps, "batch_size": t.batch_size, "seq_len": t.seq_len}
    same = {"keys": ", ".join(own), **same}
    saved = read(folder) or {"same": same, "arms": [], "runs": []}
    for key in [key for key in saved["same"] | same if saved["same"].get(key) != same.get(key)]:
        was, now = (_told(key, values.get(key)) for values in (saved["same"], same))
        raise ConfigError(f"{folder} holds a sweep {was}, and now it is one {now}: set it back, or give another --out")
    if search:
        arms, own = [*saved["arms"], *arms[len(saved["arms"]) :]], {}
    base = {key: value if value in (arm[key] for arm in arms) else arms[0][key] for key, value in own.items()}
    before, runs = {run["name"]: run for run in saved["runs"]}, []
    for seed, (place, arm) in itertools.product(range(config.seed, config.seed + seeds), enumerate(arms)):
        name = f"trial_{place + 1}" if search else f"{_name(arm)}-seed_{seed}"
        entry = {"planned_hours": None, "hours": 0.0, "loss": None, "why": ""} | before.get(name, {})
        runs.append(entry | {"name": name, "arm": place, "seed": seed})
    head = {"version": VERSION, "same": same, "shape": shape, "base": base, "arms": arms}
    return head | {"threads": saved.get("threads", 0), "runs": runs}


def _told(key: str, value: object) -> str:
    """Returns a value of `same` as a command line says it: "with --search of optim.lr=0.001..0.01", "without --search"."""
    if key == "search" and not value:
        return "without --search"
    if key == "search":
        space = json.loads(value).items()  # of a range, its two floats
        keys = (f"{name}={('..' if isinstance(v[0], float) else ',').join(map(str, v))}" for name, v in space)
        return f"with --search of {' '.join(keys)}"
    return f"with the {'highest' if value else 'lowest'} as best" if key == "highest" else f"with {key} {value}"


def of_run(run: Sweep, folder: pathlib.Path, of_arm: Config, at_once: int) -> Config:
    """Returns the config of a run in the sweep's folder. Of several at a time each pays its part of the machine."""
    part = {"usd_per_hour": of_arm.hardware.usd_per_hour / at_once}
    alone = with_keys(rungs.alone(of_arm), eval={"tasks": of_arm.eval.tasks}, hardware=part)
    return dataclasses.replace(alone, seed=run["seed"], workdir=str(folder / "runs" / run["name"]))


def _name(values: Mapping[str, str]) -> str:
    text = "-".join(f"{key.split('.')[-1]}_{value}" for key, value in values.items())
    plain = re.sub(r"[^\w.+-]+", "_", text)[:_LONGEST]
    return plain if plain == text else f"{plain}-{zlib.crc32(text.encode()):08x}"


def row(config: Config) -> dict:
    """Returns this machine's measured `kind`, bytes `needed` by a step, and `hours` of a run; None or absent: unknown."""
    c = settle.assuming(config, remat="none", rows=config.train.batch_size)
    measured = machines.row(with_keys(c, plan={"accelerator": ""}))
    if measured.get("kind") == "cpu" and not measured["needed"]:  # trained before, and so not measured
        c = settle.on_platform(c, "cpu").runs
        measured["needed"] = memory.estimate(c, memory.abstract_mesh(c.mesh, measured["count"])).total
    training = measured.get("hours")
    return measured | {"hours": training and training + rungs.START_S / 3600}


def cores(sweep: Sweep, rows: Sequence[Mapping]) -> list[list[int]]:
    """Returns the cores of each of the runs that train at a time: several on a CPU with memory for them, else one on all.

    `rows`: each arm's `row`. A sweep that begins gets its `threads`.
    """
    here = sorted(os.sched_getaffinity(0))[: files.cores()]
    fit = sum(run["loss"] is None and not run["why"] for run in sweep["runs"]) or 1
    for row in rows:
        several = int(lower.available_bytes() / (row["needed"] + PROCESS)) if row.get("kind") == "cpu" else 1
        fit = max(1, min(fit, several))
    each = sweep["threads"] = min(sweep["threads"] or max(len(here) // fit, 1), len(here))
    return [here[i * each :][:each] for i in range(min(fit, len(here) // each))]


def contrasts(sweep: Sweep, numbers: Sequence[int]) -> list[tuple[str, str, np.ndarray]]:
    """Returns (key, value, weights of the `numbers` arms) of each difference: `value` against the base's value of the key.

    A difference is a mean over the pairs of arms that differ in this key alone: over all values of the other keys if the
    sweep has all combinations (a main effect).
    """
    arms, rows = [sweep["arms"][i] for i in numbers], []
    for key, own in sweep["base"].items():
        for value in dict.fromkeys(arm[key] for arm in arms if arm[key] != own):
            ends = itertools.permutations(range(len(arms)), 2)
            pairs = [(i, j) for i, j in ends if arms[i][key] == value and arms[j] == arms[i] | {key: own}]
            if pairs:
                weights_2xA = [np.bincount(end, minlength=len(arms)) / len(pairs) for end in zip(*pairs, strict=True)]
                rows.append((key, value, weights_2xA[0] - weights_2xA[1]))
    return rows


def conclude(sweep: Sweep, folder: pathlib.Path) -> None:
    """Fills in `noise`, `borrowed`, `smallest` and `result`, as far as the runs are done."""
    borrowed, of = _beside(sweep, folder)
    lost, seeds = {run["arm"] for run in sweep["runs"] if run["why"]}, {run["seed"]: None for run in sweep["runs"]}
    arms = [arm for arm in range(len(sweep["arms"])) if arm not in lost]
    by = {(run["seed"], run["arm"]): run["loss"] for run in sweep["runs"]}
    losses_SxA = np.array([row for seed in seeds if None not in (row := [by[seed, arm] for arm in arms])], float)
    own = left_over(losses_SxA) if losses_SxA.size else UNKNOWN
    sweep |= {"noise": own._asdict(), "borrowed": borrowed._asdict() | {"of": of}, "smallest": None, "result": None}
    if sweep["same"].get("search") and (done := [run for run in sweep["runs"] if run["loss"] is not None]):
        done.sort(key=lambda run: run["loss"], reverse=sweep["same"]["highest"])
        ranking = {"arms": [run["arm"] for run in done], "means": [run["loss"] for run in done]}
        sweep["result"] = {"seeds": 1, "differences": [], "scatters": [0.0] * len(done)} | ranking
    if not (rows := contrasts(sweep, arms)):
        return
    family = Family(np.array([weights for *_, weights in rows]))
    if math.isfinite(smallest := family.smallest(len(seeds), borrowed.df)):
        sweep["smallest"] = {"scatters": smallest, "seeds_for_half": family.seeds_for_half(len(seeds), borrowed.df)}
    if losses_SxA.size:
        judged_2xC, differences = family.judge(losses_SxA, borrowed), []
        for (key, value, _), change, half in zip(rows, *(part.tolist() for part in judged_2xC), strict=True):
            saves = _saves(sweep, folder, key, value, change) if abs(change) > half else None
            known = {"difference": change, "half": half if math.isfinite(half) else None, "saves": saves}
            differences.append({"key": key, "value": value, **known})
        seeds_done, scatter = len(losses_SxA), losses_SxA.std(0, ddof=min(1, len(losses_SxA) - 1)).tolist()
        means = {"arms": arms, "means": losses_SxA.mean(0).tolist(), "scatters": scatter}
        sweep["result"] = {"seeds": seeds_done, "differences": differences} | means


def _saves(sweep: Sweep, folder: pathlib.Path, key: str, value: str, change: float) -> list[float] | None:
    """Returns what the better of a key's value and the base's saves, the median of its runs: `_saved`."""
    better = value if (change > 0) == sweep["same"]["highest"] else sweep["base"][key]
    done = [run for run in sweep["runs"] if run["loss"] is not None and sweep["arms"][run["arm"]][key] == better]
    saved = [_saved(sweep, folder / "runs" / run["name"], abs(change)) for run in done]
    return np.median(known, axis=0).tolist() if (known := [each for each in saved if each]) else None


def _saved(sweep: Sweep, folder: pathlib.Path, change: float) -> list[float] | None:
    """Returns the share of a run's tokens, tokens and dollars without which it is worse by `change`; None: unknown.

    Of pretraining by the forecast's law, for a schedule that is squeezed into fewer steps. Else by the run's own curve, whose
    rate has not fallen yet where it is cut off: that saves less.
    """
    records = metrics.read(folder / "metrics.jsonl", ledger.read(folder)["rollbacks"])
    steps, metric, sign = max(records, default=0), sweep["same"]["metric"], -1 if sweep["same"]["highest"] else 1
    curve = [(n, sign * r[metric]) for n, r in sorted(records.items()) if files.is_number(r.get(metric))]
    logged = [(n, r.get("train/loss"), r.get("train/lr")) for n, r in sorted(records.items())]
    logged = [row for row in logged if None not in row]
    if not curve:
        return None
    at, values = np.array(curve).T
    needed = np.interp(values[-1] + change, np.minimum.accumulate(values)[::-1], at[::-1])
    if logged and sweep["shape"]["program"] == "pretrain" and metric == metrics.HELD_OUT:
        x, losses, rates = np.array(logged).T
        law = forecast.fit(x.astype(int), losses, forecast.logged(x, rates), steps, steps)
        if isinstance(law, forecast.Forecast):
            goal, shorter = law.squeezed(steps) + change, range(max(steps // 20, 1), steps)
            needed = shorter[0] + bisect.bisect_left(shorter, True, key=lambda n: law.squeezed(n) <= goal)
    spent = (max(r.get(name) or 0.0 for r in records.values()) for name in ("tokens", "cost_usd"))
    return [(1 - needed / steps) * each for each in (1.0, *spent)] if needed < steps else None


def _beside(sweep: Sweep, folder: pathlib.Path) -> tuple[Noise, list[str]]:
    """Returns the noise of the finished sweeps of the same shape in folders beside this one, and their names."""
    noise, of = UNKNOWN, []
    for path in sorted(folder.resolve().parent.glob(f"*/{FILE}")):
        with contextlib.suppress(ConfigError):  # one that is damaged
            other = read(path.parent) if path.parent != folder.resolve() else None
            done = other and all(run["loss"] is not None or run["why"] for run in other["runs"])
            if done and other["shape"] == sweep["shape"] and other["noise"]["df"]:
                noise, of = noise.with_(Noise(**other["noise"])), [*of, path.parent.name]
    return noise, of


_RUN = dict.fromkeys(("name", "why"), files.TEXT) | dict.fromkeys(("arm", "seed"), files.whole(0))
_RUN |= {"hours": files.NUMBER} | dict.fromkeys(("planned_hours", "loss"), files.NUMBER_OR_NONE)
_SHAPE = {"same": {}, "shape": {}, "arms": [{}], "runs": [_RUN]}
_SHAPE |= {"noise": {"squares": files.NUMBER, "df": files.whole(0)}}


def read(folder: pathlib.Path) -> Sweep | None:
    """Returns the sweep in SWEEP/sweep.json; None if there is no such file. Raises ConfigError if it can't be used."""
    return files.kept(folder / FILE, VERSION, lambda sweep: files.problem(sweep, _SHAPE), DONE)


def write(folder: pathlib.Path, sweep: Sweep) -> None:
    conclude(sweep, folder)
    files.write_atomically(folder / FILE, (json.dumps(sweep, indent=1) + "\n").encode())


Table = list[list[str]]  # the first row is the head


def runs(sweep: Sweep, left: float | None, usd_per_hour: float, at_once: int) -> str:
    """Returns a line on the runs, how many train at a time, and the hours that they still take (0: none; None: unknown)."""
    done = sum(run["loss"] is not None for run in sweep["runs"])
    takes = "an unknown time" if left is None else f"about {hours(left)}"
    takes += f", {dollars(left * usd_per_hour)}" if left and usd_per_hour else ""
    several = f" {at_once} at a time, on {sweep['threads']} of the machine's cores each;" if at_once > 1 else ""
    arms = "" if sweep["same"].get("search") else f" of {len(sweep['arms'])} arms"
    rest = f";{several} the others take {takes}" if left or left is None else ""
    return f"{len(sweep['runs'])} runs{arms}, {done} done{rest}"


def lines(sweep: Sweep) -> list[str]:
    """Returns sentences on the noise, on the smallest difference, and on arms without a result."""
    noise, borrowed, smallest, result = (sweep[key] for key in ("noise", "borrowed", "smallest", "result"))
    notes, size = [], "one seed tells nothing apart, unless a finished sweep like this lies beside it: give --seeds=3"
    if sweep["same"].get("search"):
        size = "the best of a search is so in part by luck: a sweep of its values and the config's own tells them apart"
    if smallest:
        size = (
            f"the smallest difference that all seeds tell apart, in {POWER:.0%} of cases: {smallest['scatters']:.2g} "
        )
        size += f"times a run's scatter; half of it takes {smallest['seeds_for_half']} seeds"
    if df := noise["df"] + borrowed["df"]:
        scatter = math.sqrt((noise["squares"] + borrowed["squares"]) / df)
        of = f", {borrowed['df']} of them borrowed from {', '.join(borrowed['of'])}" * bool(borrowed["df"])
        notes.append(
            f"noise: a run scatters by {_number(scatter)} beyond its arm and its seed ({df} degrees of freedom{of})"
        )
        size += f"; in numbers: {_number(smallest['scatters'] * scatter)}" if smallest else ""
    why = {_arm(sweep, run["arm"]): f"{run['name']}: {run['why']}" for run in sweep["runs"] if run["why"]}
    notes += [size, *(f"left out: {name}: {words}" for name, words in why.items())]
    by = f"seeds that all arms have done: {result['seeds']}" if result and result["differences"] else ""
    return [*notes, *filter(None, [by])]


def tables(sweep: Sweep) -> list[Table]:
    """Returns the table of arms and that of differences, which a search has not; [] before there is a result."""
    if not (result := sweep["result"]):
        return []
    arms = [["arm", f"mean {sweep['same']['metric']}", "scatter over seeds"]]
    for arm, mean, scatter in zip(*(result[key] for key in ("arms", "means", "scatters")), strict=True):
        arms.append([_arm(sweep, arm), f"{mean:.4f}", _number(scatter) if result["seeds"] > 1 else "unknown"])
    rows = [["change", "", "difference", f"{1 - LEVEL:.0%} interval, all together", "worth"]]
    for row in result["differences"]:
        change, half = row["difference"], row["half"]
        verdict = "better" if (change > 0) == sweep["same"]["highest"] else "worse"
        verdict = "can't be told apart" if half is None or abs(change) <= half else verdict
        span = "unknown" if half is None else f"{_number(change - half, '+')} to {_number(change + half, '+')}"
        name = f"{row['key']} {sweep['base'][row['key']]} -> {row['value']}"
        rows.append([name, verdict, _number(change, "+"), span, _worth(row.get("saves"))])
    return [arms, rows] if rows[1:] else [arms]


def _worth(saves: list[float] | None) -> str:
    """Returns a share of a run's tokens, the tokens and their dollars: "23%: 108k tokens, $0.12"."""
    if not saves:
        return ""
    share, tokens, usd = saves
    return f"{share:.0%}: {human(tokens)} tokens" + (f", {dollars(usd)}" if usd else "")


def _arm(sweep: Sweep, arm: int) -> str:
    return " ".join(f"{key}={value}" for key, value in sweep["arms"][arm].items())


def _number(value: float, sign: str = "") -> str:
    return f"{value:{sign}.4f}" if abs(value) >= 0.001 or not value else f"{value:{sign}.2g}"
