"""Benchmarks: runs one's own questions, tasks of lm-evaluation-harness, HumanEval, CORE and the red team with one scorer.

`jaxlm eval` runs them, and so does a hook in training, which asks the same questions at each step.
"""

import importlib.util
import os
import pathlib
import tempfile
from collections.abc import Callable, Iterator, Sequence

import jax
from jax.sharding import Mesh

from jaxlm.config import Config, ConfigError, EvalConfig, pip_install
from jaxlm.data.chats import chat
from jaxlm.data.shards.shards import DataDir
from jaxlm.data.tokenizer.coder import Encoded
from jaxlm.devices.processes import from_first, say, together
from jaxlm.eval import core, humaneval, questions, redteam, results
from jaxlm.eval.likelihood import NotFinite, Scorer
from jaxlm.eval.results import TaskResult
from jaxlm.models.transformer import Transformer
from jaxlm.step.objectives.base import Variables

_OWN = {"humaneval": humaneval, "core": core, "redteam": redteam, "": questions}  # `check` and `evaluate`
_SUFFIXES = (".json", ".txt", ".csv", ".parquet", ".JSONL", ".gz")  # of a file that was meant as questions
_QUIET = {"TQDM_DISABLE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1", "TOKENIZERS_PARALLELISM": "false"}


class Benchmarks:
    """Benchmark tasks. The constructor finds and reads them, so that a typo is reported before any weights are read.

    Args:
      tasks: FILE.jsonl of one's own questions, names of lm-evaluation-harness (also groups: mmlu), `humaneval`, `core`,
        `redteam`, or `core:TASK` and `redteam:CATEGORY` (or redteam_CATEGORY, as in results) for a part.

    Raises:
      ConfigError: a task does not exist, its data is not in `eval.data_dir`, the extra `eval` is missing, or code may not run.
      RunError: a task's data could not be fetched.
    """

    def __init__(self, tasks: Sequence[str], settings: EvalConfig):
        self.names, self._settings = list(dict.fromkeys(map(_own_name, tasks))), settings
        if odd := [
            name for name in self.names if not questions.is_file(name) and pathlib.Path(name).suffix in _SUFFIXES
        ]:
            raise ConfigError(f"{odd[0]}: the name of a file of questions ends in .jsonl (docs/evaluation.md)")
        files = [pathlib.PurePath(name).name for name in self.names if questions.is_file(name)]
        if twice := [name for name in files if files.count(name) > 1]:
            raise ConfigError(
                f"two files of questions are called {twice[0]}, and so would be their results: rename one"
            )
        for name in self.names:
            own, part = _parts(name)
            if own in _OWN:
                _OWN[own].check(part, settings)
                if settings.chat_template:
                    say(f"{name} ignores eval.chat_template, which is for tasks of lm-evaluation-harness")
                if settings.fewshot > 0 and own != "core":
                    say(f"{name} is always zero-shot: eval.fewshot={settings.fewshot} is ignored")
        theirs = [name for name in self.names if _parts(name)[0] not in _OWN]
        self._cache = tempfile.TemporaryDirectory(prefix="jaxlm-eval-")  # must exist as long as the tasks
        self._loaded = _load(theirs, settings, self._cache.name) if theirs else {}

    @property
    def chats(self) -> bool:
        return self._settings.chat_template and bool(self._loaded)

    def __call__(self, scorer: Scorer, items: int) -> Iterator[TaskResult]:
        """Yields the results of the tasks, in order, each as soon as the task's questions are answered.

        A multiple-choice item's `detail` has `question`, `choices`, the `logp` (nats) and `bytes` of each choice as scored,
        and `gold`, the index of the right choice (a list if several are right). Other items have `question` and `answer`, the
        text that the model wrote. If a task extracts answers in several ways (gsm8k), metrics of the first way have plain
        names, others `name,way`. Asks `items` questions of each task, in every call the same; 0 asks all.
        """
        for name in self.names:
            own, part = _parts(name)
            if own in _OWN:
                scored = _OWN[own].evaluate(scorer, part, self._settings, items)
            else:
                from jaxlm.eval import lm_harness

                scored = [lm_harness.evaluate(scorer, name, self._loaded[name], items, self._settings)]
            yield from map(results.measured, scored)


def _parts(name: str) -> tuple[str, str]:
    """Returns (a key of `_OWN` or a name of the harness, the part of it): "" and the path for a file of questions."""
    return ("", name) if questions.is_file(name) else name.partition(":")[::2]


def _own_name(name: str) -> str:
    return name.replace("_", ":", 1) if name.startswith("redteam_") else name


def _load(names: list[str], settings: EvalConfig, cache: str) -> dict[str, dict]:
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError(f"{names[0]} needs lm-evaluation-harness: {pip_install('eval')}")
    for key, value in _QUIET.items():
        os.environ.setdefault(key, value)
    if settings.data_dir:
        os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"
    from jaxlm.eval import lm_harness

    return lm_harness.load(names, settings.data_dir, settings.fewshot, cache, settings.run_code)


def find(settings: EvalConfig) -> Benchmarks | None:
    """Returns the benchmarks of `eval.tasks`; None if there are none. Call it on all processes. Raises as `Benchmarks`."""
    return together(lambda: Benchmarks(settings.tasks, settings)) if settings.tasks else None


def make(
    ask: Benchmarks | None, config: Config, model: Transformer, data: Encoded, mesh: Mesh, folder: pathlib.Path
) -> Callable[[Variables, int], dict[str, float]] | None:
    """Returns a function `(variables, step) -> metrics` that asks `eval.max_items` questions of each task.

    The metrics are named `eval/TASK/METRIC`. The first process also writes RUN/eval/STEP. If a log p is not finite, the
    function says so and returns no metrics; the run's watches decide whether it ends. Returns None if `ask` is None.

    Raises ConfigError if `eval.chat_template` is True and the model has no chat template.
    """
    if ask is None:
        return None
    settings = config.eval
    sizes = (settings.batch_size * config.train.seq_len, config.loss.tile_tokens)
    searched = data if isinstance(data, DataDir) else None  # where the red team searches for memorised text
    if settings.chat_template:
        chat.template(data.tokenizer())
    moment = from_first(lambda: results.moment(folder))
    tokenizer = chat.dated(data.tokenizer(), moment)
    first = Scorer(model, {}, tokenizer, mesh, *sizes, searched, config.sample.chat_template)
    how = {"limit": settings.max_items, "fewshot": settings.fewshot, "chat_template": settings.chat_template}

    warned: set[str] = set()

    def measure(variables: Variables, step: int) -> dict[str, float]:
        try:
            scored = list(ask(first.of(variables), settings.max_items))
        except NotFinite as error:
            say(f"no benchmark scores at step {step}: {error}")
            return {}
        about = {"step": step, **how, "training": True, "moment": moment}
        together(lambda: results.write(folder, scored, about), first_only=True)
        flops = training_flops(variables, step * config.train.batch_size * config.train.seq_len)
        for result in scored:
            line = results.alarm(result, flops)
            if line and result.task not in warned:
                warned.add(result.task)
                say(line)
        return {f"eval/{result.task}/{name}": score for result in scored for name, score in result.metrics.items()}

    return measure


def training_flops(variables: Variables, tokens: float) -> float:
    """Returns the FLOPs of training on `tokens`: 6 x parameters x tokens (Kaplan et al. 2020, arXiv:2001.08361)."""
    return (
        6.0 * sum(leaf.size for of in ("params", "packed") for leaf in jax.tree.leaves(variables.get(of, {}))) * tokens
    )
