"""GRPO and its relatives: the answers to one prompt are compared with each other. See `objectives/policy.py`."""

import argparse

from jaxlm.config import Config
from jaxlm.programs import reinforcement, training


def run(config: Config, args: argparse.Namespace) -> int:
    """Trains to `train.steps` on the rewards of `config.reward`; returns the exit code."""
    del args
    return training.run(config, reinforcement.task(config))
