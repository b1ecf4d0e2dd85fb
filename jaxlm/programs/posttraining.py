"""What SFT, the reward model and DPO share: they begin with a model, read examples in its chat template, and may train an adapter."""

import dataclasses
import functools
import pathlib

import jax

from jaxlm import config_files, sharding
from jaxlm.config import Config, ConfigError
from jaxlm.data import chat, coder, loader, packed, replay, shards
from jaxlm.data import tokenizer as tokenizers
from jaxlm.data.manifest import MANIFEST
from jaxlm.eval import answers as held_out_answers
from jaxlm.eval.loss import Evaluator
from jaxlm.interop import hf_weights
from jaxlm.models import adapters
from jaxlm.objectives import base
from jaxlm.processes import from_first, say, together
from jaxlm.programs.task import Ready, Task
from jaxlm.train import answers, origin
from jaxlm.train.batches import LoaderBatches
from jaxlm.train.checkpoints import restore, weights
from jaxlm.train.workdir import TOKENIZER

_RESERVE = 2  # batches with which a process whose loader failed goes on until all have agreed to stop
PROMPT = "What is a neural network?"


def task(config: Config, objective: base.Maker, *, pairs: bool, **others) -> Task:
    """Returns the task of training with an objective on the chats, or pairs, of `data.path`.

    Args:
      config: the config; nothing but its tokenizer is read here.
      others: attributes of the `Task` that are not as for all.

    Raises:
      ConfigError: there is no origin, it has no chat template, or the adapter can't be trained so.
    """
    speaker = tokenizer(config)
    adapter = _adapter(config, speaker)
    text = functools.cache(lambda: together(lambda: _base_text(config, speaker)))
    fixed = {
        "objective": objective,
        "data": lambda c: _data(c, speaker, text() if c.replay.share and not pairs else None, pairs),
        "batches": _batches,
        "held_out": lambda ready: _held_out(ready, text()),
        "adapter": adapter,
        "origin": first_weights,
        "passes": lambda data, steps: data.passes(steps),
        "documents": lambda data, step: data.places(step),
        "remark": _remark,
        "trained": _words(config, adapter),
        "prompt": PROMPT,
    }
    return Task(**fixed | others)


def tokenizer(config: Config) -> coder.Coder:
    """Returns the tokenizer of the model: its origin's, with ChatML's tokens if it is ours and had none.

    Raises:
      ConfigError: there is no origin, or its model has no chat template.
    """
    if not config.origin:
        raise ConfigError(
            f"{config.program} begins with a model: --config.origin=RUN, or the folder of a Hugging Face model"
        )
    if config.origin_state:
        raise ConfigError(
            f"origin_state=True goes on with what the origin did; {config.program} begins anew: set it to False"
        )
    found = tokenizers.with_chat_tokens(coder.load(config.data.tokenizer))
    try:
        chat.template(found)
    except ConfigError:
        raise ConfigError(
            f"{config.origin} has no chat template: begin with a chat model, or put a chat_template.jinja into its folder"
        ) from None
    return found


def first_weights(config: Config) -> origin.Origin:
    """Returns the model that a run begins with; for a run that trains an adapter, the checkpoint that it began with."""
    checkpoints = pathlib.Path(config.workdir) / "checkpoints"
    if config.adapter.kind != "none" and config.origin_checkpoint == "latest" and weights.begun(checkpoints):
        metas = restore.read_metas(checkpoints, (int(p.name) for p in checkpoints.glob("*") if p.name.isdecimal()))
        steps = [meta["base"]["step"] for meta in metas.values() if "step" in meta.get("base", {})]
        config = dataclasses.replace(config, origin_checkpoint=str(steps[0]) if steps else "latest")
    return origin.begin(config, hf_weights.READERS)


def _adapter(config: Config, speaker: coder.Coder) -> adapters.Adapter | None:
    """The adapter of a config. Raises ConfigError if its model would never learn to end an answer."""
    if config.adapter.kind == "none":
        return None
    rows = origin.trained_rows(config.adapter, speaker)
    if (
        "auto" not in config.adapter.rows
        and chat.speaks(speaker)
        and not config.adapter.without_rows
        and origin.ours(speaker)
    ):
        ...
    return adapters.of(config.adapter, rows)
