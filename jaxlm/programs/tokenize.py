"""`jaxlm tokenize`: text -> tokenizer, shards and manifest."""

import argparse

from jaxlm.config import Config, ConfigError
from jaxlm.programs import setup
from jaxlm.programs.tables import print_table


def run(config: Config, args: argparse.Namespace) -> int:
    """Makes `data.dir`, or opens it when it is there, and prints what each source holds."""
    if not config.data.dir:
        raise ConfigError("no folder for the data: give --config.data.dir=DIR")
    setup.make_data(config)
    data, mixture = setup.data(config)
    rows = []
    for source in data.sources:
        train, val = data.entry(source, "train"), data.entry(source, "val")
        rows.append(
            {
                "source": source,
                "weight": mixture.get(source, 0.0),
                "documents": train["documents"] + val["documents"],
                "train_tokens": train["tokens"],
                "val_tokens": val["tokens"],
                "bytes_per_token": (train["bytes"] + val["bytes"]) / (train["tokens"] + val["tokens"]),
            }
        )
    print_table(rows, args.json)
    return 0
