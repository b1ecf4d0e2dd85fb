"""What SFT, the reward model and DPO share: a model to begin with, examples in its chat template, perhaps an adapter."""

import dataclasses
import functools
import pathlib

from jaxlm.config import Config, ConfigError
from jaxlm.data import chat, coder, replay
from jaxlm.eval import loss
from jaxlm.files import is_step
from jaxlm.interop import readers
from jaxlm.models import adapters
from jaxlm.objectives import base
from jaxlm.processes import from_first, say, together
from jaxlm.programs import examples
from jaxlm.programs.task import Ready, Task
from jaxlm.train import announcement, answers, hooks, origin, preferences
from jaxlm.train.checkpoints import keep, restore, weights


def task(config: Config, objective: base.Maker, *, pairs: bool, closed: bool = False, **others) -> Task:
    """Returns the task of training with an objective on the chats, or pairs, of `data.path`.

    Args:
      config: the config; nothing but its tokenizer is read here.
      closed: True: rows hold the last token of each text too.
      others: attributes of the `Task` that are not as for all.

    Raises:
      ConfigError: there is no origin, it has no chat template, or the adapter can't be trained so.
    """
    speaker = tokenizer(config)
    adapter = _adapter(config, speaker)
    # The vectors of a prompt change nothing of what a text without them costs.
    text = functools.cache(
        lambda: together(lambda: examples.base_text(config, speaker)) if config.adapter.kind != "prompt" else None
    )
    fixed = {
        "objective": objective,
        "data": lambda c: examples.data(c, speaker, text() if c.replay.share and not pairs else None, pairs, closed),
        "batches": examples.batches,
        "held_out": lambda ready: _held_out(ready, text()),
        "adapter": adapter,
        "rows": () if adapter else origin.trained_rows(config.adapter, speaker),
        "origin": lambda c: first_weights(c).with_prompt(c.adapter, speaker, c.seed),
        "passes": lambda data, steps: data.passes(steps),
        "documents": lambda data, step: data.places(step),
        "remark": _remark,
        "trained": announcement.of_adapter(config.adapter, adapter.row_ids) if adapter else "",
        "next_command": "jaxlm chat {}",
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
    return origin.prompted(origin.speaker(config), config)


def first_weights(config: Config) -> origin.Origin:
    """Returns the model that a run begins with; if `keeps_origin`, the checkpoint that it began with."""
    checkpoints, bases = pathlib.Path(config.workdir) / "checkpoints", []
    if keeps_origin(config) and config.origin_checkpoint == "latest" and weights.begun(checkpoints):
        metas = restore.read_metas(checkpoints, (int(p.name) for p in checkpoints.glob("*") if is_step(p.name)))
        bases = [meta["base"] for meta in metas.values() if "step" in meta.get("base", {})]
        config = dataclasses.replace(config, origin_checkpoint=str(bases[0]["step"]) if bases else "latest")
    try:
        found = origin.begin(config, readers.READERS)
    except ConfigError as error:
        if not bases:
            raise
        was = f"{bases[0]['path']}, step {bases[0]['step']}"
        raise ConfigError(f"{config.origin}: {error}. {config.workdir} began with {was}, and needs it") from None
    if keeps_origin(config) and found and "step" in found.provenance:
        together(lambda: _keep_base(found, pathlib.Path(config.workdir)), first_only=True)
    return found


def keeps_origin(config: Config) -> bool:
    """True if each start of a run reads its origin again: the frozen model of an adapter, or the reference of a policy."""
    return config.adapter.kind != "none" or (config.program in ("ppo", "grpo") and config.policy.reference)


def _keep_base(base: origin.Origin, workdir: pathlib.Path) -> None:
    """Keeps the checkpoint that an adapter begins from, also if its run trains on."""
    folder, step = pathlib.Path(base.provenance["path"]), base.provenance["step"]
    try:
        keep.need(folder / "checkpoints", step, workdir)
    except OSError as error:
        say(f"{folder} can't be told to keep its checkpoint {step} ({error.strerror}): the adapter needs it")


def _adapter(config: Config, speaker: coder.Coder) -> adapters.Adapter | None:
    """The adapter of a config. Raises ConfigError if its model would never learn to end an answer."""
    rows = origin.trained_rows(config.adapter, speaker)
    if config.adapter.kind == "prompt" and config.examples.template == "chatml":
        raise ConfigError(
            "config.examples.template=chatml has rows to train, and prompt tuning trains none: take plain"
        )
    untrained = {speaker.id_of(piece) for piece in chat.own_rows(speaker)} - {*rows}
    if config.adapter.kind != "none" and untrained and not config.adapter.without_rows:
        raise ConfigError(
            f"config.adapter.rows={config.adapter.rows} leaves out tokens of ChatML, which pretraining never saw: the model "
            "would hardly learn to end its answers; leave it at auto, or say adapter.without_rows=True"
        )
    return adapters.of(config.adapter, rows)


def _held_out(ready: Ready, text: replay.Text | None) -> loss.Evaluator | None:
    """What measures the held-out answers or pairs, and the text of the base where it is here."""
    c, parts, tile = ready.config, ready.parts, ready.config.loss.tile_tokens
    if ready.data.pairs:
        own = loss.of_pairs(parts.objective, ready.data, parts.mesh, c.eval, c.model.dtype)
    else:
        own = loss.of_answers(parts.model, ready.data, parts.mesh, c.eval, tile)
    return loss.joined([own, loss.of_base(parts.model, text, parts.mesh, c.eval, seq_len=c.train.seq_len, tile=tile)])


def _remark(ready: Ready) -> hooks.Remark:
    before = from_first(lambda: answers.before(pathlib.Path(ready.config.workdir)))
    remarks = answers.Remarks(before, ready.data.replay_share)
    return preferences.Remarks(len(ready.data.val), remarks) if ready.data.pairs else remarks
