"""`jaxlm sweep`: trains a config with several values of some keys on several seeds, and says which differences are noise."""

import argparse
import json
import math
import pathlib

from jaxlm.commands import report
from jaxlm.commands.train import text as pretrain
from jaxlm.config import Config, ConfigError
from jaxlm.data.batches.open import open_order
from jaxlm.host import files
from jaxlm.host.console import dollars, hours, say, table
from jaxlm.plan import settle
from jaxlm.plan.sweep import sweep
from jaxlm.plan.sweep import text as sweep_text
from jaxlm.plan.sweep.sweep import Sweep
from jaxlm.report import markup, runs_page
from jaxlm.run.metrics import HELD_OUT
from jaxlm.run.survive import train_in_child


def run(config: Config, args: argparse.Namespace) -> int:
    """Trains the missing runs, and writes SWEEP/sweep.json and report.html. `args.arms`: as `sweep.begin` takes them."""
    if len(args.arms) < 2:
        raise ConfigError("nothing to compare: give a key several values, such as --config.optim.lr=1e-3,2e-3")
    limit = _limit(config, args)
    train_in_child.check(config, args.config, args.overrides, "sweep")
    data, arms = config.data.path, args.arms
    if config.program == "pretrain":
        order = pretrain.data(config)
        data, size = order.data.sha256, order.data.vocab_size
        arms = [(values, settle.sized(arm, say, size)) for values, arm in arms]
        for _, arm in arms:
            open_order(arm, check=False)  # refuses what does not fit the data
    folder = pathlib.Path(args.out or pathlib.Path(config.workdir, sweep.FOLDER, "-".join(args.own)))
    same = {"metric": args.metric, "highest": args.highest, "data": data}
    plan, configs = sweep.begin(config, folder, args.own, arms, args.seeds, same)
    planned = [sweep.planned_hours(own) for own in configs[: len(arms)]]
    for run in plan["runs"]:
        run["planned_hours"] = planned[run["arm"]]
    for run, own in zip(plan["runs"], configs, strict=True):
        _note(plan, run, own)
    sweep.conclude(plan, folder)
    each = [run["planned_hours"] for run in plan["runs"] if run["loss"] is None and not run["why"]]
    left, price = None if None in each else sum(each), config.hardware.usd_per_hour
    if limit and left and left > limit and all(run["loss"] is None for run in plan["runs"]):
        paid = f" ({dollars(left * price)})" if price else ""
        raise ConfigError(f"these runs take about {hours(left)}{paid}, and --hours or --usd allows {hours(limit)}")
    head = "\n".join([sweep_text.runs(plan, left, price), *sweep_text.lines(plan)])
    if args.plan:
        print(json.dumps(plan) if args.json else head)
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    with files.lock(folder, "makes the sweep in", "--out"):
        say(head)
        sweep.write(folder, plan)

        def after(run: Sweep, own: Config, why: str) -> None:
            _note(plan, run, own)
            run["why"] = run["why"] or (why if run["loss"] is None else "")
            sweep.write(folder, plan)

        code = train_in_child.train_all(plan["runs"], configs, after, lambda run: _refused(plan, run, limit))
        _page(folder, plan)
    if tables := sweep_text.tables(plan):
        print(json.dumps(plan) if args.json else "\n\n".join([*map(table, tables), "\n".join(sweep_text.lines(plan))]))
    return code


def _limit(config: Config, args: argparse.Namespace) -> float | None:
    """Returns the hours that --hours and --usd allow; None without either. Raises ConfigError for bad options."""
    price = config.hardware.usd_per_hour
    for name in ("hours", "usd", "seeds"):
        if (value := getattr(args, name)) is not None and not 0 < value < math.inf:
            raise ConfigError(f"--{name}={value:g} must be above 0 and finite")
    if args.usd and not price:
        raise ConfigError(f"--usd={args.usd:g} needs the machine's price: --config.hardware.usd_per_hour=USD")
    if args.metric == HELD_OUT and (key := next((key for key in args.own if key.startswith("dpo.")), None)):
        raise ConfigError(f"config.{key} changes {HELD_OUT} itself: --metric=val/accuracy --highest compares the runs")
    return min(filter(None, [args.hours, args.usd and args.usd / price]), default=None)


def _refused(plan: Sweep, run: Sweep, limit: float | None) -> str:
    spent = sum(other["hours"] for other in plan["runs"])
    needed = max((run["planned_hours"] or 0.0) - run["hours"], 0.0)
    if not limit or spent + needed <= limit:
        return ""
    return f"it takes about {hours(needed)}, and {hours(spent)} of {hours(limit)} are spent; a higher limit goes on"


def _note(plan: Sweep, run: Sweep, config: Config) -> None:
    """Puts what a run has taken, and its result if it is done, into its entry. Raises ConfigError without the metric."""
    metric = plan["same"]["metric"]
    run |= {"loss": None, "hours": train_in_child.spent(config)}
    if measured := train_in_child.result(config, {}, metric):
        run |= {"loss": measured.loss, "why": "" if measured.loss is not None else f"{metric} is not finite"}
        for other in plan["runs"]:
            if other["arm"] == run["arm"] or not other["planned_hours"]:
                other["planned_hours"] = measured.hours
    elif not run["why"] and train_in_child.result(config, {}):
        raise ConfigError(f"{config.workdir} is done and has no {metric}: give another --metric, of its metrics.jsonl")


def _page(folder: pathlib.Path, plan: Sweep) -> None:
    """Writes the page on the runs that are done."""
    done = [folder / "runs" / run["name"] for run in plan["runs"] if run["loss"] is not None]
    if tables := sweep_text.tables(plan):
        parts = [markup.tag("p", line) for line in sweep_text.lines(plan)]
        for head, *rows in tables:  # names in a cell that wraps: on a phone a row's header is cut
            named = [(i, markup.cell(name, kind="text"), *cells) for i, (name, *cells) in enumerate(rows, start=1)]
            parts.append(markup.table(["", *head], named, head[0]))
        runs_page.write(folder / markup.NAME, *report.gather(done), {"What can be told apart": markup.join(parts)})
        say(f"open {folder / markup.NAME}")
