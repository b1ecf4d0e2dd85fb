"""Benchmarks: tasks of EleutherAI's lm-evaluation-harness as they are, HumanEval, DCLM's CORE, the red team, on one scorer."""

import contextlib
import importlib.util
import io
import os
import random
import tempfile
from collections.abc import Iterator, Sequence

import numpy as np

from jaxlm.config import ConfigError, EvalConfig
from jaxlm.eval import core, humaneval, redteam
from jaxlm.eval.likelihood import Scorer
from jaxlm.eval.results import Item, TaskResult, means, measured, shares, spread
from jaxlm.processes import say

_OWN = {"humaneval": humaneval, "core": core, "redteam": redteam}  # `check` and `evaluate`
_QUIET = {"TQDM_DISABLE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1", "TOKENIZERS_PARALLELISM": "false"}


class Benchmarks:
    """Tasks, found and read when this is made, so that a typo is told before any weights are read.

    Args:
      tasks: names of lm-evaluation-harness (also groups: mmlu), `humaneval`, `core`, `redteam`, or
        `core:TASK` and `redteam:CATEGORY` (or redteam_CATEGORY, as its results are named) for a part.
      settings: the section `eval` of the config.

    Raises:
      ConfigError: a task does not exist, its data is not in `eval.data_dir`, the extra is missing, or no code may run.
      RunError: its data could not be fetched.
    """

    def __init__(self, tasks: Sequence[str], settings: EvalConfig):
        self.names, self._settings = list(dict.fromkeys(map(_own_name, tasks))), settings
        for name in self.names:
            own, _, part = name.partition(":")
            if own in _OWN:
                _OWN[own].check(part, settings)
                if settings.chat_template:
                    say(f"{name} gives plain text: eval.chat_template is for the tasks of lm-evaluation-harness")
                if settings.fewshot > 0 and own != "core":
                    say(f"{name} takes no worked examples: not the {settings.fewshot} of eval.fewshot")
        theirs = [name for name in self.names if name.partition(":")[0] not in _OWN]
        self._cache = tempfile.TemporaryDirectory(prefix="jaxlm-eval-")  # lives as long as the tasks do
        self._loaded = _load(theirs, settings, self._cache.name) if theirs else {}

    @property
    def chats(self) -> bool:
        """True if the model needs a chat template for these tasks."""
        return self._settings.chat_template and bool(self._loaded)

    def __call__(self, scorer: Scorer, items: int) -> Iterator[TaskResult]:
        """Yields the results of the tasks, in their order, each as soon as its questions are answered.

        A multiple-choice item's `detail` has `question`, `choices`, `logp` (nats) and `bytes` of each choice as it was
        scored, and `gold`, the index of the right one (a list if several are right). Another's has `question` and `answer`,
        what the model wrote. Of several ways to read one answer (gsm8k) the first gives a metric its plain name, the others
        `name,way`.

        Args:
          items: of each task, spread over all its questions, always the same ones; 0 for all.
        """
        for name in self.names:
            own, _, part = name.partition(":")
            if own in _OWN:
                found = _OWN[own].evaluate(scorer, part, self._settings, items)
            else:
                found = [_task_result(scorer, name, self._loaded[name], items, self._settings)]
            yield from map(measured, found)


def _own_name(name: str) -> str:
    return name.replace("_", ":", 1) if name.startswith("redteam_") else name


def _load(names: list[str], settings: EvalConfig, cache: str) -> dict[str, dict]:
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError(f'{names[0]} needs lm-evaluation-harness: pip install "jaxlm[eval]"')
    for key, value in _QUIET.items():
        os.environ.setdefault(key, value)
    if settings.data_dir:
        os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"
    from jaxlm.eval import lm_eval_tasks

    return lm_eval_tasks.load(names, settings.data_dir, settings.fewshot, cache, settings.run_code)


def _task_result(scorer: Scorer, name: str, tasks: dict, items: int, settings: EvalConfig) -> TaskResult:
    """Runs one task, or the members of a group, whose questions then count alike."""
    import lm_eval

    from jaxlm.eval import lm_eval_model, lm_eval_tasks

    sizes = {leaf: len(task.eval_docs) for leaf, task in tasks.items()}
    taken = shares(sizes, items)
    chosen = {leaf: spread(sizes[leaf], taken[leaf]) for leaf in tasks if taken[leaf]}
    tasks = {leaf: tasks[leaf] for leaf in chosen}
    for leaf, task in tasks.items():
        lm_eval_tasks.ask(task, chosen[leaf])
    chats = settings.chat_template
    model, given = lm_eval_model.ScorerLM(scorer, name, chats), {"tasks": tasks, "groups": {}, "group_map": {}}
    asked = {"samples": chosen, "apply_chat_template": chats, "fewshot_as_multiturn": chats}
    asked |= {"confirm_run_unsafe_code": settings.run_code}
    # Bootstraps fork, which JAX's threads do not survive. What it and its tasks print is not for us.
    with _seeded(), contextlib.redirect_stdout(io.StringIO()):
        output = lm_eval.evaluate(model, given, **asked, bootstrap_iters=0)
    kept = {leaf: _items(task, output["samples"][leaf], leaf if len(sizes) > 1 else "") for leaf, task in tasks.items()}
    whole = [item for of_leaf in kept.values() for item in of_leaf]
    chances = [item.detail.pop("chance", None) for item in whole]
    first = next(iter(tasks.values()))
    metrics, stderr = means(whole)
    if len(tasks) == 1:
        metrics = _scores(output["results"][next(iter(tasks))], first)
    chance = float(np.mean(chances)) if chances and None not in chances else None
    return TaskResult(name, metrics, stderr, chance, int(first.get_config("num_fewshot") or 0), whole)


def _scores(result: dict, task) -> dict[str, float]:
    """Returns the harness's `acc,none`, `exact_match,strict-match`, ... by our names."""
    split = ((*key.partition(",")[::2], value) for key, value in result.items())
    names = _metric_names(task)
    return {
        names(metric, way): float(value) for metric, way, value in split if way and not isinstance(value, str | None)
    }


def _metric_names(task):
    """Returns a function (metric, way) -> its name: plain for the task's first way of reading an answer."""
    ways = [entry["name"] for entry in task.get_config("filter_list") or ()] or ["none"]
    return lambda metric, way: metric if way == ways[0] else f"{metric},{way}"


def _items(task, samples: list[dict], prefix: str) -> list[Item]:
    """Returns the questions of one task with the scores whose mean is the task's; `detail["chance"]` is what guessing scores.

    A perplexity is no such mean: what the harness keeps of it by question is a log p, which `detail` has.
    """
    from lm_eval.api.metrics import mean

    names, aggregation, found = _metric_names(task), task.aggregation(), {}
    for sample in samples:
        number = sample["doc_id"]
        metrics = {
            names(metric, sample["filter"]): float(sample[metric])
            for metric in sample["metrics"]
            if aggregation.get(metric) is mean and isinstance(sample[metric], (int, float, np.number))
        }
        if number in found:
            found[number].metrics.update(metrics)
        else:
            identity = f"{prefix}/{number}" if prefix else str(number)
            found[number] = Item(identity, metrics, _detail(task, sample))
    return list(found.values())


def _detail(task, sample: dict) -> dict:
    if task.OUTPUT_TYPE == "multiple_choice":
        return _choices(task, sample)
    context, *rest = sample["arguments"][0]
    if task.OUTPUT_TYPE == "loglikelihood":
        (logp, _), text = sample["resps"][0][0], rest[0]
        return {"question": context, "choices": [text], "logp": [logp], "bytes": [len(text.encode())], "gold": 0}
    answer = sample["resps"][0][0]
    return {"question": context, "answer": answer, "target": str(sample["target"])}


def _choices(task, sample: dict) -> dict:
    doc = sample["doc"]
    choices = list(task.doc_to_choice(doc))
    scored = sample["arguments"][: len(choices)]
    gold = task.doc_to_text(doc) if task.multiple_input else sample["target"]
    if isinstance(gold, str):
        gold = choices.index(gold) if gold in choices else -1
    labels = (doc.get("mc2_targets") or {}).get("labels") if "mc2" in task.task_name else None
    if labels:
        gold = [number for number, label in enumerate(labels) if label]
    right = len(gold) if isinstance(gold, list) else 1
    return {
        "question": scored[0][0] if not task.multiple_input else doc.get("sentence", scored[0][1]),
        "choices": choices,
        "logp": [float(response[0][0]) for response in sample["resps"][: len(choices)]],
        "bytes": [len(continuation.encode()) for _, continuation in scored],
        "gold": gold,
        "chance": right / len(choices),
    }


@contextlib.contextmanager
def _seeded() -> Iterator[None]:
    """Seeds Python's and NumPy's own random numbers as lm-evaluation-harness does; afterwards they are as before."""
    python, numpy = random.getstate(), np.random.get_state()
    random.seed(0)
    np.random.seed(1234)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
