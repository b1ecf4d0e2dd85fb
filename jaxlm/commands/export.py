"""`jaxlm export RUN --to=hf|gguf|peft --out=DIR`: writes a run's model, or its adapter, for other programs."""

import argparse
import contextlib
import dataclasses
import json
import pathlib
import shlex

import jax
import numpy as np

from jaxlm.config import Config, ConfigError
from jaxlm.data.batches import document_rows
from jaxlm.data.batches.open import open_order
from jaxlm.data.chats import chat
from jaxlm.data.shards import shards
from jaxlm.data.tokenizer import coder
from jaxlm.data.tokenizer.coder import Coder
from jaxlm.devices import tree
from jaxlm.eval import results
from jaxlm.host.console import duration, say
from jaxlm.host.files import is_number
from jaxlm.interop import card, export, gguf, hf_config, hf_folder, inherit, leaves, peft
from jaxlm.run import lineage, receipt
from jaxlm.train import origin, outlook


def run(config: Config, args: argparse.Namespace) -> int:
    """Writes the model, reads it back, compares it with the run, and says where the files are."""
    if not config.workdir:
        raise ConfigError("which run? jaxlm export RUN --to=hf --out=DIR, with the folder of a run")
    dtype, out = export.dtype_of(args.to, args.dtype), pathlib.Path(args.out).expanduser().absolute()
    export.refuse(out, args.to)
    if args.to == "gguf":
        gguf.architecture(config.model)
        gguf.package()
    hf_config.content(config.model)
    jax.config.update("jax_platforms", "cpu")  # leaves a GPU of this machine to others
    model = origin.open(config.workdir, args.checkpoint, peft.READERS, merge=args.to != "peft")
    _check_kind(config, model, args.to)
    if line := origin.better(config, args.checkpoint):
        say(line)
    source, base = _source(config, model, args.to, dtype)
    done = export.export(source, args.to, dtype, out)
    step = int(model.provenance["step"])
    if args.json:
        seconds = {"writing_s": round(done.writing_s, 1), "checking_s": round(done.checking_s, 1)}
        print(json.dumps({"path": str(done.place), "step": step, "dtype": dtype} | seconds))
        return 0
    say(f"all {done.tensors} tensors{' of the adapter' if base else ''} equal the run's, rounded to {dtype}")
    if args.to == "hf" and (other := hf_folder.tokenizer_class(config.model, source.tokenizer)) != "AutoTokenizer":
        say(f"AutoTokenizer loads Qwen's tokenizer for every qwen2 model: load this tokenizer with {other}")
    if base and base.codes != "none":
        say(f"PEFT uses its base unquantised, training used {base.codes}: --to=hf writes the model as it was trained")
    if base:
        say(f"its base is {source.base[0]}, as adapter_config.json says: change that before you publish the adapter")
        if base.ids:
            say(f"resize that base to {base.ids:,} ids before you load the adapter: {done.place}/README.md shows how")
    say(
        f"done: {done.place}, step {step} (written in {duration(done.writing_s)}, checked in {duration(done.checking_s)})"
    )
    say(f"to the hub: hf upload YOU/{shlex.quote(source.name)} {shlex.quote(args.out)} --private (docs/export.md)")
    say(f"next: {_next(config, args.to, args.out, done.place, source, base)}")
    return 0


def _next(config: Config, to: str, out: str, place: pathlib.Path, source: export.Source, base: card.Base | None) -> str:
    """Returns a command that uses the export, or what shows how."""
    folder, card_path, chats = shlex.quote(out), shlex.quote(f"{out}/README.md"), chat.speaks(source.tokenizer)
    if to == "gguf":
        return card.of_llama_cpp(shlex.quote(f"{out}/{place.name}"), chats)
    if base and base.step is not None:
        of = f"{shlex.quote(source.base[0])} --checkpoint={base.step} --to=hf --out={shlex.quote(f'{out}-base')}"
        return f"jaxlm export {of}, then as in {card_path}"
    if config.program == "reward" or (base and base.ids):
        return f"{card_path} shows how to load it"
    return f"jaxlm chat {folder}" if chats else f'jaxlm sample {folder} "Once upon a time"'


def _check_kind(config: Config, opened: origin.Origin, to: str) -> None:
    run = config.workdir
    if to == "peft" and opened.adapter is None:
        raise ConfigError(f"{run} trained all of its model and no adapter: export it with --to=hf")
    if to == "peft" and config.program == "reward":
        raise ConfigError(f"{run} is a reward model, whose head PEFT keeps apart: export it merged, with --to=hf")
    if to != "peft" and opened.adapter is not None:
        raise ConfigError(
            f"{run} trained the vectors of a prompt, for which a model has no place: export them with --to=peft"
        )


def _source(config: Config, opened: origin.Origin, to: str, dtype: str) -> tuple[export.Source, card.Base | None]:
    """Returns (the model or adapter to export, with its card; the card's facts on an adapter's base, None for a model)."""
    name, step = pathlib.Path(config.workdir).resolve().name, int(opened.provenance["step"])
    tokenizer, model, trained = coder.plain(opened.tokenizer()), opened.config.model, opened.trained()
    scores, adapted = config.program == "reward", peft.Adapted(opened.adapter, trained) if to == "peft" else None
    place, base = _base(opened) if adapted else (("", None), None)
    count = tree.count(trained) if adapted else leaves.parameters(model, scores)
    facts = _facts(config, tokenizer, step, name, count)
    text = card.text(dataclasses.replace(facts, to=to, file=f"{name}-{dtype}.gguf", rewards=scores, base=base))

    def read(leaf: str) -> np.ndarray:
        return trained["score"]["score_head"]["kernel"] if leaf == leaves.SCORE else opened.leaf(leaf)

    about = {"run": name, "step": step}
    links = receipt.exported(pathlib.Path(config.workdir))
    return export.Source(read, model, tokenizer, name, about, text, scores, adapted, place, links), base


def _base(opened: origin.Origin) -> tuple[peft.Base, card.Base]:
    """Returns (an adapter's base, the card's facts on it). Raises ConfigError if the adapter lacks rows of new ids."""
    base, ids = opened.meta()["base"], opened.config.model.vocab_size
    path = pathlib.Path(base["path"])
    had = inherit.ids_of(path)
    if missing := {*range(had, ids)} - {*opened.adapter.row_ids}:
        raise ConfigError(
            f"{path} has {had:,} ids, the adapter was trained with {ids:,} and does not hold the rows of {len(missing)} of the "
            "new ones: export it merged, with --to=hf"
        )
    step, codes = base.get("step"), opened.adapter.settings.quantize
    named = str(path), None if step is None else str(step)
    return named, card.Base(path.name, step, ids if had < ids else 0, codes)


def _facts(config: Config, tokenizer: Coder, step: int, name: str, parameters: int) -> card.Facts:
    """Returns the model card's facts, from the files of the run and its data; `_source` adds the facts of the export."""
    folder = pathlib.Path(config.workdir)
    gathered, (sources, mixture) = outlook.gather(folder), _sources(config, step)
    return card.Facts(
        name=name,
        to="",
        file="",
        config=config.model,
        step=step,
        parameters=parameters,
        run=gathered["run"],
        phases=gathered["phases"],
        sources=sources,
        mixture=mixture,
        licences={source: given.licences for source, given in config.prepare.sources.items()},
        scores=_scores(folder, step),
        chats=chat.speaks(tokenizer),
        tokenizer_class=hf_folder.tokenizer_class(config.model, tokenizer),
        evaluation=next((r for r in reversed(lineage.records(folder)) if r["step"] <= step and "val/loss" in r), {}),
        samples=_samples(gathered["samples"], step),
        examples=[pathlib.Path(source.path).name for source in config.data.sources.values() if source.path],
        origin=pathlib.Path(config.origin).name if config.program != "pretrain" else "",  # a path is private
    )


def _samples(texts: dict[str, list[dict]], step: int) -> list[dict]:
    """Returns the samples of the latest step up to `step`, the drawn one of each prompt if there is one."""
    lines = [one for lines in texts.values() for one in lines if is_number(one.get("step")) and one["step"] <= step]
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


def _scores(folder: pathlib.Path, step: int) -> list[card.Score]:
    place = folder / results.FOLDER / str(step)
    tasks = results.read(place).values() if (place / results.SUMMARY).is_file() else ()
    return [
        card.Score(one.task, metric, value, one.stderr.get(metric), one.chance, one.fewshot, len(one.items))
        for one in tasks
        for metric, value in one.metrics.items()
    ]
