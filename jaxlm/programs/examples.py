"""The examples of post-training: read, looked at, shown, made into batches; and the text that their model was trained on."""

import pathlib

import jax

from jaxlm import screen
from jaxlm.config import Config
from jaxlm.data import chat, coder, packed, replay, survey
from jaxlm.processes import from_first, say, together
from jaxlm.programs.task import Ready
from jaxlm.train import batches as batches_lib
from jaxlm.train import ledger, origin
from jaxlm.train.batches import LoaderBatches
from jaxlm.train.checkpoints import weights
from jaxlm.train.workdir import TOKENIZER


def data(
    config: Config, speaker: coder.Coder, text: replay.Text | None, pairs: bool, closed: bool = False
) -> packed.Packed:
    """Reads the examples, says what they are like and shows the first; keeps that and the tokenizer in the run's folder.

    Args:
      speaker: the tokenizer of the model.
      text: what is replayed between them; None for nothing.
      pairs: True for pairs, False for chats.
      closed: True: rows hold the last token of each text too.
    """
    folder = pathlib.Path(config.workdir)
    speaker = chat.dated(speaker, from_first(lambda: ledger.moment(folder)))
    together(lambda: coder.write(speaker, folder / TOKENIZER), first_only=True)
    sizes = packed.Sizes(config.seed, config.train.seq_len, config.train.batch_size)
    seen = survey.Survey(config.train.seq_len, survey.leaks_of(config.examples.benchmarks, config.prepare))
    given = {"pairs": pairs, "sizes": sizes, "replay": text, "share": config.replay.share}
    given |= {"say": say, "see": seen.see, "closed": closed}
    found = together(lambda: packed.make(config.data, config.examples, speaker, **given))
    together(lambda: seen.write(folder), first_only=True)
    if not from_first(lambda: weights.begun(folder / "checkpoints")):
        for line in [*seen.lines(), chat.told_ends(speaker), "the first one; marked is what counts:"]:
            say(line)
        if jax.process_index() == 0:
            screen.say_marked(survey.shown(found.train, speaker), screen.GREEN)
    elif line := from_first(lambda: origin.other_template(config, speaker)):
        say(line)
    return found


def base_text(config: Config, speaker: coder.Coder) -> replay.Text | None:
    """Returns the text that the base was trained on, or `replay.path`; None if it is not here, which is said."""
    path, d = config.replay.path or origin.pretrained_on(config.origin), config.data
    if not path:
        say(f"the text that {config.origin} was trained on is not here, so none is replayed: --config.replay.path=TEXT")
        return None
    keys = {"text_key": d.text_key, "val_fraction": d.val_fraction}
    return replay.open_text(path, speaker, **keys)


def batches(ready: Ready, done: int) -> LoaderBatches:
    """Returns the loader's batches, from step `done` + 1 on."""
    given = batches_lib.read(ready.data, ready.config.data, ready.parts, done)
    together(given.fill)
    return given
