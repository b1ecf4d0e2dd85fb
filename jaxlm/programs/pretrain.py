"""Pretraining: text -> tokens -> next-token prediction. Run it again to resume; raise `train.steps` to continue."""

import argparse
import pathlib

import jax

from jaxlm.config import Config, ConfigError
from jaxlm.data import passes, rows, trace, vocabulary
from jaxlm.data.open import make_data, open_order
from jaxlm.eval import loss
from jaxlm.interop import readers
from jaxlm.objectives import lm
from jaxlm.processes import say, together
from jaxlm.programs import training
from jaxlm.programs.task import Ready, Task
from jaxlm.train import batches as batches_lib
from jaxlm.train import origin, workdir
from jaxlm.train.batches import LoaderBatches
from jaxlm.train.checkpoints import weights


def run(config: Config, args: argparse.Namespace) -> int:
    """Trains to `train.steps`; returns the exit code."""
    del args
    if config.adapter.kind != "none":
        raise ConfigError(
            f"config.adapter.kind={config.adapter.kind} is for sft, reward and dpo; this trains all parameters"
        )
    first = {"origin": first_weights, "passes": passes.passes, "switch": rows.Rows.switch}
    return training.run(config, Task(lm.make, data, batches, held_out, **first, documents=trace.documents))


def first_weights(config: Config) -> origin.Origin | None:
    """Returns the run or the model whose weights this one begins with; None for new weights.

    A run that was imported begins with its own weights.
    """
    if weights.imported(pathlib.Path(config.workdir) / "checkpoints"):
        return origin.open(config.workdir)
    return origin.begin(config, readers.READERS)


def data(config: Config) -> rows.Rows:
    """Returns the shards in `data.dir` and the order in which training reads them.

    Builds the shards first if they are missing.
    """
    d, prepare, vocab_size = config.data, config.prepare, vocabulary.required(config)
    together(lambda: workdir.check_data_seed(config), first_only=True)
    together(lambda: make_data(d, prepare, config.engine, vocab_size, say), first_only=True)
    return together(lambda: open_order(config))


def batches(ready: Ready, done: int) -> LoaderBatches:
    """Returns the loader's batches, from step `done` + 1 on."""
    if line := passes.words(ready.data, ready.config.train.steps):
        say(f"mixture: {line}")
    for line in passes.rounded(ready.data):
        say(line)
    first = jax.process_index() == 0
    given = batches_lib.read(ready.data, ready.config.data, ready.parts, done, verify=first)
    if jax.process_count() > 1:
        together(given.fill)
    return given


def held_out(ready: Ready) -> loss.Evaluator | None:
    """Returns the function that measures held-out loss and bits per byte by source; None if no text is held out."""
    c, order = ready.config, ready.data
    if not any(order.data.stream(source, "val").tokens > 1 for source in order.mixture):
        return None
    sizes = {"seq_len": order.seq_len, "tile": c.loss.tile_tokens}
    return loss.make(ready.parts.model, order.data, order.mixture, ready.parts.mesh, c.eval, **sizes)
