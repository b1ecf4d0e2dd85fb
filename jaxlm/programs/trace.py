"""`jaxlm trace`: which documents were in the batch of a step."""

import argparse

from jaxlm.config import Config, ConfigError
from jaxlm.console import print_table
from jaxlm.data import trace
from jaxlm.data.open import open_mixture


def run(config: Config, args: argparse.Namespace) -> int:
    """Prints the documents that step N trained on: the N-th update, counted from 1 as in metrics.jsonl."""
    if args.step < 1:
        raise ConfigError(f"--step={args.step}: steps are counted from 1")
    data, mixture = open_mixture(config.data, config.prepare, config.model.vocab_size)
    batch = trace.describe_batch(
        data,
        mixture,
        seed=config.seed,
        seq_len=config.train.seq_len,
        batch_size=config.train.batch_size,
        step=args.step - 1,
        snippet_chars=200 if args.json else 60,
    )
    rows = []
    for row in batch:
        for document in row.documents:
            rows.append(
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
    print_table(rows, args.json)
    return 0
