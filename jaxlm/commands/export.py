"""`jaxlm export RUN [--to=hf|gguf|peft] [--out=DIR] [--push=USER/NAME]`: a run's model or adapter for other programs."""

import argparse
import dataclasses
import json
import pathlib
import shlex
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from jaxlm.commands import export_facts
from jaxlm.config import Config, ConfigError, config_files
from jaxlm.data.chats import chat
from jaxlm.data.tokenizer import coder
from jaxlm.devices import tree
from jaxlm.host import files
from jaxlm.host.console import duration, say
from jaxlm.interop import card, export, gguf, hf_config, hub, inherit, leaves, peft
from jaxlm.run import receipt
from jaxlm.train import origin


def run(config: Config, args: argparse.Namespace) -> int:
    """Writes the model, reads it back, compares it with the run, and says where the files are."""
    if not config.workdir:
        raise ConfigError("which run? jaxlm export RUN --to=hf --out=DIR, with the folder of a run")
    name = _name(config)
    args.out = args.out or f"exports/{name}" + f"-{args.to}" * (args.to != "hf")
    (dtype, more), out = export.dtypes_of(args.to, args.dtype), pathlib.Path(args.out).expanduser().absolute()
    export.refuse(out, args.to)
    _check_flags(args)
    hf_config.content(config.model)
    jax.config.update("jax_platforms", "cpu")  # leaves a GPU of this machine to others
    model = origin.open(config.workdir, args.checkpoint, peft.READERS, merge=args.to != "peft")
    _check_kind(config, model, args.to)
    if line := origin.better(config, args.checkpoint):
        say(line)
    source, facts = _source(config, model, args, [dtype, *more] if args.to == "gguf" else more)
    export.check_source(source, args.to, more)
    if args.push:
        hub.prepare(args.push, args.to, args.public)
    done = export.export(source, args.to, dtype, out, more)
    written = [gguf.GgufFile(out, config.model, each, name) for each in facts.files]
    bits = export_facts.measured(config, facts.step, written)
    coarse = {part: columns for file in written for part, columns in file.coarse.items()}
    facts = dataclasses.replace(facts, bits=bits, coarse=coarse)
    if written:
        files.write_atomically(out / "README.md", card.text(facts).encode())
    address = args.push and hub.push(out, args.push, f"step {facts.step} of {name}, by jaxlm export")
    if args.json:
        seconds = {"writing_s": round(done.writing_s, 1), "checking_s": round(done.checking_s, 1)}
        about = {"path": str(done.place), "step": facts.step, "dtype": ",".join([dtype, *more])}
        print(json.dumps(about | seconds | {"bits_per_byte": bits, "pushed": address}))
        return 0
    base, kinds = facts.base, ", ".join([dtype, *more])
    say(f"all {done.tensors} tensors{' of the adapter' if base else ''} equal the run's, rounded to {kinds}")
    for line in [*card.of_files(facts), *_remarks(args, source, facts, done.place)]:
        say(line)
    seconds = f"written in {duration(done.writing_s)}, checked in {duration(done.checking_s)}"
    say(f"done: {done.place}, step {facts.step} ({seconds})")
    to_hub = f"to the hub: the same with --push=YOU/{shlex.quote(name)} (docs/export.md)"
    say(f"on the hub: {address}" if address else to_hub)
    say(f"next: {_next(config, args.to, args.out, done.place, source, base)}")
    return 0


def _name(config: Config) -> str:
    """Returns the export's name: that of the run's folder; RUN-average of RUN@average."""
    folder = pathlib.Path(config.workdir).resolve()
    run = config_files.averaged(folder)
    return f"{run.name}-{folder.name}" if run else folder.name


def _remarks(args: argparse.Namespace, source: export.Source, facts: card.Facts, place: pathlib.Path) -> Iterator[str]:
    """Yields lines on what whoever loads the export must know."""
    base, loader = facts.base, facts.tokenizer_class
    if args.to == "hf" and loader != "AutoTokenizer":
        yield f"AutoTokenizer loads Qwen's tokenizer for every qwen2 model: load this tokenizer with {loader}"
    if base and base.codes != "none":
        yield f"PEFT uses its base unquantised, training used {base.codes}: --to=hf writes the model as it was trained"
    if base:
        other = "" if args.base else ": --base=USER/NAME names it as the hub does"
        yield f"its base is {source.base[0]}, as adapter_config.json says{other}"
    if base and base.ids:
        yield f"resize that base to {base.ids:,} ids before you load the adapter: {place}/README.md shows how"


def _check_flags(args: argparse.Namespace) -> None:
    if args.public and not args.push:
        raise ConfigError("--public is for --push=USER/NAME: give both, or neither")
    if args.base and args.to != "peft":
        raise ConfigError(f"--base names the base of an adapter: --to={args.to} writes a whole model")
    if args.push and args.to == "peft" and not args.base:
        raise ConfigError("--push of an adapter needs --base=USER/NAME, its base on the hub, in place of a path here")


def _next(config: Config, to: str, out: str, place: pathlib.Path, source: export.Source, base: card.Base | None) -> str:
    """Returns a command that uses the export, or what shows how."""
    folder, card_path, chats = shlex.quote(out), shlex.quote(f"{out}/README.md"), chat.speaks(source.tokenizer)
    if to == "gguf":
        return card.of_llama_cpp(shlex.quote(f"{out}/{place.name}"), chats)
    if base and base.step is not None:
        of = f"{shlex.quote(source.base[0])} --checkpoint={base.step} --to=hf --out={shlex.quote(f'{out}-base')}"
        return f"jaxlm export {of}, then as in {card_path}"
    if config.program == "reward" or (base and (base.ids or "/" in base.name)):
        return f"{card_path} shows how to load it"
    return f"jaxlm chat {folder}" if chats else f'jaxlm sample {folder} "The"'


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


def _source(
    config: Config, opened: origin.Origin, args: argparse.Namespace, more: Sequence[str]
) -> tuple[export.Source, card.Facts]:
    """Returns (the model or adapter to export, with its card; the card's facts). `more`: types of GGUF files."""
    name, step = _name(config), int(opened.provenance["step"])
    tokenizer, model, trained = coder.plain(opened.tokenizer()), opened.config.model, opened.trained()
    scores, adapted = config.program == "reward", peft.Adapted(opened.adapter, trained) if args.to == "peft" else None
    place, base = _base(opened, args.base) if adapted else (("", None), None)
    count = tree.count(trained) if adapted else leaves.parameters(model, scores)
    facts = export_facts.gather(config, tokenizer, step, name, count)
    facts = dataclasses.replace(facts, to=args.to, files=tuple(more), rewards=scores, base=base)

    def read(leaf: str) -> np.ndarray:
        return trained["score"]["score_head"]["kernel"] if leaf == leaves.SCORE else opened.leaf(leaf)

    about = {"run": name, "step": step}
    links = receipt.exported(pathlib.Path(config.workdir))
    return export.Source(read, model, tokenizer, name, about, card.text(facts), scores, adapted, place, links), facts


def _base(opened: origin.Origin, on_hub: str) -> tuple[peft.Base, card.Base]:
    """Returns (an adapter's base, the card's facts on it). Raises ConfigError if the adapter lacks rows of new ids.

    `on_hub` is the base's name on the hub; "" to name its folder.
    """
    base, ids = opened.meta()["base"], opened.config.model.vocab_size
    path = pathlib.Path(base["path"])
    had = inherit.ids_of(path)
    if missing := {*range(had, ids)} - {*opened.adapter.row_ids}:
        raise ConfigError(
            f"{path} has {had:,} ids, the adapter was trained with {ids:,} and does not hold the rows of {len(missing)} of the "
            "new ones: export it merged, with --to=hf"
        )
    step, codes = base.get("step"), opened.adapter.settings.quantize
    step = None if on_hub else step
    named = on_hub or str(path), None if step is None else str(step)
    return named, card.Base(on_hub or path.name, step, ids if had < ids else 0, codes)
