"""Reward models: pairs of answers, of which one was preferred -> a score of answers. See `objectives/reward.py`."""

import argparse

from jaxlm.config import Config
from jaxlm.objectives import reward
from jaxlm.processes import say
from jaxlm.programs import posttraining, training
from jaxlm.train import preferences


def run(config: Config, args: argparse.Namespace) -> int:
    """Trains to `train.steps` on the pairs of `data.path`; returns the exit code."""
    del args
    others = {"watches": lambda ready: preferences.of_reward(ready.config, say)}
    others |= {
        "next_command": "jaxlm train ppo --config.origin=SFT_RUN --config.reward.model={} --config.data.path=PROMPTS"
    }
    return training.run(config, posttraining.task(config, reward.make, pairs=True, closed=True, **others))
