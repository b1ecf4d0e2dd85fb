"""Pretraining: text -> tokens -> next-token prediction. Run it again to resume; raise `train.steps` to continue."""

import argparse
import pathlib
from collections.abc import Callable

import jax

from jaxlm.commands.train import run as training
from jaxlm.commands.train.kind import Kind, Ready
from jaxlm.config import Config, ConfigError
from jaxlm.data.batches import document_rows
from jaxlm.data.batches.open import keep_list, make_data, open_order
from jaxlm.data.shards import vocabulary
from jaxlm.devices.processes import say, together
from jaxlm.eval import held_out
from jaxlm.eval.held_out import Evaluator
from jaxlm.interop import peft
from jaxlm.models.transformer import Transformer
from jaxlm.run import workdir
from jaxlm.run.checkpoints import keep
from jaxlm.step.objectives import base, lm
from jaxlm.train import batches, origin
from jaxlm.train.batches import LoaderBatches
from jaxlm.train.origin import Origin


def run(config: Config, args: argparse.Namespace) -> int:
    if config.adapter.kind != "none":
        kind = f"config.adapter.kind={config.adapter.kind}"
        raise ConfigError(f"{kind} is for sft, reward and dpo; pretraining trains all parameters")
    return training.run(config, Text())


class Text(Kind):
    """Trains on the shards in `data.dir`."""

    def objective(self, model: Transformer, config: Config) -> base.Objective:
        return lm.make(model, config)

    def data(self, config: Config) -> document_rows.Rows:
        return data(config)

    def origin(self, config: Config) -> Origin | None:
        if keep.imported(pathlib.Path(config.workdir) / "checkpoints"):
            return origin.open(config.workdir)  # begins with its own weights
        return origin.begin(config, peft.READERS)

    def batches(self, ready: Ready, done: int, failed: Callable[[Exception], object]) -> LoaderBatches:
        if line := document_rows.mixture_words(ready.data, ready.config.train.steps):
            say(f"mixture: {line}")
        for line in document_rows.rounded(ready.data):
            say(line)
        first = jax.process_index() == 0
        loaded = batches.read(ready.data, ready.config.data, ready.parts, done, failed, verify=first)
        if jax.process_count() > 1:
            together(loaded.fill)
        return loaded

    def held_out(self, ready: Ready) -> Evaluator | None:
        order, parts = ready.data, ready.parts
        return held_out.of_text(parts.model, order.data, order.mixture, parts.mesh, ready.config)


def data(config: Config) -> document_rows.Rows:
    """Returns the shards in `data.dir` and the order in which training reads them. Builds the shards if they are missing."""
    d, prepare, vocab_size = config.data, config.prepare, vocabulary.required(config)
    together(lambda: workdir.check_data_seed(config), first_only=True)
    together(lambda: make_data(d, prepare, config.engine, vocab_size, say), first_only=True)
    together(lambda: keep_list(config), first_only=True)
    # One process checks the shards: on a store far away, tens of thousands take each process minutes.
    return together(lambda: open_order(config, check=jax.process_index() == 0))
