"""`jaxlm sweep`: trains a config with several values of some keys on several seeds, and says which differences are noise."""

import argparse
import dataclasses
import importlib.util
import json
import math
import pathlib

from jaxlm.commands import report
from jaxlm.commands.train import text as pretrain
from jaxlm.config import Config, ConfigError
from jaxlm.data.batches.open import open_order
from jaxlm.host import console, files
from jaxlm.host.console import dollars, hours, say, table
from jaxlm.host.errors import pip_install
from jaxlm.plan import settle
from jaxlm.plan.flops import count_params
from jaxlm.plan.sweep import sweep
from jaxlm.plan.sweep.sweep import Sweep
from jaxlm.report import markup, runs_page
from jaxlm.run import metrics
from jaxlm.run.metrics import HELD_OUT
from jaxlm.run.survive import train_in_child

_SEEDS = 3  # of each arm, if --seeds says nothing


def run(config: Config, args: argparse.Namespace) -> int:
    """Trains the missing runs, and writes SWEEP/sweep.json and report.html. `args.arms` and more: as `cli` stores them."""
    rewards = config.program in ("ppo", "grpo")  # which have no held-out loss
    metric, _, best = (args.metric or ("val/reward:highest" if rewards else HELD_OUT)).partition(":")
    if best not in ("", "highest", "lowest"):
        raise ConfigError(f"--metric={args.metric}: after the name comes :highest, :lowest (the default), or nothing")
    args.metric, args.highest = metric, best == "highest"
    limit = _limit(config, args)
    train_in_child.check(config, args.config, args.overrides, "sweep")
    data, size, configs = config.data.path, 0, [arm for _, arm in args.arms]
    if config.program == "pretrain":
        order = pretrain.data(config)
        data, size = order.data.sha256, order.data.vocab_size
        configs = [settle.sized(arm, say, size) for arm in configs]
        for arm in configs:
            open_order(arm, check=False)  # refuses what does not fit the data
    folder = pathlib.Path(args.out or pathlib.Path(config.workdir, sweep.FOLDER, "-".join(args.own)))
    same = {"metric": args.metric, "highest": args.highest, "data": data}
    same |= {"search": json.dumps(args.space)} if args.search else {}
    arms = [{}] * (args.search or 0) or [values for values, _ in args.arms]
    plan = sweep.begin(config, folder, args.own, arms, 1 if args.search else args.seeds or _SEEDS, same)
    largest = [max(configs, key=lambda arm: count_params(arm.model))]
    rows = [sweep.row(arm) for arm in (largest if args.search else configs)]
    making = _Making(args, plan, folder, size, limit, sweep.cores(plan, rows))
    making.begin([row["hours"] for row in rows])
    left, price = making.left(), config.hardware.usd_per_hour
    if limit and left and left > limit and all(run["loss"] is None for run in plan["runs"]):
        paid = f" ({dollars(left * price)})" if price else ""
        raise ConfigError(f"these runs take about {hours(left)}{paid}, and {_flag(args, limit)} allows {hours(limit)}")
    head = "\n".join([sweep.runs(plan, left, price, len(making.cores)), *sweep.lines(plan)])
    if args.plan:
        print(json.dumps(plan) if args.json else head)
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    with files.lock(folder, "makes the sweep in", "--out"):
        console.keep(folder / console.LOG)
        say(head)
        sweep.write(folder, plan)
        code = making.train()
        making.page()
    if tables := sweep.tables(plan):
        print(json.dumps(plan) if args.json else "\n\n".join([*map(table, tables), "\n".join(sweep.lines(plan))]))
    return code


def _limit(config: Config, args: argparse.Namespace) -> float | None:
    """Returns the hours that --hours and --usd allow; None without either. Raises ConfigError for bad options."""
    price = config.hardware.usd_per_hour
    if len(args.arms) < 2:
        a_range = f"with --search={args.search or 'RUNS'} a range: --config.optim.lr=1e-4..1e-2"
        words = f"give a key several values, such as --config.optim.lr=1e-3,2e-3, or {a_range}"
        raise ConfigError(f"nothing to compare: {words}")
    ranges = [key for key, values in args.space.items() if isinstance(values, tuple)]
    if ranges and args.search is None:
        raise ConfigError(f"config.{ranges[0]} has a range of values: give --search=RUNS, or values with commas")
    if args.search and (args.one_at_a_time or (args.seeds or 1) > 1):
        raise ConfigError("--search chooses what goes together, on one seed: leave --seeds and --one-at-a-time out")
    if args.search and not ranges and args.search > len(args.arms):
        few = f"the values have only {len(args.arms)} combinations"
        raise ConfigError(f"--search={args.search}: {few}: give fewer runs, or leave --search out, and all are trained")
    if args.search and not importlib.util.find_spec("optuna"):
        raise ConfigError(f"--search needs Optuna: {pip_install('search')}")
    for name in ("hours", "usd", "seeds", "search"):
        if (value := getattr(args, name)) is not None and not 0 < value < math.inf:
            raise ConfigError(f"--{name}={value:g} must be above 0 and finite")
    if args.usd and not price:
        raise ConfigError(f"--usd={args.usd:g} needs the machine's price: --config.hardware.usd_per_hour=USD")
    if args.metric == HELD_OUT and (key := next((key for key in args.own if key.startswith("dpo.")), None)):
        raise ConfigError(f"config.{key} changes {HELD_OUT} itself: --metric=val/accuracy:highest compares the runs")
    return min(filter(None, [args.hours, args.usd and args.usd / price]), default=None)


def _flag(args: argparse.Namespace, limit: float) -> str:
    """Returns the option that the limit in hours comes from."""
    return "--hours" if limit == args.hours else "--usd"


@dataclasses.dataclass(frozen=True)
class _Making:
    """The runs of a sweep. `size`: of the data's vocabulary, or 0; `limit`: hours; `cores`: of each run at a time."""

    args: argparse.Namespace
    plan: Sweep
    folder: pathlib.Path
    size: int
    limit: float | None
    cores: list[list[int]]
    seen: dict[str, int] = dataclasses.field(default_factory=dict)  # run -> evaluations that the pruner has seen

    def begin(self, alone: list[float | None]) -> None:
        """Puts what the runs have done into their entries. `alone`: the hours of each arm's run that has the machine alone."""
        for run in self.plan["runs"]:
            each = alone[run["arm"] % len(alone)]
            run["planned_hours"] = each and each * len(self.cores)
        for run in self.plan["runs"]:
            if self.plan["arms"][run["arm"]]:
                self._note(run, self.config_of(run))
        sweep.conclude(self.plan, self.folder)

    def train(self) -> int:
        """Trains the runs that are not done; returns the exit code."""
        ways = self.config_of, self.after, self.refused, self.cores, self.stopped
        return train_in_child.train_all(self.plan["runs"], *ways)

    def left(self) -> float | None:
        """Returns the hours until all runs are done; None: unknown."""
        each = [run["planned_hours"] for run in self.plan["runs"] if not train_in_child.done(run)]
        return None if None in each else sum(each) / len(self.cores)

    def config_of(self, run: Sweep) -> Config:
        arms, place = self.plan["arms"], run["arm"]
        if not arms[place]:
            from jaxlm.plan.sweep import search  # needs Optuna

            arms[place] = search.ask(self.args.space, self.plan, self.folder)
            sweep.write(self.folder, self.plan)
        _, arm = self.args.arm([f"{key}={value}" for key, value in arms[place].items()])
        return sweep.of_run(run, self.folder, settle.sized(arm, say, self.size) if self.size else arm, len(self.cores))

    def refused(self, run: Sweep) -> str:
        each = [train_in_child.spent(self.folder / "runs" / other["name"]) for other in self.plan["runs"]]
        spent, needed = sum(each) / len(self.cores), max((run["planned_hours"] or 0.0) - run["hours"], 0.0)
        if not self.limit or spent + needed <= self.limit:
            return ""
        of = f"{hours(spent)} of {hours(self.limit)} are spent"
        return f"it takes about {hours(needed)}, and {of}; a higher {_flag(self.args, self.limit)} goes on"

    def stopped(self, run: Sweep, config: Config) -> str:
        """Returns "pruned at step N" if the search's pruner stops the run."""
        path = pathlib.Path(config.workdir, "metrics.jsonl")
        curve = metrics.held_out_losses(path, (), self.args.metric) if self.args.search else {}
        if len(curve) == self.seen.get(run["name"], 0) or max(curve) >= config.train.steps:
            return ""
        from jaxlm.plan.sweep import search

        self.seen[run["name"]] = len(curve)
        pruned = search.pruned(self.args.space, self.plan, self.folder, run["arm"])
        return f"pruned at step {max(curve):,}" if pruned else ""

    def after(self, run: Sweep, config: Config, why: str) -> None:
        self._note(run, config)
        run["why"] = run["why"] or (why if run["loss"] is None else "")
        sweep.write(self.folder, self.plan)

    def _note(self, run: Sweep, config: Config) -> None:
        """Puts what a run has taken, and its result if it is done, into its entry. Raises ConfigError without the metric."""
        metric = self.args.metric
        run |= {"loss": None, "hours": train_in_child.spent(pathlib.Path(config.workdir))}
        if measured := train_in_child.result(config, {}, metric):
            run |= {"loss": measured.loss, "why": "" if measured.loss is not None else f"{metric} is not finite"}
            for other in self.plan["runs"]:
                if other["arm"] == run["arm"] or not other["planned_hours"]:
                    other["planned_hours"] = measured.hours
        elif not run["why"] and train_in_child.result(config, {}):
            raise ConfigError(f"{config.workdir} is done and has no {metric}: give another --metric of metrics.jsonl")

    def page(self) -> None:
        """Writes the page on the runs that are done."""
        places = [self.folder / "runs" / run["name"] for run in self.plan["runs"] if train_in_child.done(run)]
        if not (tables := sweep.tables(self.plan)):
            return
        parts = [markup.tag("p", line) for line in sweep.lines(self.plan)]
        for head, *rows in tables:  # names in a cell that wraps: on a phone a row's header is cut
            named = [(i, markup.cell(name, kind="text"), *cells) for i, (name, *cells) in enumerate(rows, start=1)]
            parts.append(markup.table(["", *head], named, head[0]))
        path = self.folder / markup.NAME
        begun = [place for place in places if (place / "metrics.jsonl").is_file()]
        runs_page.write(path, *report.gather(begun), {"What can be told apart": markup.join(parts)})
        say(f"open {path}")
