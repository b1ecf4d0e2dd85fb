"""Post-training on chats (sft) and on pairs of answers (dpo, reward). Starts from a model, with its chat template."""

import argparse
import dataclasses
import functools
import pathlib
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxlm.commands.train import run as training
from jaxlm.commands.train.kind import Kind, Ready
from jaxlm.config import Config, ConfigError
from jaxlm.data.batches import example_rows, replay, survey
from jaxlm.data.chats import chat
from jaxlm.data.tokenizer import coder
from jaxlm.devices.processes import from_first, say, together
from jaxlm.eval import held_out
from jaxlm.eval.held_out import Evaluator
from jaxlm.host import screen
from jaxlm.interop import peft
from jaxlm.models import adapters
from jaxlm.models.transformer import Transformer
from jaxlm.run import ledger
from jaxlm.run.checkpoints import keep, store
from jaxlm.run.workdir import TOKENIZER
from jaxlm.step.objectives import dpo, lm, reward
from jaxlm.step.objectives.base import Objective, Variables
from jaxlm.step.state import TrainState
from jaxlm.step.step import cast
from jaxlm.train import announcement, batches, hooks, loop, origin, reference, watches
from jaxlm.train.origin import Origin


def run(config: Config, args: argparse.Namespace) -> int:
    return training.run(config, (Chats if config.program == "sft" else Pairs)(config))


class Chats(Kind):
    """SFT: next-token prediction on the answers of chats, of all parameters or of an adapter. Raises ConfigError."""

    def __init__(self, config: Config):
        self._config, self._tokenizer = config, tokenizer(config)
        self.adapter = _adapter(config, self._tokenizer)
        if self.adapter:
            self.trained = announcement.of_adapter(config.adapter, self.adapter.row_ids)
        else:
            self.rows = origin.trained_rows(config.adapter, self._tokenizer)
        self.keeps_origin = config.adapter.kind != "none"

    def objective(self, model: Transformer, config: Config) -> Objective:
        return lm.make(model, config)

    def data(self, config: Config) -> example_rows.Packed:
        replayed = config.program == "sft" and config.replay.share
        return examples(config, self._tokenizer, self._base_text if replayed else None)

    @functools.cached_property
    def _base_text(self) -> replay.Text | None:
        if self._config.adapter.kind == "prompt":
            return None  # a prompt's vectors don't change the loss of a text without them
        return together(lambda: base_text(self._config, self._tokenizer))

    def origin(self, config: Config) -> Origin:
        return self._first_weights(config).with_prompt(config.adapter, self._tokenizer, config.seed)

    def _first_weights(self, config: Config) -> Origin:
        """Returns the model to begin with; with `keeps_origin`, the same checkpoint as at the run's first start."""
        checkpoints, bases = pathlib.Path(config.workdir) / "checkpoints", []
        if self.keeps_origin and config.origin_checkpoint == "latest" and keep.begun(checkpoints):
            metas = store.read_metas(checkpoints, keep.steps(checkpoints))
            bases = [meta["base"] for meta in metas.values() if "step" in meta.get("base", {})]
            config = dataclasses.replace(config, origin_checkpoint=str(bases[0]["step"]) if bases else "latest")
        try:
            model = origin.begin(config, peft.READERS)
        except ConfigError as error:
            if not bases:
                raise
            was = f"{bases[0]['path']}, step {bases[0]['step']}"
            raise ConfigError(f"{config.origin}: {error}. {config.workdir} began with {was}, and needs it") from None
        if self.keeps_origin and "step" in model.provenance:
            together(lambda: _keep_base(model, pathlib.Path(config.workdir)), first_only=True)
        return model

    def batches(self, ready: Ready, done: int, failed: Callable[[Exception], object]) -> loop.Batches:
        loaded = batches.read(ready.data, ready.config.data, ready.parts, done, failed)
        together(loaded.fill)
        return loaded

    def held_out(self, ready: Ready) -> Evaluator | None:
        of_base = held_out.of_base(ready.parts.model, self._base_text, ready.parts.mesh, ready.config)
        return held_out.joined([self._of_examples(ready), of_base])

    def _of_examples(self, ready: Ready) -> Evaluator | None:
        return held_out.of_answers(ready.parts.model, ready.data, ready.parts.mesh, ready.config)

    def remark(self, ready: Ready) -> hooks.Remark:
        before = from_first(lambda: hooks.base_before(pathlib.Path(ready.config.workdir)))
        return hooks.Remarks(before, ready.data.replay_share, len(ready.data.val))


class Pairs(Chats):
    """Trains on pairs of answers: a model that prefers the chosen one (dpo), or that scores answers (reward)."""

    def __init__(self, config: Config):
        super().__init__(config)
        self._scores = config.program == "reward"

    def objective(self, model: Transformer, config: Config) -> Objective:
        return reward.make(model, config) if self._scores else dpo.make(model, config)

    def begin(self, ready: Ready, state: TrainState, frozen: Variables) -> Ready:
        """Returns `ready`, with the reference's log-probabilities in its batches if the objective needs them."""
        c, parts = ready.config, ready.parts
        if self._scores:
            return ready
        if ready.data.train.margins_E.any():
            say("the margins of these pairs are not used: a reward model uses margins, DPO does not")
        if not dpo.judged(c):
            return ready
        sizes = {"batch_size": c.eval.batch_size, "tile": c.loss.tile_tokens}

        def judge() -> reference.Judged:
            variables = frozen | cast(state.params, jnp.dtype(c.model.dtype))
            return held_out.judge(parts.model, variables, ready.data, parts.mesh, **sizes)

        folder, done = pathlib.Path(c.workdir), int(state.step)
        data = reference.of_run(folder, ready.data, done, frozen | state.params, judge)
        return dataclasses.replace(ready, data=data)

    def _of_examples(self, ready: Ready) -> Evaluator | None:
        c, parts = ready.config, ready.parts
        return held_out.of_pairs(parts.objective, ready.data, parts.mesh, c)

    def watches(self, ready: Ready) -> list[loop.Watch]:
        return (watches.of_reward if self._scores else watches.of_dpo)(ready.config, say)


def tokenizer(config: Config) -> coder.Coder:
    """Returns the origin's tokenizer; a tokenizer of jaxlm gets ChatML's tokens if it lacks them. Raises ConfigError."""
    if not config.origin:
        raise ConfigError(f"{config.program} begins with a model: --config.origin=RUN or a Hugging Face model's folder")
    if config.origin_state:
        raise ConfigError(
            f"origin_state=True continues the origin's training; {config.program} begins anew: set it to False"
        )
    return origin.prompted(origin.speaker(config), config)


def _keep_base(base: Origin, workdir: pathlib.Path) -> None:
    """Keeps the checkpoint that an adapter starts from, even if its run trains on."""
    folder, step = pathlib.Path(base.provenance["path"]), base.provenance["step"]
    try:
        keep.need(folder / "checkpoints", step, workdir)
    except OSError as error:
        say(f"{folder} can't be told to keep its checkpoint {step} ({error.strerror}): the adapter needs it")


def _adapter(config: Config, speaker: coder.Coder) -> adapters.Adapter | None:
    """Returns the adapter of a config, if any. Raises ConfigError if the model would hardly learn to end an answer."""
    rows = origin.trained_rows(config.adapter, speaker)
    if config.adapter.kind == "prompt" and config.examples.template == "chatml":
        raise ConfigError("config.examples.template=chatml has tokens to train, prompt tuning trains none: take plain")
    untrained = {speaker.id_of(piece) for piece in chat.own_rows(speaker)} - {*rows}
    if config.adapter.kind != "none" and untrained and not config.adapter.without_rows:
        raise ConfigError(
            f"config.adapter.rows={config.adapter.rows} leaves out tokens of ChatML, which pretraining never saw: the model "
            "would hardly learn to end its answers; leave it at auto, or say adapter.without_rows=True"
        )
    return adapters.of(config.adapter, rows)


def examples(config: Config, tokenizer: coder.Coder, text: replay.Text | None) -> example_rows.Packed:
    """Returns the examples; reports on them, shows the first, and writes report and tokenizer into the run's folder.

    `text` is replayed between the examples.
    """
    folder = pathlib.Path(config.workdir)
    tokenizer = chat.dated(tokenizer, from_first(lambda: ledger.moment(folder)))
    together(lambda: coder.write(tokenizer, folder / TOKENIZER), first_only=True)
    seen = survey.Survey(config.train.seq_len, survey.leaks_of(config.examples.benchmarks, config.prepare))
    # A score is read at the end of an answer, so a reward model's rows must also hold the last token of each text.
    options = {"pairs": config.program != "sft", "closed": config.program == "reward"}
    options |= {"replay": text, "share": config.replay.share}
    options["sizes"] = example_rows.Sizes(config.seed, config.train.seq_len, config.train.batch_size)
    options |= {"say": say, "see": seen.see}
    data = together(lambda: example_rows.make(config.data, config.examples, tokenizer, **options))
    together(lambda: seen.write(folder), first_only=True)
    if not from_first(lambda: keep.begun(folder / "checkpoints")):
        for line in [*seen.lines(), chat.told_ends(tokenizer), "the first one; marked is what counts:"]:
            say(line)
        if jax.process_index() == 0:
            screen.say_marked(survey.shown(data.train, tokenizer), screen.GREEN)
    elif line := from_first(lambda: origin.other_template(config, tokenizer)):
        say(line)
    return data


def base_text(config: Config, tokenizer: coder.Coder) -> replay.Text | None:
    """Returns the text of `replay.path`, else the text that the origin was trained on; None, with a line, without either."""
    path, d = config.replay.path or origin.pretrained_on(config.origin), config.data
    if not path:
        say(f"the text that {config.origin} was trained on is not here, so none is replayed: --config.replay.path=TEXT")
        return None
    return replay.open_text(path, tokenizer, text_key=d.text_key, val_fraction=d.val_fraction)
