"""A ladder as a dict and in LADDER/ladder.json, which `jaxlm ladder` rewrites after each run. The file holds:

version   1
target    the model that is predicted: config (as it was named), parameters, tokens, vocab_size, lr, shape (its keys)
same      the values that must not change in a ladder: {"model.d_model": 256, "data": sha256 of the manifest, ...}
sizes     the widths (d_model) of the models, rising
budgets   the numbers of tokens, rising, before they are rounded to whole steps
held_out  the text of all losses: seq_len, max_mb (of each source at most; 0 = all), mixture (source -> weight);
          older ladders name rows of seq_len in place of max_mb
machine   the device kind and the number of devices ("cpu x 1"); null if no speed was measured
hours     limit (null if only tokens were given), planned (null if the speed is unknown), spent
runs      in the order in which they are done (`rungs.rung`). `loss` is null until the run is done, and stays null if it
          failed; then `why` says why.
rates     null until the runs at several rates are done; then tried, best (`law.best_rate`), edge, lr (the target's own, scaled
          to the smallest run) and rule (the published rule's)
fit       null until all runs of the grid are done; then law, noise and draws (as in `law.Fit`), from {"parameters", "tokens"}
          (where the drift begins), missed: the worst relative error of the largest size's losses, predicted from the others
foretold  null while `fit` is; else predictions for finished runs of the target on a quarter, half, all and twice its tokens
"""

import dataclasses
import json
import math
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np

from jaxlm.config import Config, ConfigError, checks, older, with_keys
from jaxlm.data.batches.document_rows import Rows
from jaxlm.host import files
from jaxlm.host.console import Say, hours, say
from jaxlm.plan import settle
from jaxlm.plan.cost import tokens
from jaxlm.plan.flops import count_params
from jaxlm.plan.ladder import rungs
from jaxlm.plan.ladder.law import CONSTANTS, Fit, best_rate, fit, missed
from jaxlm.plan.ladder.rungs import Rung
from jaxlm.plan.rules import Law
from jaxlm.plan.tune import machines

FOLDER, FILE, VERSION = "ladder", "ladder.json", 1  # WORKDIR/ladder/ladder.json, if --out names no other folder
FORETOLD = (0.25, 0.5, 1, 2)  # of the target's tokens
DONE = "runs that are done are kept"
TOO_LONG = 1.05  # times the given hours; longer ladders are refused
Ladder = dict


@dataclasses.dataclass(frozen=True)
class Asked:
    """The user's choices; None or empty where the rules of `rungs` decide."""

    sizes: Sequence[int] = ()
    budgets: Sequence[float] = ()
    hours: float | None = None


def begin(config: Config, order: Rows, folder: pathlib.Path, asked: Asked, name: str) -> tuple[Ladder, list[Rung]]:
    """Returns the ladder of a folder, or a new one, and its runs in the order in which they are done. Writes nothing.

    Raises ConfigError if the folder holds the ladder of another config, if model, data or hours are too small, or if this
    machine's speed is needed and unknown.
    """
    ladder = read(folder)
    if ladder:
        config = older.as_in_ladder(config, ladder["same"], say)
    held_out = rungs.held_out_tokens(config, order)
    same = json.loads(json.dumps(rungs.same(config, order)))
    if ladder:
        was = {"sizes": ladder["sizes"], "tokens": ladder["budgets"], "hours": ladder["hours"]["limit"]}
        wanted = {"sizes": list(asked.sizes), "tokens": list(asked.budgets), "hours": asked.hours}
        was |= older.with_rates(ladder["same"], "optim.")
        now = same | {key: value for key, value in wanted.items() if value}
        for key in (key for key in now if was.get(key) != now[key]):
            mend = "set it back, give another --out, or delete that folder"
            raise ConfigError(f"{folder} holds a ladder with {key} = {was.get(key)}, now it is {now[key]}: {mend}")
        climbed = rungs.rungs(config, ladder["sizes"], ladder["budgets"], folder)
        if [run["name"] for run in ladder["runs"]] != [rung.entry["name"] for rung in climbed]:
            raise ConfigError(f"{folder / FILE} is damaged: delete it; {DONE}")
    else:
        planned, climbed = _planned(config, folder, asked, held_out)
        ladder = _new(config, order, name) | {"same": same} | planned
    for rung in climbed:
        checks.validate(rung.config)
    return ladder, climbed


def _planned(config: Config, folder: pathlib.Path, asked: Asked, held_out: int) -> tuple[Ladder, list[Rung]]:
    """Returns (`sizes`, `budgets`, `machine`, `hours` and `runs` of a new ladder; the runs themselves)."""
    sizes = list(asked.sizes) or rungs.sizes(config.model)
    measured = _speeds(config, sizes, asked.budgets, folder)
    speeds = {size: row["tokens_per_second"] for size, row in measured.items()}
    limit = asked.hours or (None if asked.budgets else rungs.limit(config, speeds))
    budgets = list(asked.budgets) or rungs.budgets(config, speeds, limit, held_out)
    climbed = rungs.rungs(config, sizes, budgets, folder)
    steps = rungs.ASKED_STEPS
    if asked.budgets and min(rung.config.train.steps for rung in climbed) < steps:
        least = steps * climbed[0].config.train.batch_size * config.train.seq_len
        raise ConfigError(f"--tokens: {budgets[0]:,.0f} are less than {steps} steps; give {least:,} or more")
    runs = [rung.entry for rung in climbed]
    for rung in climbed if speeds else ():
        rung.entry["planned_hours"] = (
            rungs.seconds(rung.entry["tokens"], speeds[rung.entry["d_model"]], held_out) / 3600
        )
    planned = sum(run["planned_hours"] or 0.0 for run in runs)
    if limit and planned > TOO_LONG * limit:
        words = f"these runs take about {hours(planned)}, more than --hours={limit:g}"
        raise ConfigError(f"{words}: name fewer tokens, or more hours")
    machine = next((f"{row['kind']} x {row['count']}" for row in measured.values()), None)
    spent = {"limit": limit, "planned": planned or None, "spent": 0.0}
    return {"runs": runs, "sizes": sizes, "budgets": budgets, "machine": machine, "hours": spent}, climbed


def _new(config: Config, order: Rows, name: str) -> Ladder:
    """Returns a new ladder's `version`, `target` and `held_out`, and its results, which are still None."""
    m, e = config.model, config.eval
    target = {"config": name, "parameters": count_params(m), "tokens": tokens(config), "vocab_size": m.vocab_size}
    target |= {
        "lr": config.optim.lr or rungs.by_rule(config).lr,
        "shape": {key: getattr(m, key) for key in ("family", *rungs.SHAPE)},
    }
    held_out = {"seq_len": config.train.seq_len, "mixture": dict(order.mixture)}
    held_out |= {"rows": math.prod(e.older_batches)} if e.older_batches else {"max_mb": e.max_mb}
    return {"version": VERSION, "target": target, "held_out": held_out} | dict.fromkeys(("rates", "fit", "foretold"))


def _speeds(config: Config, sizes: Sequence[int], budgets: Sequence[float], folder: pathlib.Path) -> dict[int, dict]:
    """Returns width -> `machines.row` on this machine. If a speed is unknown: {} if budgets are given, else ConfigError."""
    rows = {}
    for size in sizes:
        c = rungs.rung(config, size, budgets[0] if budgets else tokens(config) / 4, folder).config
        c = settle.assuming(c, remat="none", rows=c.train.batch_size)
        # Of this machine, even if the plan is for another accelerator.
        rows[size] = row = machines.row(with_keys(c, plan={"accelerator": ""}))
        if row.get("tokens_per_second"):
            continue
        if budgets:
            return {}
        why = row.get("why", "it does not fit") or "plan.measure=never"
        again = "measure it again (--config.plan.measure=again), or " if row.get("why") else ""
        words = f"how fast this machine trains d_model={size} is not known ({why})"
        raise ConfigError(f"{words}: {again}give --tokens=N,N,N")
    return rows


def conclude(ladder: Ladder) -> None:
    """Fills in `rates`, `fit` and `foretold` of a ladder, as far as its runs are done."""
    grid = [run for run in ladder["runs"] if run["kind"] == "grid"]
    tried = [run for run in ladder["runs"] if run["kind"] == "rate" or run is grid[0]]
    tried.sort(key=lambda run: run["lr"])
    if len(tried) > 2 and all(run["loss"] or run["why"] for run in tried):
        best, edge = best_rate([(run["lr"], run["loss"]) for run in tried])
        rates = [{key: run[key] for key in ("lr", "times", "loss")} for run in tried]
        ladder["rates"] = {"tried": rates, "best": best, "edge": edge, "lr": grid[0]["lr"], "rule": grid[0]["rule"]}
    if not all(run["loss"] for run in grid):
        return
    length = float(np.mean([run["bytes_per_token"] for run in grid]))
    fitted = fit(grid, length)
    ladder["fit"] = {
        "law": {name: getattr(fitted.law, name) for name in CONSTANTS},
        "noise": fitted.noise,
        "draws": [[float(f"{value:.6g}") for value in draw] for draw in fitted.draws_Kx6.tolist()],
        "from": {"parameters": fitted.params, "tokens": fitted.tokens},
        "missed": missed(grid, length),
    }
    keys, parameters = ("parameters", "tokens", "loss", "low", "high"), ladder["target"]["parameters"]
    rows = [(parameters, share * ladder["target"]["tokens"]) for share in FORETOLD]
    ladder["foretold"] = [dict(zip(keys, (*row, *fitted.loss(*row)), strict=True)) for row in rows]


def fit_of(ladder: Mapping) -> Fit | None:
    """Returns the fit of a ladder that `read` returned; None if its runs are not all done."""
    if not (saved := ladder["fit"]):
        return None
    largest, draws = saved["from"], np.array(saved["draws"], float)
    return Fit(Law("ladder", **saved["law"]), saved["noise"], draws, largest["parameters"], largest["tokens"])


def known(config: Config, say: Say) -> tuple[Fit, pathlib.Path] | None:
    """Returns (fit, folder) of the ladder in WORKDIR/ladder; None if there is none, it is unfinished, or of another model."""
    folder = pathlib.Path(config.workdir) / FOLDER
    if not config.workdir or not (ladder := read(folder)):
        return None
    shape, vocab_size = ladder["target"]["shape"], ladder["target"]["vocab_size"]
    if not (fitted := fit_of(ladder)):
        done, runs = sum(run["loss"] is not None for run in ladder["runs"]), len(ladder["runs"])
        why = f"{done} of its {runs} runs are done, and the same jaxlm ladder goes on"
    elif (shape["family"], vocab_size) != (config.model.family, config.model.vocab_size):
        why = f"it is of {shape['family']} with {vocab_size:,} ids"
    else:
        return fitted, folder
    say(f"{folder} is left out: {why}")
    return None


_NUMBERS = ("d_model", "parameters", "tokens", "steps", "batch_size", "lr", "times", "rule", "hours")
_RUN = dict.fromkeys(_NUMBERS, files.NUMBER) | dict.fromkeys(("name", "kind", "why"), files.TEXT)
_TARGET = {"config": files.TEXT, "shape": {"family": files.TEXT}}
_SHAPE = {
    "target": _TARGET | dict.fromkeys(("parameters", "tokens", "vocab_size"), files.NUMBER),
    "same": {},
    "runs": [_RUN | dict.fromkeys(("planned_hours", "loss", "bytes_per_token"), files.NUMBER_OR_NONE)],
    "sizes": [files.whole(1)],
    "budgets": [files.NUMBER],
    "hours": {"limit": files.NUMBER_OR_NONE, "planned": files.NUMBER_OR_NONE, "spent": files.NUMBER},
}
_FIT = {"law": {str: files.NUMBER}, "noise": files.NUMBER, "from": {"parameters": files.NUMBER, "tokens": files.NUMBER}}


def read(folder: pathlib.Path) -> dict | None:
    """Returns the ladder in LADDER/ladder.json; None if there is no such file. Raises ConfigError if it can't be used."""

    def check(ladder: Ladder) -> str:
        problem = files.problem(ladder, _SHAPE | ({"fit": _FIT} if ladder["fit"] else {}))
        return problem or (fit_of(ladder) and "") or ""

    return files.kept(folder / FILE, VERSION, check, DONE)


def write(folder: pathlib.Path, ladder: Mapping) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    files.write_atomically(folder / FILE, (json.dumps(ladder, indent=1) + "\n").encode())
