"""A sweep as a dict and in SWEEP/sweep.json, which `jaxlm sweep` rewrites after each run. The file holds:

version   1
same      what must not change in a sweep's folder: keys, metric (the name in metrics.jsonl that is compared at each run's last
          step), highest (true if more is better), data (its hash or path)
shape     sweeps of the same shape have the same noise: `same`, program, parameters, steps, batch_size, seq_len
base      key -> the value that the others are compared with, in the words of the arms
arms      key -> value of each
runs      name, arm (its place in `arms`), seed, planned_hours (by the plan, then by finished runs of the arm;
          null: unknown), hours, and the metric as `loss`:
          null until the run is done, and for good if it diverged; then `why` says why
noise     squares and df of what arms and seeds leave (`noise.Noise`); df 0: unknown yet
borrowed  the same of finished sweeps of this shape beside it, whose names are in `of`
smallest  the smallest difference that the whole sweep can tell apart, in `scatters` of a run, and how many seeds half of it
          takes; null: the noise can't be known
result    null until every arm is done on one seed. seeds: how many all arms have done; arms: those without a diverged run,
          with their means and scatters over seeds; differences: key, value, difference from the base's value, half of its
          interval (null: unknown); a difference beyond its half is more than noise
"""

import contextlib
import dataclasses
import itertools
import json
import math
import pathlib
import re
import typing
import zlib
from collections.abc import Mapping, Sequence

import numpy as np

from jaxlm.config import Config, ConfigError, with_keys
from jaxlm.host import files
from jaxlm.plan import settle
from jaxlm.plan.flops import count_params
from jaxlm.plan.ladder import rungs
from jaxlm.plan.ladder.ladder import DONE
from jaxlm.plan.sweep.noise import UNKNOWN, Family, Noise, left_over
from jaxlm.plan.tune import machines

FOLDER, FILE, VERSION = "sweeps", "sweep.json", 1  # WORKDIR/sweeps/KEYS/sweep.json, if --out names no other folder
_LONGEST = 80  # characters of an arm's name
Sweep = dict[str, typing.Any]
Arm = tuple[dict[str, str], Config]  # key -> value, and what follows from it


def begin(
    config: Config, folder: pathlib.Path, own: Mapping[str, str], arms: Sequence[Arm], seeds: int, same: Sweep
) -> tuple[Sweep, list[Config]]:
    """Returns the sweep and the configs of its runs, seed by seed; what a run in the folder has done is in it. Writes nothing.

    Args:
      own: the swept keys with the config's own values.
      same: what must not change in a folder: metric, highest, data.

    Raises ConfigError if the folder holds another sweep, or one of its runs is of another config.
    """
    saved, t = read(folder), config.train
    shape = {"program": config.program, "parameters": count_params(config.model), **same}
    shape |= {"steps": t.steps, "batch_size": t.batch_size, "seq_len": t.seq_len}
    same = {"keys": ", ".join(own), **same}
    for key in (key for key in same if saved and saved["same"].get(key) != same[key]):
        was = f"a sweep with {key} = {saved['same'].get(key)}, now it is {same[key]}"
        raise ConfigError(f"{folder} holds {was}: set it back, or give another --out")
    values = [values for values, _ in arms]
    base = {key: value if value in (arm[key] for arm in values) else values[0][key] for key, value in own.items()}
    before, runs, configs = {run["name"]: run for run in saved["runs"]} if saved else {}, [], []
    for seed in range(config.seed, config.seed + seeds):
        for place, (arm, of_arm) in enumerate(arms):
            name = f"{_name(arm)}-seed_{seed}"
            entry = {"planned_hours": None, "hours": 0.0, "loss": None, "why": ""} | before.get(name, {})
            runs.append(entry | {"name": name, "arm": place, "seed": seed})
            alone = with_keys(rungs.alone(of_arm), eval={"tasks": config.eval.tasks})
            configs.append(dataclasses.replace(alone, seed=seed, workdir=str(folder / "runs" / name)))
    sweep = {"version": VERSION, "same": same, "shape": shape, "base": base, "arms": values, "runs": runs}
    return sweep, configs


def _name(values: Mapping[str, str]) -> str:
    text = "-".join(f"{key.split('.')[-1]}_{value}" for key, value in values.items())
    plain = re.sub(r"[^\w.+-]+", "_", text)[:_LONGEST]
    return plain if plain == text else f"{plain}-{zlib.crc32(text.encode()):08x}"


def planned_hours(config: Config) -> float | None:
    """Returns the hours of a run by the measured speed of this machine; None if that is unknown."""
    c = settle.assuming(config, remat="none", rows=config.train.batch_size)
    training = machines.row(with_keys(c, plan={"accelerator": ""})).get("hours")
    return training and training + rungs.START_S / 3600


def contrasts(sweep: Sweep, kept: Sequence[int]) -> list[tuple[str, str, np.ndarray]]:
    """Returns (key, value, weights of the `kept` arms) of each difference: `value` against the base's value of the key.

    A difference is a mean over the pairs of arms that differ in this key alone: over all values of the other keys if the
    sweep has all combinations (a main effect).
    """
    arms, rows = [sweep["arms"][i] for i in kept], []
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
    if not (rows := contrasts(sweep, arms)):
        return
    family = Family(tuple(tuple(weights) for *_, weights in rows))
    if math.isfinite(smallest := family.smallest(len(seeds), borrowed.df)):
        sweep["smallest"] = {"scatters": smallest, "seeds_for_half": family.seeds_for_half(len(seeds), borrowed.df)}
    if losses_SxA.size:
        judged_2xC = [part.tolist() for part in family.judge(losses_SxA, borrowed)]
        changes = [[key, value, *both] for (key, value, _), *both in zip(rows, *judged_2xC, strict=True)]
        names, known = ("key", "value", "difference", "half"), own.df + borrowed.df
        differences = [dict(zip(names, change if known else [*change[:3], None], strict=True)) for change in changes]
        seeds_done, scatter = len(losses_SxA), losses_SxA.std(0, ddof=min(1, len(losses_SxA) - 1)).tolist()
        means = {"arms": arms, "means": losses_SxA.mean(0).tolist(), "scatters": scatter}
        sweep["result"] = {"seeds": seeds_done, "differences": differences} | means


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
_SHAPE = {"same": {}, "shape": {}, "runs": [_RUN], "noise": {"squares": files.NUMBER, "df": files.whole(0)}}


def read(folder: pathlib.Path) -> Sweep | None:
    """Returns the sweep in SWEEP/sweep.json; None if there is no such file. Raises ConfigError if it can't be used."""
    return files.kept(folder / FILE, VERSION, lambda sweep: files.problem(sweep, _SHAPE), DONE)


def write(folder: pathlib.Path, sweep: Sweep) -> None:
    conclude(sweep, folder)
    files.write_atomically(folder / FILE, (json.dumps(sweep, indent=1) + "\n").encode())
