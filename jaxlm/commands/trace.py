"""`jaxlm trace`: shows which documents were in the batch of a step."""

import argparse
import pathlib

from jaxlm.config import Config, ConfigError
from jaxlm.data.batches import document_rows
from jaxlm.data.batches.open import open_order
from jaxlm.host.console import print_table, say
from jaxlm.run import ledger, metrics


def run(config: Config, args: argparse.Namespace) -> int:
    """Prints the documents that step N (counted from 1) trained on."""
    if args.step < 1:
        raise ConfigError(f"--step={args.step}: steps are counted from 1")
    if args.step > config.train.steps:
        raise ConfigError(f"--step={args.step}: the run ends at step {config.train.steps} (train.steps)")
    folder = pathlib.Path(config.workdir) if config.workdir else None
    done = max((record["step"] for record in metrics.records(folder / "metrics.jsonl")), default=0) if folder else 0
    if 0 < done < args.step:
        say(f"step {args.step} is still to come, {folder} is at step {done}: this is what it will train on")
    order = open_order(config, ledger.read(folder)["passed_over"] if folder else ())
    table = []
    for row in document_rows.describe_batch(order, args.step - 1, snippet_chars=200 if args.json else 60):
        for document in row.documents:
            table.append(
                {
                    "slot": row.slot,
                    "source": row.source,
                    "epoch": row.epoch,
                    "row": row.row,
                    "document": document.doc_id,
                    "first_token": document.first_token,
                    "tokens": document.tokens,
                    "text": document.text if args.json else " ".join(document.text.split()),
                }
            )
    print_table(table, args.json)
    return 0
