"""`jaxlm chat`: a talk with the models of one or several runs, in the terminal."""

import argparse
import contextlib
import pathlib
from collections.abc import Iterator

import jax

from jaxlm import config as config_lib
from jaxlm import config_files
from jaxlm.config import Config, ConfigError
from jaxlm.console import working
from jaxlm.data import chat
from jaxlm.data.coder import ours
from jaxlm.eval import model
from jaxlm.interop import inherit, readers
from jaxlm.processes import say
from jaxlm.serve.batcher import Batcher
from jaxlm.serve.conversation import Conversation, Voice
from jaxlm.serve.talk import Talk
from jaxlm.serve.terminal import Terminal
from jaxlm.train import origin


def run(config: Config, args: argparse.Namespace) -> int:
    """Talks until ctrl-D, /quit or the end of standard input; returns 2 if a line of a file could not be answered, else 0.

    Raises:
      ConfigError: there is no such run or model.
    """
    if not config.workdir:
        raise ConfigError("which run? jaxlm chat RUN, the folder of a run (or of a Hugging Face model)")
    if config.distributed.num_processes > 1:
        raise ConfigError("jaxlm chat runs in one process: start it without distributed.num_processes")
    given = [(config, args.step or args.checkpoint, args.config)]
    for word in args.words:
        folder, step = config_files.at_step(word)
        given.append((_config(folder, args.overrides), step or args.checkpoint, folder))
    for one, _, word in given:
        if not model.is_there(one.workdir):
            raise ConfigError(f"no run in {one.workdir}: jaxlm train {word} makes one there")
    terminal = Terminal()
    names = _names([(one.workdir, step) for one, step, _ in given])
    restored = [_restored(one, step, args.plain) for one, step, _ in given]
    with contextlib.ExitStack() as stack:
        pairs = zip(restored, names, strict=True)
        voices = [stack.enter_context(_voice(found, name, args.plain)) for found, name in pairs]
        talk = Talk(voices, config.sample, config.seed, terminal)
        if args.system:
            talk.system(args.system)
        with contextlib.suppress(KeyboardInterrupt):  # the second one during an answer
            for line in args.message or terminal.lines():
                if not talk.line(line):
                    break
    return 2 if talk.refused and not terminal.live else 0


def _config(folder: str, overrides: list[str]) -> Config:
    """The config of another run, or of a model from elsewhere."""
    own = [override for override in overrides if not override.startswith("workdir=")]
    return config_lib.resolve(inherit.of_folder(folder, own))


def _names(given: list[tuple[str, str]]) -> list[str]:
    """What the models are called: by their folders; with their steps or by all of the path where that is not enough."""
    short = [pathlib.Path(folder).resolve().name for folder, _ in given]
    if len({*short}) == len(short):
        return short
    short = [f"{name}@{step}" for name, (_, step) in zip(short, given, strict=True)]
    return short if len({*short}) == len(short) else [f"{folder}@{step}" for folder, step in given]


def _restored(config: Config, checkpoint: str, plain: bool) -> model.Restored:
    parts = (config.model, config.data, config.hardware, config.distributed)
    found = model.restore(config.workdir, checkpoint, *parts, readers=readers.READERS)
    for line in filter(None, (found.name, origin.better(config, checkpoint))):
        say(line)
    of_text = config.program == "pretrain" and found.data and ours(found.tokenizer)
    if of_text and chat.speaks(found.tokenizer) and not plain:
        say("it was trained on text, not on chats: --plain lets it go on with what you type")
    return found


@contextlib.contextmanager
def _voice(found: model.Restored, name: str, plain: bool) -> Iterator[Voice]:
    """A restored model that answers, compiled."""
    if not plain and not _has_template(found.tokenizer):
        say(f"{name} has no chat template: it goes on with what you type (jaxlm train sft makes a model that answers)")
        plain = True
    with jax.set_mesh(found.mesh):
        batcher = Batcher(found.model, found.variables, rows=1)
        with contextlib.closing(batcher):
            with working("compiling") as tell:
                batcher.warm(lambda line: tell(0, line))
            context, ends = found.model.config.max_seq_len, chat.ends(found.tokenizer)
            yield Voice(name, batcher, Conversation(found.tokenizer, ends, context, plain))


def _has_template(tokenizer) -> bool:
    """Whether a model has a chat template. Raises ConfigError if it has one that can't be read."""
    try:
        chat.template(tokenizer)
    except ConfigError:
        return False
    chat.Writer(tokenizer)
    return True
