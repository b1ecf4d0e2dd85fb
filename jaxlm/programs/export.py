"""`jaxlm export RUN --to=hf|gguf --out=DIR`: writes a run's model for other programs."""

import argparse
import json
import pathlib

import jax

from jaxlm.config import Config, ConfigError
from jaxlm.console import duration, say
from jaxlm.data import chat, shards
from jaxlm.data.coder import Coder
from jaxlm.eval import results
from jaxlm.interop import card, export, gguf_file, hf, hf_folder, leaves
from jaxlm.train import origin, summary


def run(config: Config, args: argparse.Namespace) -> int:
    """Writes the model, reads it back, compares it with the run, and says where it is."""
    if not config.workdir:
        raise ConfigError("which run? jaxlm export RUN --to=hf --out=DIR, with the folder of a run")
    dtype, out = export.dtype_of(args.to, args.dtype), pathlib.Path(args.out).expanduser().absolute()
    export.refuse(out, args.to)
    if args.to == "gguf":
        gguf_file.architecture(config.model)
        gguf_file.package()
    hf.hf_config(config.model)
    jax.config.update("jax_platforms", "cpu")  # leaves a GPU of this machine to others
    found = origin.open(config.workdir, args.checkpoint)
    tokenizer, step = found.tokenizer(), int(found.provenance["step"])
    name = pathlib.Path(config.workdir).resolve().name
    facts = _facts(config, tokenizer, step, name, args.to, f"{name}-{dtype}.gguf")
    source = export.Source(
        read=found.leaf,
        config=found.config.model,
        tokenizer=tokenizer,
        name=name,
        about={"run": name, "step": step},
        card=card.text(facts),
    )
    done = export.export(source, args.to, dtype, out)
    verdict = done.verdict
    if args.json:
        seconds = {"writing_s": round(done.writing_s, 1), "checking_s": round(done.checking_s, 1)}
        print(json.dumps({"path": str(done.place), "step": step, "dtype": dtype, "moved": verdict.moved} | seconds))
        return 0
    moved = f"are off by {verdict.moved:.2%}, by rounding" if verdict.moved else "are the run's to the bit"
    say(
        f"all {verdict.leaves} leaves are the run's, as {dtype} holds them; the logits of {verdict.positions} positions {moved}"
    )
    if args.to == "hf" and (other := hf_folder.tokenizer_class(config.model, tokenizer)) != "AutoTokenizer":
        say(f"AutoTokenizer takes every qwen2 model for one with Qwen's tokenizer: load this one by {other}")
    say(
        f"done: {done.place}, step {step} (written in {duration(done.writing_s)}, checked in {duration(done.checking_s)})"
    )
    return 0


def _facts(config: Config, tokenizer: Coder, step: int, name: str, to: str, file: str) -> card.Facts:
    """Gathers what the model card says, from the run's files and its data's."""
    folder = pathlib.Path(config.workdir)
    gathered = summary.gather(folder)
    return card.Facts(
        name=name,
        to=to,
        file=file,
        config=config.model,
        step=step,
        parameters=leaves.parameters(config.model),
        run=gathered["run"],
        phases=gathered["phases"],
        sources=_sources(config),
        licences={source: given.licences for source, given in config.prepare.sources.items()},
        scores=_scores(folder, step),
        chats=chat.speaks(tokenizer),
        tokenizer_class=hf_folder.tokenizer_class(config.model, tokenizer),
    )


def _sources(config: Config) -> dict[str, dict]:
    """Source -> what the card says of it; none if the data is not here."""
    try:
        data = shards.open_data(config.data.dir)
    except ConfigError:
        return {}
    whole, tokens, recipe = sum(data.mixture.values()) or 1.0, data.token_counts(), data.manifest["recipe"]
    found = {}
    for name in data.sources:
        prepared = config.prepare.sources.get(name)
        path = prepared.path if prepared else recipe.get(f"source {name}", "")
        # Of a folder of this machine only the name: where it lies is nobody's business.
        place = pathlib.Path(path).name if pathlib.Path(path).is_absolute() else path
        found[name] = {"origin": place, "share": data.mixture.get(name, 0.0) / whole, "tokens": tokens[name]}
    return found


def _scores(folder: pathlib.Path, step: int) -> list[card.Score]:
    """What this checkpoint scored on benchmarks, as `jaxlm eval` wrote it."""
    place = folder / results.FOLDER / str(step)
    found = results.read(place).values() if (place / results.SUMMARY).is_file() else ()
    return [
        card.Score(one.task, metric, value, one.stderr.get(metric), one.chance, one.fewshot, len(one.items))
        for one in found
        for metric, value in one.metrics.items()
    ]
