"""Finds the recipe that reaches a loss with the fewest tokens, seconds and dollars, by small finished runs.

    python scripts/bench_recipe.py plan                    # the runs and their hours, before anything runs
    python scripts/bench_recipe.py run --hours=3           # continues where it stopped; --only=ARM,... for some arms
    python scripts/bench_recipe.py steptime                # seconds per step, in interleaved pairs; on an idle machine
    python scripts/bench_recipe.py peers                   # Hugging Face's Trainer and nanochat's optimizer on the same tokens
    python scripts/bench_recipe.py report                  # the table

An arm is a set of overrides. Only finished runs count, whose learning rate decayed to its end, by their loss on all held-out
rows. Runs of one seed see the same batches in all arms. At the first budget each arm, base arms too, tries three learning
rates: its rule's, half of that, and a third beyond the better of the two. An arm that is worse than its base there by more than
the interval, both at their best rates, is stopped. The larger budgets run at the best rate (the rule's, unless another beat it
by more than its interval), and then at the rule's; `report` shows both.

Finished runs are lines of dev/runs.jsonl, step times lines of dev/steptimes.jsonl. Two processes at the same time need separate
arms and files (--only=ARM,... --runs=FILE); the files' lines may be joined later. The data is text that every installation has,
prepared once in runs/recipe/data: prose, mathematics and code in equal parts, with a vocabulary of 4,096.
"""

import argparse
import dataclasses
import math
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Sequence

import bench_recipe_arms as arms_lib
import bench_recipe_peers
import bench_recipe_report
import bench_recipe_runs as runs_lib
from bench_recipe_runs import Fields, Run

from jaxlm.config import ConfigError
from jaxlm.data.shards import shards


def plan(args: argparse.Namespace) -> int:
    """Prints the runs still to do, in order, with their hours."""
    data = shards.open_data(args.data) if (args.data / shards.MANIFEST).is_file() else None
    about = say_data(data) if data else {"data": ""}
    state = arms_lib.look(args.runs, about["data"], args.only)
    say_state(state)
    total = 0.0
    for i, run in enumerate(state.to_come, 1):
        taken, how = arms_lib.seconds(run, state.done, args.tokens_per_second)
        total += taken
        print(f"{i:4}  {run!s:44} {taken / 60:6.1f} min ({how} speed)   {total / 3600:6.2f} h so far")
    print(f"{len(state.done)} runs are finished; {len(state.to_come)} to come take {total / 3600:.1f} hours")
    tokens = {shape: sum(run.tokens for run in state.to_come if run.shape == shape) for shape in arms_lib.SHAPES}
    print("tokens to come: " + ", ".join(f"{shape} {n / 1e6:g}M" for shape, n in tokens.items()))
    return 0


def say_state(state: arms_lib.State) -> None:
    for arm, why in state.left_out.items():
        print(f"{arm} is left out: {why}")
    for arm, why in state.stopped.items():
        print(f"{arm} is stopped: {why}")


def say_data(data: shards.DataDir) -> Fields:
    """Prints how much is held out and how many epochs the largest budget is; returns these fields for a line."""
    found = runs_lib.about(data, arms_lib.WEIGHTS, arms_lib.SEQ_LEN, arms_lib.BUDGETS[-1])
    epochs = ", ".join(f"{name} {times:g}" for name, times in found["epochs"].items())
    print(
        f"data {found['data']}: {found['train_tokens']:,} tokens to train on, {found['held_out_tokens']:,} held out, all "
        f"of which are measured; {arms_lib.BUDGETS[-1] / 1e6:g}M tokens are epochs of {epochs}"
    )
    return found


def run(args: argparse.Namespace) -> int:
    """Does the planned runs one after another; returns exit code 1 if one failed."""
    end = time.monotonic() + 3600 * args.hours
    failed: set[Run] = set()
    with runs_lib.lock(args.runs) as held:
        data = runs_lib.make_data(args.data, arms_lib.words(arms_lib.DATA), held)
        about = say_data(data)
        state = arms_lib.look(args.runs, about["data"], args.only)
        say_state(state)
        if not state.to_come and not state.done and state.left_out:
            raise ConfigError("no arm is left that this checkout can run")
        while to_come := [one for one in state.to_come if one not in failed]:
            fits = (one for one in to_come if time.monotonic() + arms_lib.seconds(one, state.done)[0] <= end)
            if not (one := next(fits, None)):
                print(f"{len(to_come)} runs are left, and none ends within --hours={args.hours:g}")
                break
            told = arms_lib.settings(one)
            try:
                line = runs_lib.train(
                    [*told, f"data.dir={args.data}"],
                    arms_lib.steps_of(one.tokens),
                    args.data.parent / f"run-{runs_lib.digest(str(args.runs))}",
                    held,
                )
            except ConfigError as error:
                failed.add(one)
                print(f"{one}: FAILED, {error}", flush=True)
                continue
            lr = next(word.partition("=")[2] for word in told if word.startswith("optim.lr="))
            line = dataclasses.asdict(one) | {"lr": float(lr), "asked": arms_lib.asked(one)} | line | about
            runs_lib.append(args.runs, line)
            print(f"{one}: " + runs_lib.short(line), flush=True)
            before = state.stopped
            state = arms_lib.look(args.runs, about["data"], args.only, state.left_out)
            for arm in state.stopped.keys() - before.keys():
                print(f"{arm} is stopped: {state.stopped[arm]}", flush=True)
    return 1 if failed else 0


def smallest_peers(args: argparse.Namespace) -> int:
    """Runs one step of the Trainer with nanochat's optimizer on little text, and keeps no figures."""
    arms_lib.SEEDS, args.tokens = (0,), arms_lib.BATCH * arms_lib.SEQ_LEN
    args.only = args.only or ("peer:nanochat",)
    arms_lib.DATA |= {key: 60_000 for key in arms_lib.DATA if key.endswith("max_bytes")}
    arms_lib.DATA |= {"prepare.workers": 1, "prepare.report_mb": 0}
    with tempfile.TemporaryDirectory() as folder:
        args.data, args.runs = pathlib.Path(folder, "data"), pathlib.Path(folder, "runs.jsonl")
        return bench_recipe_peers.main(args)


def options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("plan", "run", "report", "steptime", "peers"))
    parser.add_argument("--runs", type=pathlib.Path, default=pathlib.Path("dev/runs.jsonl"), help="finished runs")
    parser.add_argument("--data", type=pathlib.Path, default=pathlib.Path("runs/recipe/data"), help="made if missing")
    parser.add_argument("--only", type=lambda text: tuple(text.split(",")), default=(), metavar="ARM,...")
    parser.add_argument("--hours", type=float, default=8.0, help="run, peers: nothing begins that would end later")
    parser.add_argument("--tokens_per_second", type=float, default=0.0, help="plan: instead of what was measured")
    parser.add_argument("--steps", type=int, default=20, help="steptime: timed steps of each arm")
    parser.add_argument("--shape", default="S0", help="steptime: a shape, or a config such as gpuburnout_1b")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="steptime: a key of the config")
    parser.add_argument("--tokens", type=int, default=arms_lib.BUDGETS[0], help="peers: the budget of each")
    parser.add_argument("--usd_per_hour", type=float, default=0.0, help="report: tells dollars, not their ratio alone")
    parser.add_argument("--smallest", action="store_true", help="peers: a step of one, apart: to see that it works")
    args = parser.parse_args(argv)
    if not args.hours > 0:
        parser.error(f"--hours={args.hours:g} must be greater than 0")
    if not 0 <= args.usd_per_hour < math.inf:
        parser.error(f"--usd_per_hour={args.usd_per_hour:g} must be dollars, 0 or more")
    if args.smallest and args.command in ("run", "steptime"):
        parser.error(f"{args.command} has no smallest size: it has --only, --hours, --steps")
    args.data, args.runs = args.data.resolve(), args.runs.resolve()
    names = bench_recipe_peers.PEERS if args.command == "peers" else arms_lib.ARMS
    if strange := [name for name in args.only if name not in names]:
        parser.error(f"no {strange[0]!r}; there are {', '.join(names)}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = options(argv)
    try:
        if args.command == "steptime":
            import bench_recipe_steptime  # here, because it imports JAX

            return bench_recipe_steptime.main(args)
        if args.command == "peers" and args.smallest:
            return smallest_peers(args)
        commands = {"plan": plan, "run": run, "report": bench_recipe_report.main, "peers": bench_recipe_peers.main}
        return commands[args.command](args)
    except ConfigError as error:
        sys.exit(f"bench_recipe: {error}")
    except KeyboardInterrupt:
        sys.exit("bench_recipe: stopped; the same command goes on")
    except BrokenPipeError:  # as after `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


if __name__ == "__main__":
    sys.exit(main())
