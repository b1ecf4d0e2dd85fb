"""`jaxlm report RUN`: one page with everything that a run's files say. It may be asked for while the run goes on."""

import argparse
import json
import pathlib

from jaxlm.config import Config, ConfigError
from jaxlm.console import say
from jaxlm.report import run as page
from jaxlm.train import metrics, outlook


def run(config: Config, args: argparse.Namespace) -> int:
    """Writes RUN/report.html, or with --json prints the same numbers."""
    if not config.workdir:
        raise ConfigError("which run? jaxlm report RUN, the folder of a run")
    folder = pathlib.Path(config.workdir)
    if not (folder / "metrics.jsonl").is_file():
        raise ConfigError(f"nothing to report: {folder} has no metrics.jsonl; train first")
    look = outlook.of_run(folder, config.optim, config.train, config.hardware)
    step = max((record["step"] for record in metrics.records(folder / "metrics.jsonl")), default=0)
    found = look.summary(step, config.stop)
    if args.json:
        print(json.dumps(found))
        return 0
    path = folder / "report.html"
    page.write(path, found)
    say(f"wrote {path}")
    return 0
