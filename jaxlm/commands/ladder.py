"""`jaxlm ladder`: trains small runs of a config's family on its data, and predicts the config's loss from them."""

import argparse
import dataclasses
import json
import math
import pathlib
import re

from jaxlm.commands.train import text as pretrain
from jaxlm.config import Config, ConfigError
from jaxlm.host import files
from jaxlm.host.console import say
from jaxlm.plan import settle
from jaxlm.plan.ladder import ladder, rungs
from jaxlm.plan.ladder import text as ladder_text
from jaxlm.plan.ladder.ladder import Asked, Ladder
from jaxlm.run.survive import train_in_child

_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9}
_LEAST = 3  # sizes, and budgets


def run(config: Config, args: argparse.Namespace) -> int:
    """Trains the missing runs, prints the scaling law and its prediction, and writes all to LADDER/ladder.json."""
    rungs.check(config)
    sizes = wanted(args)
    train_in_child.check(config, args.config, args.overrides, "ladder")
    order = pretrain.data(config)
    config = settle.sized(config, say, order.data.vocab_size)
    if not (args.out or config.workdir):
        raise ConfigError("no folder for the ladder: give --out=DIR")
    folder = pathlib.Path(args.out or pathlib.Path(config.workdir) / ladder.FOLDER)
    plan, climbed = ladder.begin(config, order, folder, sizes, args.config)
    if line := rungs.check_data(order, climbed):
        say(line)
    if args.plan:
        print(json.dumps(plan) if args.json else ladder_text.runs(plan))
        return 0
    files.make_folder(folder, f"the ladder's folder {folder}")
    with files.lock(folder, "makes the ladder in", "config.workdir"):
        mixture = dict(order.mixture)
        for run, rung in zip(plan["runs"], climbed, strict=True):
            note(run, rung.config, mixture)
        keep(folder, plan)
        say(ladder_text.runs(plan))

        def after(run: Ladder, config: Config, why: str) -> None:
            note(run, config, mixture)
            if run["kind"] == "rate" and not run["loss"]:  # a rate that is too high is worth knowing
                run["why"] = why
            keep(folder, plan)

        configs = {rung.entry["name"]: rung.config for rung in climbed}
        code = train_in_child.train_all(plan["runs"], lambda run: configs[run["name"]], after)
    if code == 0:
        print(json.dumps(plan) if args.json else ladder_text.found(plan))
        say(f"written to {folder / ladder.FILE}")
    return code


def wanted(args: argparse.Namespace) -> Asked:
    """Returns the sizes, tokens and hours of the command line. Raises ConfigError if one is wrong."""
    sizes, budgets = _numbers("sizes", args.sizes), _numbers("tokens", args.tokens)
    if wrong := [size for size in sizes if size % 8]:
        raise ConfigError(f"--sizes={args.sizes}: {wrong[0]:g} is no multiple of 8; they are widths (model.d_model)")
    if args.hours is not None and not 0 < args.hours < math.inf:
        raise ConfigError(f"--hours={args.hours:g} must be above 0 and finite")
    return Asked([int(size) for size in sizes], budgets, args.hours)


def _numbers(option: str, text: str) -> list[float]:
    """Returns the numbers of an option such as "250k,500k,1M", ascending. Raises ConfigError."""
    numbers = set()
    for word in filter(None, text.split(",")):
        match = re.fullmatch(r"([0-9][0-9_]*(?:\.[0-9]+)?)([kmb]?)", word.strip().lower())
        if not match or not float(match[1]):
            raise ConfigError(f"--{option}={text}: {word!r} is no number such as 500k, 1.5M or 2B")
        numbers.add(float(match[1]) * _UNITS[match[2]])
    if text and len(numbers) < _LEAST:
        raise ConfigError(f"--{option}={text}: give at least {_LEAST} different numbers")
    return sorted(numbers)


def note(run: Ladder, config: Config, mixture: dict[str, float]) -> None:
    """Puts the result of a run into its entry of the ladder, if the run is done."""
    if measured := train_in_child.result(config, mixture):
        run |= dataclasses.asdict(measured)


def keep(folder: pathlib.Path, plan: Ladder) -> None:
    """Draws the conclusions that the runs so far allow, and writes the ladder."""
    plan["hours"]["spent"] = sum(run["hours"] for run in plan["runs"])
    ladder.conclude(plan)
    ladder.write(folder, plan)
