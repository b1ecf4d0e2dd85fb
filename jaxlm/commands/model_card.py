"""Gathers what the model card of an export says of the run and its data."""

import contextlib
import pathlib

from jaxlm.config import Config, ConfigError
from jaxlm.data.batches import rows
from jaxlm.data.batches.open import open_order
from jaxlm.data.chats import chat
from jaxlm.data.shards import shards
from jaxlm.data.tokenizer.coder import Coder
from jaxlm.eval import results
from jaxlm.interop import card, hf_folder
from jaxlm.train import summary


def facts(config: Config, tokenizer: Coder, step: int, name: str, parameters: int) -> card.Facts:
    """Returns what the model card says, from the run's files and its data's; what is exported is not in it yet."""
    folder = pathlib.Path(config.workdir)
    gathered, (sources, mixture) = summary.gather(folder), _sources(config, step)
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
    )


def _sources(config: Config, step: int) -> tuple[dict[str, dict], str]:
    """Returns what the card says of the data that a checkpoint of this step has seen; nothing if the data is not here.

    Returns:
      (source -> where it is from, its share of the first mixture and its tokens; both mixtures in words if it has seen both).
    """
    try:
        data = shards.open_data(config.data.dir)
    except ConfigError:
        return {}, ""
    mixture, words = data.mixture, ""
    with contextlib.suppress(ConfigError):  # of another program, which draws no rows from it
        order = open_order(config)
        mixture, switch = order.mixture, order.switch()
        words = rows.mixture_words(order, step) if switch is not None and switch < step else ""
    whole, tokens, recipe = sum(mixture.values()) or 1.0, data.token_counts(), data.manifest["recipe"]
    sources = {}
    for name in data.sources:
        prepared = config.prepare.sources.get(name)
        path = prepared.path if prepared else recipe.get(f"source {name}", "")
        # Of a folder of this machine only the name: where it lies is nobody's business.
        place = pathlib.Path(path).name if pathlib.Path(path).is_absolute() else path
        sources[name] = {"origin": place, "share": mixture.get(name, 0.0) / whole, "tokens": tokens[name]}
    return sources, words


def _scores(folder: pathlib.Path, step: int) -> list[card.Score]:
    """What this checkpoint scored on benchmarks, as `jaxlm eval` wrote it."""
    place = folder / results.FOLDER / str(step)
    tasks = results.read(place).values() if (place / results.SUMMARY).is_file() else ()
    return [
        card.Score(one.task, metric, value, one.stderr.get(metric), one.chance, one.fewshot, len(one.items))
        for one in tasks
        for metric, value in one.metrics.items()
    ]
