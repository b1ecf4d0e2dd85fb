"""Finds, loads and runs tasks of EleutherAI's lm-evaluation-harness. Imports lm_eval, which is optional: import this late."""

import contextlib
import io
import itertools
import logging
import pathlib
import random
import re
from collections.abc import Iterable, Iterator, Sequence

import lm_eval.tasks
import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.metrics import mean
from lm_eval.api.model import TemplateLM
from lm_eval.api.samplers import ContextSampler
from lm_eval.api.task import Task
from lm_eval.tasks import TaskManager

from jaxlm.config import ConfigError, EvalConfig, RunError, SampleConfig, config_files
from jaxlm.data.chats import chat
from jaxlm.data.tokenizer.ids import conversation, document
from jaxlm.devices.processes import say
from jaxlm.eval import completions, task_names
from jaxlm.eval.likelihood import Request, Scorer
from jaxlm.eval.results import Item, TaskResult, means, shares, spread
from jaxlm.host.console import working

_ROOT = pathlib.Path(lm_eval.tasks.__file__).parent
_SPLITS = ("training_split", "validation_split", "fewshot_split")
_OFFLINE = "; without network: scripts/hub_layout.py lays files out for --config.eval.data_dir=BENCHMARKS"
# Signs that a scorer runs what a model wrote; sympy's parsers call `eval`.
_RUNS = re.compile(r"(?<![\w.])(?:eval|exec)\(|\b(?:sympy|math_verify|code_eval)\b|\bsubprocess\.")
_SEED = 1234  # of the few-shot examples, as in lm-evaluation-harness
_NEW_TOKENS = 256  # for tasks that set no limit, as in lm-evaluation-harness


def load(
    names: Sequence[str], data_dir: str, fewshot: int, cache: str, run_code: bool = False
) -> dict[str, dict[str, Task]]:
    """Returns name -> {task name: task}: the task of that name, or the members of a group or tag.

    Args:
      names: of tasks, groups or tags of the harness.
      data_dir: a folder laid out as the hub is; "" for the hub.
      fewshot: how many few-shot examples each question gets; -1 as each task says. Tasks that fix 0 stay zero-shot.
      cache: an empty cache folder for `datasets`. Its default cache could return files of another `data_dir`.
      run_code: True to load also tasks whose scorers run code that a model wrote.

    Raises:
      ConfigError: there is no such task, `data_dir` lacks a task's files, or a scorer runs code and `run_code` is False.
      RunError: a task's files could not be fetched.
    """
    for library in ("lm_eval", "datasets", "huggingface_hub"):  # their errors are reported below, in one line
        logging.getLogger(library).setLevel(logging.ERROR)
    with working("looking for tasks"):
        # The harness takes 15 s to index all its files, so only the folders that hold the tasks are indexed.
        manager = TaskManager(include_path=task_names.folders(names), include_defaults=False)
    by_name = {}
    for name in names:
        leaves = list(dict.fromkeys(_leaves(manager, name)))
        if not run_code and (runs := next((leaf for leaf in leaves if _runs_code(manager.task_index[leaf].cfg)), "")):
            raise ConfigError(
                f"{runs}'s scorer runs what the model wrote, in this process, with your files and environment: "
                "--config.eval.run_code=True allows it"
            )
        by_name[name] = {leaf: _load(manager, leaf, data_dir, fewshot, cache) for leaf in leaves}
    return by_name


class Examples(ContextSampler):
    """Draws for each question the few-shot examples that it gets when all questions are asked, even if only some are asked.

    The harness draws for one question after another from one random generator. So a question's examples would depend on which
    questions are asked before it, and change between evaluations in training. Here `ask` names the questions. The examples
    differ from the harness's only after it had to draw again, since a draw held the question twice.
    """

    def __init__(self, drawn: ContextSampler):
        super().__init__(drawn.df, fewshot_indices=drawn.fewshot_indices)
        self.ask(itertools.count())

    def ask(self, numbers: Iterable[int]) -> None:
        self._numbers, self._walk, self._at = iter(numbers), random.Random(_SEED), 0

    def sample(self, n: int, eval_doc=None, df=None, **kwargs) -> Sequence[dict]:
        """Returns the examples of the next question."""
        number, size = next(self._numbers), len(self.fewshot_docs())
        for _ in range(number - self._at):
            self._walk.sample(range(size), n + bool(eval_doc))
        self._at = number
        self.rnd.setstate(self._walk.getstate())
        return super().sample(n, eval_doc, df, **kwargs)


def ask(task: Task, numbers: Sequence[int]) -> None:
    """Prepares a task to ask these questions, in this order; each question gets the same few-shot examples in every call."""
    task.set_fewshot_seed(seed=_SEED)
    if isinstance(getattr(task, "sampler", None), Examples):
        task.sampler.ask(numbers)


def _leaves(manager: TaskManager, name: str) -> Iterator[str]:
    """Yields the names of the tasks in a group or a tag; for a task its own name."""
    if name not in manager.task_index:
        raise ConfigError(f"{name} is no task that lm-evaluation-harness can load")
    entry = manager.task_index[name]
    members = entry.cfg and entry.cfg["task"]
    if entry.yaml_path is None:  # a tag
        yield from sorted(entry.tags)
    elif isinstance(members, list):
        for member in members:
            yield from _leaves(manager, member if isinstance(member, str) else member["task"])
    else:
        yield name


def _runs_code(fields: dict) -> bool:
    """True if a task declares unsafe code, or a file beside one of its functions calls `eval`, `exec` or the like."""
    functions = re.findall(re.escape(str(_ROOT)) + "[^']*", repr(fields))
    files = {file for function in functions for file in pathlib.Path(function).parent.glob("*.py")}
    return bool(fields.get("unsafe_code")) or any(_RUNS.search(file.read_text(encoding="utf-8")) for file in files)


def _load(manager: TaskManager, name: str, data_dir: str, fewshot: int, cache: str) -> Task:
    fields = dict(manager.task_index[name].cfg)
    path, default = str(fields.get("dataset_path") or ""), int(fields.get("num_fewshot") or 0)
    fixed = "num_fewshot" in fields and not default
    shots = default if fewshot < 0 or fixed else fewshot
    if shots < fewshot:
        say(f"{name} is always zero-shot: eval.fewshot={fewshot} is ignored")
    if "ifeval" in name:
        _check_sentences(name)
    override = {"num_fewshot": shots}
    if data_dir:
        kwargs = dict(fields.get("dataset_kwargs") or ()) | {"cache_dir": cache}
        override |= {"dataset_path": str(_folder(name, path, data_dir)), "dataset_kwargs": kwargs}
    where = f"{data_dir} (see scripts/hub_layout.py)" if data_dir else "https://huggingface.co"
    while True:
        try:
            # The harness can override a task's dataset only for a member of a group.
            with working(f"reading {name}", end=False):
                (task,) = manager.load([{"group": "here", "task": [{"task": name, **override}]}])["tasks"].values()
        except KeyError as error:  # no such split; the harness reads the few-shot split even for 0 examples
            lacking = [key for key in _SPLITS if fields.get(key) == error.args[0] and key not in override]
            if shots or not lacking:
                raise ConfigError(
                    f"{name}: no {error.args[0]} in {path} of {where} for its {shots} worked examples: "
                    "hub_layout.py --examples=N lays them out, --fewshot=0 does without"
                ) from None
            override |= dict.fromkeys(lacking)
        except ImportError as error:
            raise _lacks(name, error) from None
        except StopIteration:  # of `datasets`: no row
            raise ConfigError(f"{name}: {path} of {where} has no questions: get it again") from None
        except (OSError, ValueError, RuntimeError) as error:
            kind, mend = (ConfigError, "") if data_dir else (RunError, _OFFLINE)
            line = (config_files.first_line(error) or type(error).__name__)[:200]
            raise kind(f"{name}: can't read {path} from {where}: {line}{mend}") from error
        else:
            _check_examples(name, task, shots, where)
            if type(getattr(task, "sampler", None)) is ContextSampler:
                task.sampler = Examples(task.sampler)
            return task


def _lacks(name: str, error: ImportError) -> ConfigError:
    return ConfigError(f"{name} needs {error.name or error}: pip install {error.name or error}")


def _check_sentences(name: str) -> None:
    """Raises ConfigError if NLTK's sentence data, which IFEval needs, is missing: the harness would download it."""
    try:
        import nltk
    except ImportError as error:
        raise _lacks(name, error) from None
    try:
        nltk.data.find("tokenizers/punkt_tab")
    except LookupError:
        raise ConfigError(f"{name} needs NLTK's sentence data: python -m nltk.downloader punkt_tab") from None


def _check_examples(name: str, task: Task, shots: int, where: str) -> None:
    """Raises ConfigError if there are too few few-shot examples. The harness draws one more than it shows."""
    held = len(task.sampler.df) if shots else 0
    if held < shots + (shots > 0 and type(task.sampler) is ContextSampler):
        raise ConfigError(f"{name}: {where} has {held} worked examples, too few to draw {shots}")


def _folder(name: str, path: str, data_dir: str) -> pathlib.Path:
    root = pathlib.Path(data_dir).expanduser().resolve()
    if not root.is_dir():
        raise ConfigError(f"eval.data_dir={data_dir} is not a folder")
    if path and (root / path).is_dir():
        return root / path
    raise ConfigError(
        f"{name} reads {path or 'no dataset'}, not in eval.data_dir={data_dir}: lay its files there with "
        "scripts/hub_layout.py, or set eval.data_dir= to fetch it from the hub"
    )


# Asking


def evaluate(scorer: Scorer, name: str, tasks: dict[str, Task], items: int, settings: EvalConfig) -> TaskResult:
    """Returns the result of one task, or of a group, in which each question counts the same; `items` 0 asks all questions."""
    sizes = {leaf: len(task.eval_docs) for leaf, task in tasks.items()}
    chosen = {leaf: spread(sizes[leaf], count) for leaf, count in shares(sizes, items).items() if count}
    tasks = {leaf: tasks[leaf] for leaf in chosen}
    for leaf, task in tasks.items():
        ask(task, chosen[leaf])
    chats = settings.chat_template
    model, named = ScorerLM(scorer, name, chats), {"tasks": tasks, "groups": {}, "group_map": {}}
    how = {"samples": chosen, "apply_chat_template": chats, "fewshot_as_multiturn": chats}
    # No bootstraps: they fork, which JAX's threads do not survive. The output of the harness and its tasks is discarded.
    with _seeded(), contextlib.redirect_stdout(io.StringIO()):
        output = lm_eval.evaluate(model, named, **how, bootstrap_iters=0, confirm_run_unsafe_code=settings.run_code)
    answered = []
    for leaf, task in tasks.items():
        answered += _items(task, output["samples"][leaf], f"{leaf}/" if len(sizes) > 1 else "")
    chances = [item.detail.pop("chance", None) for item in answered]
    first = next(iter(tasks.values()))
    metrics, stderr = means(answered)
    if len(tasks) == 1:
        metrics = _scores(output["results"][next(iter(tasks))], first)
    chance = float(np.mean(chances)) if chances and None not in chances else None
    return TaskResult(name, metrics, stderr, chance, int(first.get_config("num_fewshot") or 0), answered)


def _scores(by_metric: dict, task: Task) -> dict[str, float]:
    parts = ((*key.partition(",")[::2], score) for key, score in by_metric.items())
    scored = ((metric, way, score) for metric, way, score in parts if way and not isinstance(score, str | None))
    return {_named(task, metric, way): float(score) for metric, way, score in scored}


def _named(task: Task, metric: str, way: str) -> str:
    ways = [entry["name"] for entry in task.get_config("filter_list") or ()] or ["none"]
    return metric if way == ways[0] else f"{metric},{way}"


def _items(task: Task, samples: list[dict], prefix: str) -> list[Item]:
    """Returns a task's questions with the scores that the task averages; `detail["chance"]` is the score of guessing."""
    # A perplexity is not a mean of scores: for each question the harness keeps a log p, which `detail` has.
    aggregation, items = task.aggregation(), {}
    for sample in samples:
        number = sample["doc_id"]
        if number not in items:
            items[number] = Item(f"{prefix}{number}", {}, _detail(task, sample))
        for metric in sample["metrics"]:
            if aggregation.get(metric) is mean and isinstance(sample[metric], (int, float, np.number)):
                items[number].metrics[_named(task, metric, sample["filter"])] = float(sample[metric])
    return list(items.values())


def _detail(task: Task, sample: dict) -> dict:
    if task.OUTPUT_TYPE == "multiple_choice":
        return _choices(task, sample)
    context, *rest = sample["arguments"][0]
    if task.OUTPUT_TYPE == "loglikelihood":
        (logp, _), text = sample["resps"][0][0], rest[0]
        return {"question": context, "choices": [text], "logp": [logp], "bytes": [len(text.encode())], "gold": 0}
    answer = sample["resps"][0][0]
    return {"question": context, "answer": answer, "target": str(sample["target"])}


def _choices(task: Task, sample: dict) -> dict:
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
    """Seeds Python's and NumPy's global generators as lm-evaluation-harness does, and restores their states afterwards."""
    python, numpy = random.getstate(), np.random.get_state()
    random.seed(0)
    np.random.seed(1234)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


class ScorerLM(TemplateLM):
    """Answers the harness's requests with a `Scorer`.

    A text gets the ids that lm_eval's `hf` model gives it with the exported tokenizer: the opening token (BOS or EOS) once,
    then the text. A rolling likelihood has the opening token once too, where `hf` puts it there twice.

    `chats` is True if contexts are conversations that `apply_chat_template` wrote.
    """

    def __init__(self, scorer: Scorer, what: str, chats: bool = False):
        super().__init__()
        self.scorer, self._what, self._chats = scorer, what, chats
        if chats:
            chat.template(scorer.tokenizer)

    @property
    def tokenizer_name(self) -> str:
        return self.scorer.tokenizer.sha256

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Returns a conversation in the model's own template, without the system message if the template refuses that."""
        tokenizer = self.scorer.tokenizer
        try:
            return chat.render(tokenizer, chat_history, add_generation_prompt)
        except ConfigError:
            rest = [message for message in chat_history if message["role"] != "system"]
            if len(rest) == len(chat_history):
                raise
        text = chat.render(tokenizer, rest, add_generation_prompt)
        self.scorer.say_once(f"{self._what}: without system messages, which the model's chat template refuses")
        return text

    @property
    def eot_token_id(self) -> int:
        return self.scorer.tokenizer.eos_id

    @property
    def prefix_token_id(self) -> int:
        return self.scorer.opening

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs) -> list[int]:
        """Returns the ids of a text, with the opening token unless `add_special_tokens` is False."""
        tokenizer = self.scorer.tokenizer
        if add_special_tokens is False:
            return tokenizer.encode(string)
        return conversation(tokenizer, string) if self._chats else document(tokenizer, string)

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        if self._chats:
            continuation = chat.guarded(self.scorer.tokenizer, continuation)
        return super()._encode_pair(context, continuation)

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        return super().loglikelihood(requests, disable_tqdm=True)

    def _loglikelihood_tokens(self, requests: list[tuple], **kwargs) -> list[tuple[float, bool]]:
        return [(s.logp, s.greedy) for s in self.scorer.score([(c, ids) for _, c, ids in requests], self._what)]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = True) -> list[float]:
        return [score.logp for score in self.scorer.score([self._whole(*r.args) for r in requests], self._what)]

    def _whole(self, text: str) -> Request:
        return (self.prefix_token_id,), self.scorer.tokenizer.encode(text)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        by_settings: dict[tuple[tuple[str, ...], SampleConfig], list[int]] = {}
        for number, request in enumerate(requests):
            by_settings.setdefault(_settings(request.args[1]), []).append(number)
        texts: dict[int, str] = {}
        for (stops, settings), numbers in by_settings.items():
            prompts = [self.tok_encode(requests[number].args[0]) for number in numbers]
            written = completions.complete(self.scorer, prompts, stops, settings, self._what)
            texts |= zip(numbers, written, strict=True)
        return [texts[number] for number in range(len(requests))]


def _settings(spec: dict) -> tuple[tuple[str, ...], SampleConfig]:
    """Returns (stop strings, sampling settings) for the generation arguments of a request."""
    until: str | Iterable[str] = spec.get("until") or ()
    sampled = spec.get("do_sample", spec.get("temperature", 0) > 0) and spec.get("temperature", 1) > 0
    limit = next((spec[key] for key in ("max_gen_toks", "max_new_tokens", "max_tokens") if key in spec), _NEW_TOKENS)
    settings = completions.greedy(int(limit))
    if sampled:
        changed = {key: spec[key] for key in ("temperature", "top_k", "top_p") if key in spec}
        settings = SampleConfig(**{**vars(settings), "temperature": 1.0, **changed})
    return (until,) if isinstance(until, str) else tuple(until), settings
