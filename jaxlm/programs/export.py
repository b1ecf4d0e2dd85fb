"""`jaxlm export RUN --to=hf|gguf --out=DIR`: writes a run's model for other programs."""

import argparse
import json
import pathlib

import jax

from jaxlm.config import Config, ConfigError
from jaxlm.console import say
from jaxlm.data import chat, shards
from jaxlm.data.coder import Coder
from jaxlm.eval import results
from jaxlm.interop import card, export, gguf_file, hf, leaves
from jaxlm.train import origin, summary


def run(config: Config, args: argparse.Namespace) -> int:
    """Writes the model, reads it back, compares it with the run, and says where it is."""
    if not config.workdir:
        raise ConfigError("which run? jaxlm export RUN --to=hf --out=DIR, with the folder of a run")
    dtype, out = export.dtype_of(args.to, args.dtype), pathlib.Path(args.out).expanduser()
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
    verdict, place = export.export(source, args.to, dtype, out)
    if args.json:
        print(json.dumps({"path": str(place), "step": step, "dtype": dtype, "moved": verdict.moved}))
        return 0
    say(
        f"{verdict.leaves} leaves are the run's, as {dtype} holds them, and so are the logits of {verdict.positions} positions"
        + (f"; {dtype} moved them by {verdict.moved:.2%}" if verdict.moved else "")
    )
    say(f"done: {place} (step {step})")
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
        sources=_sources(pathlib.Path(config.data.dir)),
        licences={source: given.licences for source, given in config.prepare.sources.items()},
        scores=_scores(folder, step),
        chats=chat.speaks(tokenizer),
    )


def _sources(folder: pathlib.Path) -> dict[str, dict]:
    """Source -> what the card says of it; none if the data is not here."""
    try:
        data = shards.open_data(folder)
    except ConfigError:
        return {}
    whole, tokens = sum(data.mixture.values()) or 1.0, data.token_counts()
    recipe = data.manifest["recipe"]
    return {
        name: {
            "origin": recipe.get(name, ""),
            "share": data.mixture.get(name, 0.0) / whole,
            "tokens": tokens[name],
        }
        for name in data.sources
    }


def _scores(folder: pathlib.Path, step: int) -> list[card.Score]:
    """What this checkpoint scored on benchmarks, as `jaxlm eval` wrote it."""
    place = folder / results.FOLDER / str(step)
    found = results.read(place).values() if (place / results.SUMMARY).is_file() else ()
    return [
        card.Score(one.task, metric, value, one.stderr.get(metric), one.chance, one.fewshot, len(one.items))
        for one in found
        for metric, value in one.metrics.items()
    ]
