"""`jaxlm diff RUN_A RUN_B`: what differs between two runs, and the first step with different metrics."""

import argparse
import json
import pathlib

from jaxlm.config import Config, ConfigError
from jaxlm.host.console import table
from jaxlm.run import differences


def run(config: Config, args: argparse.Namespace) -> int:
    """Prints a table of the different inputs, and the verdict."""
    if not args.other:
        raise ConfigError("which runs? jaxlm diff RUN_A RUN_B, the folders of two runs")
    differing = differences.compare(pathlib.Path(config.workdir), pathlib.Path(args.other))
    if args.json:
        print(json.dumps(differing))
        return 0
    rows = [[row["what"], row["name"], _short(row["a"]), _short(row["b"])] for row in differing["inputs"]]
    same = "code, config, data, packages, hardware and price are the same"
    print(table([["what", "name", "A", "B"], *rows]) if rows else same)
    print(differing["verdict"])
    a, b = differing["last_held_out"]
    if differing["held_out"]:
        print(differing["held_out"])
    elif a is not None and b is not None:
        print(f"last held-out loss: A {a:.4f}, B {b:.4f}, B - A {b - a:+.4f}")
    return 0


def _short(fact: object) -> str:
    text = "" if fact is None else str(fact)
    return text if len(text) <= 40 else f"{text[:37]}..."
