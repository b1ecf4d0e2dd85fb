"""Supervised fine-tuning: chats -> the next token of each answer. Full, or by an adapter (`config.adapter`)."""

import argparse

from jaxlm.config import Config
from jaxlm.objectives import lm
from jaxlm.programs import posttraining, training


def run(config: Config, args: argparse.Namespace) -> int:
    """Trains to `train.steps` on the chats of `data.path`; returns the exit code."""
    del args
    return training.run(config, posttraining.task(config, lm.make, pairs=False))
