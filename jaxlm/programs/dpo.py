"""DPO and its relatives: pairs of answers, of which one was preferred -> a model that prefers it. See `objectives/dpo.py`."""

import argparse
import dataclasses
import pathlib

import jax.numpy as jnp

from jaxlm.config import Config
from jaxlm.eval import loss
from jaxlm.objectives import dpo
from jaxlm.objectives.base import Variables
from jaxlm.processes import say
from jaxlm.programs import posttraining, training
from jaxlm.programs.task import Ready
from jaxlm.step.state import TrainState
from jaxlm.step.step import cast
from jaxlm.train import preferences, reference


def run(config: Config, args: argparse.Namespace) -> int:
    """Trains to `train.steps` on the pairs of `data.path`; returns the exit code."""
    del args
    watches = {"watches": lambda ready: preferences.of_dpo(ready.config, say)}
    return training.run(config, posttraining.task(config, dpo.make, pairs=True, begin=begin, **watches))


def begin(ready: Ready, state: TrainState, frozen: Variables) -> Ready:
    """Returns `ready` whose batches hold what the reference says, if the objective needs them to."""
    c, parts = ready.config, ready.parts
    if ready.data.train.margins_E.any():
        say("the margins of these pairs are not used: a reward model takes them, DPO does not")
    if not dpo.judged(c):
        return ready
    sizes = {"batch_size": c.eval.batch_size, "tile": c.loss.tile_tokens}

    def judge() -> reference.Judged:
        variables = frozen | cast(state.params, jnp.dtype(c.model.dtype))
        return loss.judge(parts.model, variables, ready.data, parts.mesh, **sizes)

    folder, done = pathlib.Path(c.workdir), int(state.step)
    return dataclasses.replace(ready, data=reference.of_run(folder, ready.data, done, frozen | state.params, judge))
