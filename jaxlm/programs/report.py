"""`jaxlm report RUN`: one page with everything that a run's files say. It may be asked for while the run goes on."""

import argparse
import json
import pathlib

from jaxlm.config import Config, ConfigError
from jaxlm.console import say
from jaxlm.train import outlook


def run(config: Config, args: argparse.Namespace) -> int:
    """Writes RUN/report.html, or with --json prints the same numbers."""
    if not config.workdir:
        raise ConfigError("which run? jaxlm report RUN, the folder of a run")
    folder = pathlib.Path(config.workdir)
    if not (folder / "metrics.jsonl").is_file():
        raise ConfigError(f"no run in {folder}: it has no metrics.jsonl; train first")
    if args.json:
        look = outlook.of_run(folder, config)
        print(json.dumps(look.summary(config.stop)))
        return 0
    say(f"open {outlook.write(config, folder)}")
    return 0
