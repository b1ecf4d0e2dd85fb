"""`jaxlm sample`: continues prompts with the model of a run."""

import argparse
import dataclasses
import pathlib

import jax

from jaxlm import models, sharding
from jaxlm.config import Config, ConfigError, MeshConfig, RunError
from jaxlm.data import shards
from jaxlm.eval import samples
from jaxlm.programs import setup
from jaxlm.programs.console import print_table
from jaxlm.train.checkpoint import Checkpointer, CorruptCheckpointError


def run(config: Config, args: argparse.Namespace) -> int:
    """Prints each prompt with its continuation; prompts come from --prompt, else from the config."""
    if not config.workdir:
        raise ConfigError("which run? give --config.workdir=DIR")
    prompts = args.prompt or list(config.sample.prompts)
    if not prompts:
        raise ConfigError('nothing to continue: give --prompt="TEXT", again for more than one')
    # A mesh of its own: the one that trained may need more devices than there are here.
    config = dataclasses.replace(config, mesh=MeshConfig(data=1, fsdp=-1, tensor=1))
    workdir = pathlib.Path(config.workdir)
    setup.check_same_model(workdir, config)
    mesh = setup.start(config)
    config = setup.for_platform(config, jax.devices()[0].platform)
    checkpointer = Checkpointer(workdir / "checkpoints", read_only=True)
    step = checkpointer.find(args.checkpoint)
    data = shards.open_data(config.data.dir)
    model = setup.build_model(config)
    abstract = models.abstract_params(model)
    where = sharding.tree_shardings(abstract, models.logical_axes(model), mesh)
    try:
        params = checkpointer.restore_params(step, abstract, where)
    except CorruptCheckpointError as error:
        others = [str(other) for other in checkpointer.steps() if other != step]
        hint = f"; try --checkpoint={others[-1]}" if others else ""
        raise RunError(f"{error}{hint}") from error
    finally:
        checkpointer.close()
    setup.say(f"checkpoint {step} of {config.workdir}")
    tokenizer = data.tokenizer()
    with jax.set_mesh(mesh):
        texts = samples.continue_prompts(config, model, params, tokenizer, prompts)
    if jax.process_index():
        return 0
    if args.json:
        print_table([{"prompt": p, "text": t, "step": step} for p, t in zip(prompts, texts, strict=True)], True)
    else:
        for prompt, text in zip(prompts, texts, strict=True):
            print(f"{prompt}{text}\n")
    return 0
