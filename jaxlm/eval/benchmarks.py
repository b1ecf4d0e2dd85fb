"""Benchmarks while a model trains: the same questions at each step, into metrics.jsonl and RUN/eval/STEP."""

import pathlib
import typing

import jax
from jax.sharding import Mesh

from jaxlm.config import Config, EvalConfig
from jaxlm.data import chat
from jaxlm.data.coder import Encoded
from jaxlm.data.shards import DataDir
from jaxlm.eval import harness, results
from jaxlm.eval.likelihood import NotFinite, Scorer
from jaxlm.models.transformer import Transformer
from jaxlm.objectives.base import Variables
from jaxlm.processes import from_first, say, together


def find(settings: EvalConfig) -> harness.Benchmarks | None:
    """Returns the benchmarks of `eval.tasks`; None if there are none. Called on all processes.

    Raises:
      ConfigError: a task does not exist, its data is missing, or an extra.
    """
    return together(lambda: harness.Benchmarks(settings.tasks, settings)) if settings.tasks else None


def make(
    ask: harness.Benchmarks | None, config: Config, model: Transformer, data: Encoded, mesh: Mesh, folder: pathlib.Path
) -> typing.Callable[[Variables, int], dict[str, float]] | None:
    """Returns a function `(variables, step) -> metrics` that asks `eval.max_items` questions of each task.

    The metrics are called `eval/TASK/METRIC`. The first process also writes RUN/eval/STEP. A model whose log p is not finite
    has none, and a line says so: whether a diverged run ends is for its watches to say. None if there are no tasks.

    Args:
      ask: what `find` returned.

    Raises:
      ConfigError: `eval.chat_template` is asked for, and the model has none.
    """
    if ask is None:
        return None
    settings = config.eval
    sizes = (settings.batch_size * config.train.seq_len, config.loss.tile_tokens)
    searched = data if isinstance(data, DataDir) else None  # for what the model has from it word for word
    if settings.chat_template:
        chat.template(data.tokenizer())
    moment = from_first(lambda: results.moment(folder))
    tokenizer = chat.dated(data.tokenizer(), moment)
    first = Scorer(model, {}, tokenizer, mesh, *sizes, searched, config.sample.chat_template)
    told: set[str] = set()

    def measure(variables: Variables, step: int) -> dict[str, float]:
        try:
            found = list(ask(first.of(variables), settings.max_items))
        except NotFinite as error:
            say(f"no benchmark scores at step {step}: {error}")
            return {}
        asked = {"limit": settings.max_items, "fewshot": settings.fewshot, "chat_template": settings.chat_template}
        about = {"step": step, **asked, "training": True, "moment": moment}
        together(lambda: results.write(folder, found, about), first_only=True)
        flops = training_flops(variables, step * config.train.batch_size * config.train.seq_len)
        for result in found:
            line = results.alarm(result, flops)
            if line and result.task not in told:
                told.add(result.task)
                say(line)
        return {f"eval/{result.task}/{name}": value for result in found for name, value in result.metrics.items()}

    return measure


def training_flops(variables: Variables, tokens: float) -> float:
    """Returns the FLOPs of a training on so many tokens: 6 x parameters x tokens (Kaplan et al. 2020, arXiv:2001.08361)."""
    return 6.0 * sum(leaf.size for leaf in jax.tree.leaves(variables.get("params", {}))) * tokens
