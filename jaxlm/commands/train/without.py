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
from jaxlm.data.batches.open import open_order
from jaxlm.data.shards import removal
from jaxlm.data.shards.mixture import step_of
from jaxlm.host import files
from jaxlm.host.console import count, dollars, duration, say
from jaxlm.run import ledger, metrics
from jaxlm.run.checkpoints import keep


@dataclasses.dataclass(frozen=True)
class Branch:
    """Where a branch begins, and what it costs.

    Attributes:
      first: the first step that saw one of the documents.
      begins: the step of the checkpoint, 0 for new weights.
      hours, usd: of the steps to repeat, by the run's own speed and price.
    """

    run: str
    documents: int
    first: int
    begins: int
    steps: int
    hours: float
    usd: float


def config(args: argparse.Namespace, overrides: Sequence[str]) -> config_dict.ConfigDict:
    """Returns the config of the branch. Raises ConfigError as `find` does, or if its folder is RUN's or another run's."""
    run, path = run_of(args), files.expanded(args.without)
    found = find(run, path)
    for line in lines(found):
        say(line)
    config = branch.begun(run, "without", found.begins)
    config.data.without = str(path.resolve())
    config.stability.skip = tuple(f"{first}:{last}" for first, last in ledger.read(run)["passed_over"])
    config = branch.finished(config, run, overrides)
    kept = pathlib.Path(config.workdir, removal.LIST)
    if kept.is_file() and kept.read_bytes() != path.read_bytes():
        raise ConfigError(
            f"{config.workdir} does without the documents of {kept}, not {path}: give another --config.workdir"
        )
    return config


def find(run: pathlib.Path, path: pathlib.Path) -> Branch:
    """Raises ConfigError if RUN's data has no such documents, RUN never reads them, or it began after it had seen them."""
    trunk, book = config_files.from_run(run / "config.json"), ledger.read(run)
    config = resolve(trunk)
    if config.program != "pretrain":
        raise ConfigError(f"{run} was trained on examples, not on documents: branch from the run that it came from")
    order = open_order(config, book["passed_over"])
    if order.removed:
        raise ConfigError(
            f"{run} does without documents already: name all in one list, and branch from the run before it"
        )
    order = dataclasses.replace(order, removed=removed.read(order.data, path))
    first = step_of(order.first_removed, order.passed_over)
    if first > config.train.steps:
        raise ConfigError(
            f"no document of {path} is read by step {config.train.steps}, the last of {run}: nothing would differ"
        )
    kept = [step for step in keep.steps(run / "checkpoints") if order.batch_number(step) < order.first_removed]
    if not kept and config.origin_state:
        raise ConfigError(f"{run} is a branch, and began after step {first}: branch from {config.origin}")
    begins = max(kept, default=0)
    steps, each_s = config.train.steps - begins, metrics.step_s(run / "metrics.jsonl", config)
    hours = steps * each_s / 3600
    usd = hours * config.hardware.usd_per_hour
    return Branch(str(run), order.removed.documents, first, begins, steps, hours, usd)


def lines(found: Branch) -> list[str]:
    """Returns what `jaxlm plan RUN --without=FILE` prints."""
    where = f"the checkpoint of step {found.begins:,}" if found.begins else "new weights"
    price = f" and {dollars(found.usd)}" if found.usd else ""
    said = [
        f"{count(found.documents)} of the training documents, first seen at step {found.first:,}: from {where}",
        f"{found.steps:,} steps to repeat: {duration(found.hours * 3600)}{price}, as {found.run} went",
    ]
    late = "no kept checkpoint is before it: checkpoint.keep_every=N would have kept every N-th"
    return said if found.begins else [*said, late]


def run_of(args: argparse.Namespace) -> pathlib.Path:
    """Returns the folder of the run that `args.config` names. Raises ConfigError if it names none."""
    return config_files.run_named(args.config, f"--without={args.without}", "jaxlm train RUN --without=FILE")
