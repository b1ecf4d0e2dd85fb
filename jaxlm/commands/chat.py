"""`jaxlm chat`: a chat with the models of one or several runs, in the terminal."""

import argparse
import contextlib
import os
import pathlib
from collections.abc import Iterator

from jaxlm import config as config_lib
from jaxlm.config import Config, ConfigError, config_files
from jaxlm.data.chats import chat
from jaxlm.data.tokenizer.coder import ours
from jaxlm.devices.processes import say
from jaxlm.eval import model
from jaxlm.interop import inherit, peft
from jaxlm.serve.batcher import running
from jaxlm.serve.talk import Conversation, Talk, Terminal, Voice
from jaxlm.train import origin


def run(config: Config, args: argparse.Namespace) -> int:
    """Talks until ctrl-D, /quit or the end of standard input; returns 2 if a line of a file could not be answered, else 0."""
    if config.distributed.num_processes > 1:
        raise ConfigError("jaxlm chat runs in one process: start it without distributed.num_processes")
    chosen = [(config, args.checkpoint)]
    model.check_run(config, args.config)
    named = [word for word in args.words if "=" in word and not os.path.exists(config_files.at_step(word)[0])]
    for word in filter(lambda word: word not in named, args.words):
        folder, step = config_files.at_step(word)
        own = [override for override in args.overrides if not override.startswith("workdir=")]
        other = config_lib.resolve(inherit.of_folder(folder, own))
        model.check_run(other, folder)
        chosen.append((other, step or args.others_checkpoint))
    terminal = Terminal()
    names = _names([(other.workdir, checkpoint) for other, checkpoint in chosen])
    restored = [_restored(*one, args.plain, [] if number else named) for number, one in enumerate(chosen)]
    with contextlib.ExitStack() as stack:
        voices = []
        for run, name in zip(restored, names, strict=True):
            voices += stack.enter_context(_voices(run, name, args.plain))
        talk = Talk(voices, config.sample, config.seed, terminal)
        if args.system:
            talk.system(args.system)
        with contextlib.suppress(KeyboardInterrupt):  # the second ctrl-C during an answer
            for line in args.message or terminal.lines():
                if not talk.line(line):
                    break
    return 2 if talk.refused and not terminal.live else 0


def _names(runs: list[tuple[str, str]]) -> list[str]:
    """Returns the models' names: their folders' names; if two are equal, FOLDER@STEP; if still equal, PATH@STEP."""
    short = [pathlib.Path(folder).resolve().name for folder, _ in runs]
    if len({*short}) == len(short):
        return short
    short = [f"{name}@{step}" for name, (_, step) in zip(short, runs, strict=True)]
    return short if len({*short}) == len(short) else [f"{folder}@{step}" for folder, step in runs]


def _restored(config: Config, checkpoint: str, plain: bool, adapters: list[str]) -> model.Restored:
    run = model.with_weights(config, model.restore(config, checkpoint, peft.READERS, adapters))
    for line in filter(None, (run.name, origin.better(config, checkpoint))):
        say(line)
    of_text = config.program == "pretrain" and run.data and ours(run.tokenizer)
    if of_text and chat.speaks(run.tokenizer) and not plain:
        say("the model was trained on text, not on chats: --plain continues what you type")
    return run


@contextlib.contextmanager
def _voices(run: model.Restored, name: str, plain: bool) -> Iterator[list[Voice]]:
    """Yields the voice of a model, and those of the adapters beside it."""

    def talk(name: str, tokenizer) -> Conversation:
        has_none = not plain and not _has_template(tokenizer)
        if has_none:
            say(
                f"{name} has no chat template: it goes on with what you type (jaxlm train sft makes a model that answers)"
            )
        return Conversation(tokenizer, chat.ends(tokenizer), run.model.config.max_seq_len, plain or has_none)

    talks = {each: talk(each, tokenizer) for each, tokenizer in {name: run.tokenizer, **run.beside}.items()}
    with running(run.model, run.variables, run.mesh, rows=len(talks)) as batcher:
        yield [Voice(name, batcher, talk, number) for number, (name, talk) in enumerate(talks.items())]


def _has_template(tokenizer) -> bool:
    """True if a model has a chat template. Raises ConfigError if the template can't be read."""
    try:
        chat.template(tokenizer)
    except ConfigError:
        return False
    chat.Writer(tokenizer)
    return True
