"""`python scripts/bench_recipe.py steptime`: seconds per training step of the main arms, measured alternately.

The steps are the product's own, on random tokens. A line of steptimes.jsonl has all times in the order of measurement, so
that arms are compared pair by pair. On a GPU: --shape=gpuburnout_1b, from which `report` computes dollars.
"""

import argparse
import statistics

import bench_recipe_arms as arms_lib
import bench_recipe_report
import bench_recipe_runs as runs_lib
import bench_step
import jax

from jaxlm.config import Config, ConfigError, config_files, resolve


def make_config(arm: str, shape: str, overrides: list[str]) -> Config:
    """Returns an arm's optimizer on one of our shapes or a shipped config. Raises ConfigError if this checkout lacks a key."""
    if shape in arms_lib.SHAPES:
        run = runs_lib.Run(arm, shape, arms_lib.BUDGETS[0], 0)
        words = ["workdir=unused", "data.dir=unused", *arms_lib.settings(run), *overrides]
        return bench_step.settled(resolve(config_files.load("base", words)))
    keys = {key: value for key, value in arms_lib.ARMS[arm].keys.items() if key != "optim.b2"}  # costs no time
    if arms_lib.ARMS[arm].rate == "two":
        keys["optim.rates"] = ("layers_.*/kernel 0.5",)  # any value but 1
    words = ["workdir=unused", *arms_lib.words(keys), *overrides]
    return bench_step.settled(resolve(config_files.load(shape, words)))


def main(args: argparse.Namespace) -> int:
    """Times the main arms, or the arms of --only, appends a line, prints the ratios."""
    arms, left_out = args.only or arms_lib.MAIN, arms_lib.unknown(args.only or arms_lib.MAIN)
    for arm, why in left_out.items():
        print(f"{arm} is left out: {why}")
    arms = [arm for arm in arms if arm not in left_out]
    if not arms:
        raise ConfigError("no arm is left to time")
    sides = {arm: bench_step.jaxlm_step(make_config(arm, args.shape, args.set)) for arm in arms}
    for side in sides.values():
        for _ in range(2):
            bench_step.timed(side)
    watch, times = runs_lib.Watch(), {arm: [] for arm in arms}
    for _ in range(args.steps):
        for arm, side in sides.items():
            times[arm].append(bench_step.timed(side)[0])
    found = {"shape": args.shape, "times": times, **watch.told(), "commit": runs_lib.commit(), "set": args.set}
    device = jax.devices()[0]
    found["machine"] = runs_lib.machine() if device.platform == "cpu" else device.device_kind
    runs_lib.append(args.runs.with_name(bench_recipe_report.STEPTIMES), found)
    for arm, taken in times.items():
        ratio = bench_recipe_report.step_ratio(found, arm, arms[0])
        print(f"{arm}: {statistics.median(taken) * 1e3:.1f} ms a step, {ratio:.3f} of {arms[0]}'s, turn by turn")
    if found["loaded"] is not False:
        print("the machine was LOADED by others, or does not say: these times are worth nothing")
    return 0
