"""`jaxlm report RUN`: one page with everything that a run's files say. It may be asked for while the run goes on."""

import argparse
import json
import pathlib

from jaxlm.config import Config, ConfigError
from jaxlm.console import say
from jaxlm.report import run as page
from jaxlm.train import summary


def run(config: Config, args: argparse.Namespace) -> int:
    """Writes RUN/report.html, or with --json prints the same numbers."""
    folder = pathlib.Path(config.workdir)
    if not (folder / "metrics.jsonl").is_file():
        raise ConfigError(f"nothing to report: {folder} has no metrics.jsonl; train first")
    found = summary.gather(folder)
    if args.json:
        print(json.dumps(found))
        return 0
    path = folder / "report.html"
    page.write(path, found)
    say(f"wrote {path}")
    return 0
