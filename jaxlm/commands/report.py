"""`jaxlm report RUN`: one page with everything that a run's files say, also while the run goes on."""

import argparse
import json
import pathlib

from jaxlm.config import Config, ConfigError
from jaxlm.host.console import say, table
from jaxlm.report import markup, run_page
from jaxlm.run import lineage
from jaxlm.train import outlook


def run(config: Config, args: argparse.Namespace) -> int:
    """Writes RUN/report.html, or with --json prints the same numbers. With --took, also prints the commands' times."""
    folder = pathlib.Path(config.workdir)
    if not (folder / "metrics.jsonl").is_file():
        raise ConfigError(f"no run in {folder}: it has no metrics.jsonl; train first")
    took = lineage.commands(pathlib.Path(args.took), config.hardware.usd_per_hour) if args.took else []
    summary = outlook.of_run(folder, config).summary(config.stop) | {"commands": took}
    if args.json:
        print(json.dumps(summary))
        return 0
    outlook.write(folder, summary)
    if took:
        print(table(run_page.command_cells(took), right=(1, 2)))
    say(f"open {folder / markup.NAME}")
    return 0
