"""`jaxlm sample`: continues prompts with the model of a run."""

import argparse

import jax

from jaxlm.config import Config, ConfigError
from jaxlm.devices.processes import say
from jaxlm.eval import model, samples
from jaxlm.host.console import print_table, working
from jaxlm.interop import peft


def run(config: Config, args: argparse.Namespace) -> int:
    """Prints each prompt of the command line, or of the config, with its continuation or answer (`sample.chat_template`)."""
    model.check_run(config, args.config)
    if args.draws < 1:
        raise ConfigError(f"--draws={args.draws}: how often to continue each prompt, at least once")
    prompts = [*args.words, *(args.prompt or ())] or list(config.sample.prompts)
    if not prompts:
        raise ConfigError('nothing to continue: jaxlm sample RUN "TEXT" ["ANOTHER" ...]')
    prompts = [prompt for prompt in prompts for _ in range(args.draws)]
    run = model.with_weights(config, model.restore(config, args.checkpoint, peft.READERS))
    say(run.name)
    context, new = run.model.config.max_seq_len, config.sample.max_new_tokens
    room = context - max(len(samples.prompt_ids(run.tokenizer, prompt, config.sample)) for prompt in prompts)
    if 0 < room < new:
        say(f"sample.max_new_tokens={new}, but after the longest prompt {room} fit in the context of {context} tokens")
    with jax.set_mesh(run.mesh):
        request = (run.model, run.variables, run.tokenizer, prompts, config.sample, config.seed)
        if args.json:
            texts = samples.continue_prompts(*request)
            if jax.process_index() == 0:
                rows = zip(prompts, texts, strict=True)
                print_table([{"prompt": p, "text": t, "step": run.step} for p, t in rows], True)
        else:
            with working("compiling"):
                stream = samples.Stream(*request)
            _show([f"{prompt}\n" for prompt in prompts] if config.sample.chat_template else prompts, stream)
    return 0


def _show(prompts: list[str], stream: samples.Stream) -> None:
    """Prints each prompt, streams its text, then prints the speed. All processes call it; only the first prints."""
    first, at = jax.process_index() == 0, -1
    for row, piece in stream:
        if first:
            _begin(prompts, at, row)
            print(piece, end="", flush=True)
        at = row
    if first:
        _begin(prompts, at, len(prompts))
    if stream.tokens:
        speed = f"{stream.tokens / stream.seconds:,.0f} tokens/s"
        say(f"{stream.tokens:,} tokens in {stream.seconds:.1f} s, {speed} (without compiling and reading the prompts)")


def _begin(prompts: list[str], at: int, row: int) -> None:
    """Ends the text of prompt `at`, and prints the prompts up to `row`; texts in between are empty."""
    for number in range(at, row):
        if number >= 0:
            print("\n")
        if number + 1 < len(prompts):
            print(prompts[number + 1], end="", flush=True)
