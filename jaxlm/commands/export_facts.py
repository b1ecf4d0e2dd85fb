"""Gathers the facts that the model card of an export states, and measures what its GGUF files lose."""

import contextlib
import dataclasses
import pathlib
from collections.abc import Sequence

import jax

from jaxlm import models
from jaxlm.config import Config, ConfigError
from jaxlm.data.batches import document_rows, replay
from jaxlm.data.batches.open import open_order
from jaxlm.data.chats import chat
from jaxlm.data.shards import shards
from jaxlm.data.tokenizer.coder import Coder
from jaxlm.devices import tree
from jaxlm.eval import held_out, model, results
from jaxlm.host.console import say, size
from jaxlm.host.files import is_number
from jaxlm.interop import card, gguf, hf_folder, leaves, peft
from jaxlm.models import quantized
from jaxlm.plan import lower
from jaxlm.run import lineage
from jaxlm.train import origin, outlook

_MOST_FLOPS = 3e12  # of one measurement
_BYTES = 8  # a parameter, of float32 weights and a copy of them in the type of the products


def gather(config: Config, tokenizer: Coder, step: int, name: str, parameters: int) -> card.Facts:
    """Returns the model card's facts, from the files of the run and its data."""
    folder = pathlib.Path(config.workdir)
    scored = folder / results.FOLDER / str(step)
    gathered, (sources, mixture) = outlook.gather(folder), _sources(config, step)
    return card.Facts(
        name=name,
        to="",
        config=config.model,
        step=step,
        parameters=parameters,
        run=gathered["run"],
        phases=gathered["phases"],
        sources=sources,
        mixture=mixture,
        licences={source: given.licences for source, given in config.prepare.sources.items()},
        scores=[*results.read(scored).values()] if (scored / results.SUMMARY).is_file() else [],
        chats=chat.speaks(tokenizer),
        tokenizer_class=hf_folder.tokenizer_class(config.model, tokenizer),
        evaluation=next((r for r in reversed(lineage.records(folder)) if r["step"] <= step and "val/loss" in r), {}),
        samples=_samples(gathered["samples"], step),
        examples=[pathlib.Path(source.path).name for source in config.data.sources.values() if source.path],
        origin=pathlib.Path(config.origin).name if config.program != "pretrain" else "",  # a path is private
    )


def _samples(texts: dict[str, list[dict]], step: int) -> list[dict]:
    """Returns the samples of the latest step up to `step`, the drawn one of each prompt if there is one."""
    lines = [row for lines in texts.values() for row in lines if is_number(row.get("step")) and row["step"] <= step]
    latest = max((line["step"] for line in lines), default=0)
    return [*{line["prompt"]: line for line in lines if line["step"] == latest}.values()]


def _sources(config: Config, step: int) -> tuple[dict[str, dict], str]:
    """Returns (source -> its origin, share of the first mixture and tokens, for the card; two mixtures in words, or "")."""
    try:
        data = shards.open_data(config.data.dir)
    except ConfigError:
        return {}, ""
    mixture, words = data.mixture, ""
    with contextlib.suppress(ConfigError):  # another program, which draws no rows from the data
        order = open_order(config)
        mixture, switch = order.mixture, order.switch()
        words = document_rows.mixture_words(order, step) if switch is not None and switch < step else ""
    whole, tokens, recipe = sum(mixture.values()) or 1.0, data.token_counts(), data.manifest["recipe"]
    sources = {}
    for name in data.sources:
        prepared = config.prepare.sources.get(name)
        path = prepared.path if prepared else recipe.get(f"source {name}", "")
        # Of a local folder only the name: its path is private.
        place = pathlib.Path(path).name if pathlib.Path(path).is_absolute() else path
        sources[name] = {"origin": place, "share": mixture.get(name, 0.0) / whole, "tokens": tokens[name]}
    return sources, words


def measured(config: Config, step: int, written: Sequence[gguf.GgufFile]) -> dict[str, float]:
    """Returns bits per byte of held-out text, of the checkpoint `step` ("run") and of each quantised file (its type).

    The text is the one that the run, or the first of its origins, held out of pretraining: the first `eval.max_mb` of each
    source, less for a large model. Returns {} if the text is not here, or has another tokenizer, if there is not the memory,
    or if the checkpoint was rotated away meanwhile.
    """
    coarse = [file for file in written if file.dtype.startswith("q")]
    own = (pathlib.Path(config.data.dir) / shards.MANIFEST).is_file()
    path = config.data.dir if own else origin.pretrained_on(config.workdir)
    if not coarse or not path:
        return {}
    need, room = _BYTES * leaves.parameters(config.model), lower.of_devices(config.tune.memory_gb)
    if room and need > room.bytes:
        say(
            f"what the files lose is not measured: it takes {size(need)} of memory, and {size(room.bytes)} are {room.of}"
        )
        return {}
    with contextlib.suppress(ConfigError):
        run = model.restore(config, str(step), peft.READERS)
        with jax.set_mesh(run.mesh):
            return _measured(config, run, path, coarse)
    return {}


def _measured(config: Config, run: model.Restored, path: str, coarse: Sequence[gguf.GgufFile]) -> dict[str, float]:
    text = replay.open_text(path, run.tokenizer, text_key=config.data.text_key, val_fraction=config.data.val_fraction)
    most_mb = _MOST_FLOPS / leaves.parameters(config.model) / len(text.mixture) * 2e-6  # 4 bytes a token
    limits = dataclasses.replace(config.eval, older_batches=(), max_mb=min(config.eval.max_mb or most_mb, most_mb))
    if not (evaluate := held_out.of_base(run.model, text, run.mesh, dataclasses.replace(config, eval=limits))):
        return {}
    abstract = models.abstract_params(run.model)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, run.variables["params"])
    bits = {"run": evaluate(run.variables)[held_out.BASE]}
    run.variables.clear()  # frees the memory
    for file in coarse:
        params = tree.nested(quantized.placed(file.leaf, abstract, shardings))
        bits[file.dtype] = evaluate({"params": params})[held_out.BASE]
    return bits
