"""`jaxlm diff RUN_A RUN_B`: what differs between two runs, and the first step at which they part."""

import argparse
import json
import pathlib

from jaxlm.config import Config, ConfigError
from jaxlm.console import table
from jaxlm.train import differences


def run(config: Config, args: argparse.Namespace) -> int:
    """Prints a table of what went in differently, and a line of verdict."""
    if not args.other:
        raise ConfigError("which runs? jaxlm diff RUN_A RUN_B, the folders of two runs")
    found = differences.compare(pathlib.Path(config.workdir), pathlib.Path(args.other))
    if args.json:
        print(json.dumps(found))
        return 0
    rows = [[row["what"], row["name"], _short(row["a"]), _short(row["b"])] for row in found["inputs"]]
    if rows:
        print(table([["what", "name", "A", "B"], *rows]))
    else:
        print("code, config, data, packages, hardware and price are the same")
    print(found["verdict"])
    if found["held_out"]:
        print(found["held_out"])
    return 0


def _short(value: object) -> str:
    text = "" if value is None else str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
