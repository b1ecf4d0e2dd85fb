"""`jaxlm sample`: continues prompts with the model of a run."""

import argparse
import pathlib

import jax

from jaxlm.config import Config, ConfigError
from jaxlm.console import print_table
from jaxlm.eval import model, samples
from jaxlm.processes import say


def run(config: Config, args: argparse.Namespace) -> int:
    """Prints each prompt with its continuation. The prompts come from --prompt, or if there is none, from the config."""
    if not config.workdir:
        raise ConfigError("which run? jaxlm sample RUN, the folder of a run (or --config.workdir=RUN)")
    if not (pathlib.Path(config.workdir) / "config.json").is_file():
        raise ConfigError(f"no run in {config.workdir}: jaxlm train {args.config} makes one there")
    prompts = args.prompt or list(config.sample.prompts)
    if not prompts:
        raise ConfigError('nothing to continue: give --prompt="TEXT", again for more than one')
    run = model.restore(config.workdir, args.checkpoint, config.model, config.data, config.hardware, config.distributed)
    say(f"checkpoint {run.step} of {config.workdir}")
    with jax.set_mesh(run.mesh):
        tokenizer = run.data.tokenizer()
        texts = samples.continue_prompts(run.model, run.params, tokenizer, prompts, config.sample, config.seed)
    if jax.process_index():
        return 0
    if args.json:
        print_table([{"prompt": p, "text": t, "step": run.step} for p, t in zip(prompts, texts, strict=True)], True)
    else:
        for prompt, text in zip(prompts, texts, strict=True):
            print(f"{prompt}{text}\n")
    return 0
