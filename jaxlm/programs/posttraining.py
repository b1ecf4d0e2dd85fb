"""What SFT, the reward model and DPO share: a model to begin with, examples in its chat template, perhaps an adapter."""

import dataclasses
import functools
import pathlib

import jax

from jaxlm import config_files, sharding
from jaxlm.config import CHAT_TOKENS, Config, ConfigError
from jaxlm.data import chat, coder, loader, packed, replay
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
    found = chat.grown(coder.load(config.data.tokenizer))
    try:
        chat.template(found)
    except ConfigError:
        raise ConfigError(
            f"{config.origin} has no chat template: begin with a chat model, or put a chat_template.jinja into its folder"
        ) from None
    return origin.prompted(found, config)


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
    rows = origin.trained_rows(config.adapter, speaker)
    untrained = {speaker.id_of(piece) for piece in CHAT_TOKENS if origin.ours(speaker)} - {*rows}
    if config.adapter.kind != "none" and untrained and not config.adapter.without_rows:
        raise ConfigError(
            f"config.adapter.rows={config.adapter.rows} leaves out tokens of ChatML, which pretraining never saw: the model "
            "would hardly learn to end its answers; leave it at auto, or say adapter.without_rows=True"
        )
    return adapters.of(config.adapter, rows)


def _words(config: Config, adapter: adapters.Adapter | None) -> str:
    """What an adapter trains, in words: "LoRA r 16 + 5 rows"; "" without one."""
    if adapter is None:
        return ""
    a = config.adapter
    found = f"LoRA r {a.rank}" if a.kind == "lora" else f"a prompt of {a.prompt_tokens} vectors"
    rows = f" + {len(adapter.row_ids)} rows" if adapter.row_ids else ""
    return found + rows + (f", on {a.quantize}" if a.quantize != "none" else "")


def _data(config: Config, speaker: coder.Coder, text: replay.Text | None, pairs: bool) -> packed.Packed:
    """Reads the examples, and keeps the tokenizer in the run's folder for whoever works with the run."""
    folder = pathlib.Path(config.workdir) / TOKENIZER
    together(lambda: coder.write(speaker, folder), first_only=True)
    sizes = packed.Sizes(config.seed, config.train.seq_len, config.train.batch_size)
    given = {"pairs": pairs, "sizes": sizes, "replay": text, "share": config.replay.share, "say": say}
    return together(lambda: packed.make(config.data, config.examples, speaker, **given))


def _base_text(config: Config, speaker: coder.Coder) -> replay.Text | None:
    """The text that the base was trained on, or `replay.path`; None if it is not here, which is said."""
    path, d = config.replay.path or _pretrained_on(config.origin), config.data
    if not path:
        say(
            f"no replay: the text that {config.origin} was trained on is not here; name some by --config.replay.path=TEXT"
        )
        return None
    keys = {"text_key": d.text_key, "val_fraction": d.val_fraction, "num_threads": d.num_threads}
    return replay.open_text(path, speaker, **keys)


def _pretrained_on(folder: str) -> str:
    """The data directory of the run that pretrained a model, however many runs came between; "" if there is none."""
    while (file := pathlib.Path(folder) / "config.json").is_file() and config_files.find(f"{folder}/").kind == "run":
        saved = config_files.from_run(file)
        if saved.program == "pretrain":
            data = pathlib.Path(saved.data.dir or file.parent / "data")
            return str(data) if (data / MANIFEST).is_file() else ""
        if saved.replay.path:
            return saved.replay.path
        folder = saved.origin
    return ""


def _batches(ready: Ready, done: int) -> LoaderBatches:
    """The loader's batches, from step `done` + 1 on."""
    data, mesh = ready.data, ready.parts.mesh
    local = sharding.local_rows(mesh, data.batch_size)
    given = {"row_indices": local, "start_step": done, "source": packed.Source}
    read = together(lambda: loader.open_train(data, ready.config.data, **given))
    batches = LoaderBatches(read, mesh, ready.parts.batch(), _RESERVE if jax.process_count() > 1 else 0)
    together(batches.fill)
    return batches


def _held_out(ready: Ready, text: replay.Text | None) -> Evaluator | None:
    """What measures the held-out answers, and the text of the base where it is here."""
    c, data, parts = ready.config, ready.data, ready.parts
    made: list[Evaluator] = []
    if len(data.val):
        made.append(held_out_answers.make(parts.model, data, parts.mesh, c.eval, c.loss.tile_tokens))
    if text and c.adapter.kind != "prompt" and any(text.token_counts("val").values()):
        sizes = {"seq_len": c.train.seq_len, "tile": c.loss.tile_tokens}
        made.append(held_out_answers.of_base(parts.model, text, text.mixture, parts.mesh, c.eval, **sizes))
    return (lambda variables: {k: v for one in made for k, v in one(variables).items()}) if made else None


def _remark(ready: Ready) -> answers.Remarks:
    before = from_first(lambda: answers.before(pathlib.Path(ready.config.workdir)))
    return answers.Remarks(before, ready.data.replay_share)
