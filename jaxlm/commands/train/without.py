"""`jaxlm train RUN --without=FILE`: what a run would have been without some documents, as a branch in its own folder.

The branch begins at the newest kept checkpoint before the first batch that holds one of the documents. Imports no JAX,
because the supervisor calls it too.
"""

import argparse
import dataclasses
import pathlib
from collections.abc import Sequence

from ml_collections import config_dict

from jaxlm.config import ConfigError, branch, config_files, resolve
from jaxlm.data.batches import removed
from jaxlm.data.batches.open import check_list, open_order
from jaxlm.data.shards.mixture import step_of
from jaxlm.host import files
from jaxlm.host.console import costs, say, several
from jaxlm.run import ledger, metrics
from jaxlm.run.checkpoints import keep


def config(args: argparse.Namespace, overrides: Sequence[str]) -> config_dict.ConfigDict:
    """Returns the config of the branch. Raises ConfigError as `find` does, or if its folder is RUN's or another run's."""
    start, path = find(args, overrides), files.expanded(args.without)
    run = pathlib.Path(start["run"])
    for line in lines(start):
        say(line)
    config = branch.begun(run, "without", start["begins"])
    config.data.without = str(path.resolve())
    config.stability.skip = tuple(f"{first}:{last}" for first, last in ledger.read(run)["passed_over"])
    config = branch.finished(config, run, overrides)
    check_list(pathlib.Path(config.workdir), path)
    return config


def find(args: argparse.Namespace, overrides: Sequence[str]) -> dict:
    """Returns where the branch of the run `args.config` without the list `args.without` begins, and what it costs.

    first: the first step that saw one of the `documents`; begins: the step of the checkpoint, 0 for new weights; hours, usd:
    of the `steps` to repeat, by the run's own speed and price. Of the overrides only `data.dir` counts.

    Raises ConfigError if there is no such run, its data has no such documents, it never reads them, or it began after it had
    seen them.
    """
    run = config_files.run_named(args.config, f"--without={args.without}", "jaxlm train (or plan) RUN --without=FILE")
    path = files.expanded(args.without)
    moved = [override for override in overrides if override.startswith("data.dir=")]
    config, book = resolve(config_files.of_run(run, moved)), ledger.read(run)
    if config.program != "pretrain":
        raise ConfigError(f"{run} was trained on examples, not on documents: branch from the run that it came from")
    order = open_order(config, book["passed_over"])
    if order.removed:
        raise ConfigError(f"{run} does without documents already: branch from its origin, with all in one list")
    order = dataclasses.replace(order, removed=removed.read(order.data, path))
    first = step_of(order.first_removed, order.passed_over)
    if first > config.train.steps:
        raise ConfigError(f"{run} reads no document of {path} by its last step, {config.train.steps}: nothing differs")
    earlier = [step for step in keep.steps(run / "checkpoints") if order.batch_number(step) < order.first_removed]
    if not earlier and config.origin_state:
        raise ConfigError(f"{run} is a branch, and began after step {first}: branch from {config.origin}")
    begins, usd_per_hour = max(earlier, default=0), config.hardware.usd_per_hour
    hours = (steps := config.train.steps - begins) * metrics.step_s(run / "metrics.jsonl", config) / 3600
    documents = sum(map(len, order.removed.places.values()))
    start = {"run": str(run), "documents": documents, "first": first, "begins": begins, "steps": steps}
    return start | {"hours": hours, "usd": hours * usd_per_hour, "usd_per_hour": usd_per_hour}


def lines(start: dict) -> list[str]:
    """Returns what `jaxlm plan RUN --without=FILE` prints."""
    where = f"the checkpoint of step {start['begins']:,}" if start["begins"] else "new weights"
    price = costs(start["hours"] * 3600, start["usd_per_hour"])
    late = "no kept checkpoint is before it: checkpoint.keep_every=N would have kept every N-th"
    return [
        f"{several(start['documents'], 'training document')}, first seen at step {start['first']:,}: from {where}",
        f"{several(start['steps'], 'step')} to repeat: {price}, as {start['run']} went",
        *([] if start["begins"] else [late]),
    ]
