"""Tasks of EleutherAI's lm-evaluation-harness: found, loaded and asked. Imports lm_eval: import it where it is needed."""

import contextlib
import difflib
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

from jaxlm.config import ConfigError, EvalConfig, RunError, SampleConfig
from jaxlm.data.chats import chat
from jaxlm.data.tokenizer.ids import conversation, document
from jaxlm.devices.processes import say
from jaxlm.eval import completions
from jaxlm.eval.likelihood import Request, Scorer
from jaxlm.eval.results import Item, TaskResult, means, shares, spread
from jaxlm.host.console import working

_ROOT = pathlib.Path(lm_eval.tasks.__file__).parent
_NAME = re.compile(rb"^(?:task|group|tag): *[\"']?([\w.-]+)", re.MULTILINE)
_SPLITS = ("training_split", "validation_split", "fewshot_split")
_OFFLINE = "; without network: scripts/hub_layout.py lays files out for --config.eval.data_dir=BENCHMARKS"
# What is in a scorer that runs what a model wrote; sympy's parsers evaluate.
_RUNS = re.compile(r"(?<![\w.])(?:eval|exec)\(|\b(?:sympy|math_verify|code_eval)\b|\bsubprocess\.")
_SEED = 1234  # of the worked examples, as lm-evaluation-harness has it
_NEW_TOKENS = 256  # of a text whose task names no limit, as lm-evaluation-harness has it


def load(
    names: Sequence[str], data_dir: str, fewshot: int, cache: str, run_code: bool = False
) -> dict[str, dict[str, Task]]:
    """Returns name -> the tasks that it stands for, by their names: itself, or the members of a group.

    Args:
      names: of tasks, groups or tags of the harness.
      data_dir: a folder laid out as the hub is; "" for the hub.
      fewshot: the worked examples before each question; -1 as each task says. Tasks that fix none stay without.
      cache: an empty folder for what `datasets` makes of `data_dir`. In its own cache it would find another folder's files.
      run_code: True to load tasks whose scorers run what a model wrote.

    Raises:
      ConfigError: there is no such task, `data_dir` lacks its files, or it runs code.
      RunError: its files could not be fetched.
    """
    for library in ("lm_eval", "datasets", "huggingface_hub"):  # what they raise is told in one line
        logging.getLogger(library).setLevel(logging.ERROR)
    with working("looking for tasks"):
        manager = _manager(names)
    by_name = {}
    for name in names:
        leaves = list(dict.fromkeys(_leaves(manager, name)))
        if not run_code and (runs := next((leaf for leaf in leaves if _runs_code(_fields(manager, leaf))), "")):
            raise ConfigError(
                f"{runs} is scored by code that runs what the model wrote, in this process, with your files and environment: "
                "--config.eval.run_code=True consents"
            )
        by_name[name] = {leaf: _load(manager, leaf, data_dir, fewshot, cache) for leaf in leaves}
    return by_name


class Examples(ContextSampler):
    """Draws for each question the worked examples that a run of all questions draws for it, whichever are asked.

    The harness draws them one question after another from one sequence of random numbers. So those of a question would change
    with which others are asked, and from one evaluation in training to the next. Here `ask` says which are asked. Only where
    the drawn examples hold the question itself twice the harness draws again, and its later ones differ from ours.
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
    """Prepares a task for these questions, in order: the worked examples of each are the same whenever it is asked."""
    task.set_fewshot_seed(seed=_SEED)
    if isinstance(getattr(task, "sampler", None), Examples):
        task.sampler.ask(numbers)


def _manager(names: Sequence[str]) -> TaskManager:
    """A manager that knows the names. Raises ConfigError with the nearest ones if there is no such task."""
    # To index all 14,000 of its files takes the harness 15 s: only the folders that hold the tasks are read.
    # Most tasks lie in a folder of their name, or of its first words.
    begins = {"_".join(name.split("_")[:words]) for name in names for words in range(1, name.count("_") + 2)}
    manager = TaskManager(
        include_path=[_ROOT / part for part in begins if (_ROOT / part).is_dir()], include_defaults=False
    )
    if all(name in manager.task_index for name in names):
        return manager
    folders: dict[str, set[str]] = {}
    for path in _ROOT.rglob("*.yaml"):
        for match in _NAME.finditer(path.read_bytes()):
            folders.setdefault(match.group(1).decode(), set()).add(path.relative_to(_ROOT).parts[0])
    for name in names:
        if name not in folders:
            near = difflib.get_close_matches(name, folders, n=3)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise ConfigError(f"no task {name} in lm-evaluation-harness{hint}")
    needed = set().union(*(folders[name] for name in names))
    return TaskManager(include_path=[_ROOT / part for part in sorted(needed)], include_defaults=False)


def _leaves(manager: TaskManager, name: str) -> Iterator[str]:
    """Yields the tasks of a task, a group or a tag."""
    entry = manager.task_index[name]
    members = entry.cfg and entry.cfg["task"]
    if entry.yaml_path is None:  # a tag
        yield from sorted(entry.tags)
    elif isinstance(members, list):
        for member in members:
            yield from _leaves(manager, member if isinstance(member, str) else member["task"])
    else:
        yield name


def _fields(manager: TaskManager, name: str) -> dict:
    return dict(manager.task_index[name].cfg)


def _runs_code(fields: dict) -> bool:
    """True if a task says so, or the folder of a function that it names has a scorer that evaluates."""
    functions = re.findall(re.escape(str(_ROOT)) + "[^']*", repr(fields))
    files = {file for function in functions for file in pathlib.Path(function).parent.glob("*.py")}
    return bool(fields.get("unsafe_code")) or any(_RUNS.search(file.read_text(encoding="utf-8")) for file in files)


def _load(manager: TaskManager, name: str, data_dir: str, fewshot: int, cache: str) -> Task:
    fields = _fields(manager, name)
    path, default = str(fields.get("dataset_path") or ""), int(fields.get("num_fewshot") or 0)
    fixed = "num_fewshot" in fields and not default
    shots = default if fewshot < 0 or fixed else fewshot
    if shots < fewshot:
        say(f"{name} takes no worked examples: not the {fewshot} of eval.fewshot")
    if "ifeval" in name:
        _check_sentences(name)
    override = {"num_fewshot": shots}
    if data_dir:
        kwargs = dict(fields.get("dataset_kwargs") or ()) | {"cache_dir": cache}
        override |= {"dataset_path": str(_folder(name, path, data_dir)), "dataset_kwargs": kwargs}
    where = f"{data_dir} (see scripts/hub_layout.py)" if data_dir else "https://huggingface.co"
    while True:
        try:
            # The only way to a task whose dataset lies elsewhere: as a member of a group.
            with working(f"reading {name}", end=False):
                (task,) = manager.load([{"group": "here", "task": [{"task": name, **override}]}])["tasks"].values()
        except KeyError as error:  # no such split; the harness reads the worked examples even if none are shown
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
            raise ConfigError(f"{name}: no question in {path} of {where}: lay it out again") from None
        except (OSError, ValueError, RuntimeError) as error:
            kind, mend = (ConfigError, "") if data_dir else (RunError, _OFFLINE)
            raise kind(f"{name}: can't read {path} from {where}: {_line(error)}{mend}") from error
        else:
            _check_examples(name, task, shots, where)
            if type(getattr(task, "sampler", None)) is ContextSampler:
                task.sampler = Examples(task.sampler)
            return task


def _lacks(name: str, error: ImportError) -> ConfigError:
    return ConfigError(f"{name} needs {error.name or error}: pip install {error.name or error}")


def _check_sentences(name: str) -> None:
    """Raises ConfigError without the data by which IFEval cuts sentences: the harness would fetch them."""
    try:
        import nltk
    except ImportError as error:
        raise _lacks(name, error) from None
    try:
        nltk.data.find("tokenizers/punkt_tab")
    except LookupError:
        raise ConfigError(f"{name} cuts sentences by data of NLTK: python -m nltk.downloader punkt_tab") from None


def _check_examples(name: str, task: Task, shots: int, where: str) -> None:
    """Raises ConfigError if there are too few worked examples. The harness draws one more than it shows."""
    held = len(task.sampler.df) if shots else 0
    if held < shots + (shots > 0 and type(task.sampler) is ContextSampler):
        raise ConfigError(f"{name}: {held} worked examples in {where}, too few to draw {shots} from")


def _folder(name: str, path: str, data_dir: str) -> pathlib.Path:
    root = pathlib.Path(data_dir).expanduser().resolve()
    if not root.is_dir():
        raise ConfigError(f"eval.data_dir={data_dir} is no folder")
    if path and (root / path).is_dir():
        return root / path
    raise ConfigError(
        f"{name} reads {path or 'no dataset'}, not in eval.data_dir={data_dir}: lay its files there with "
        "scripts/hub_layout.py, or set eval.data_dir= to fetch it from the hub"
    )


def _line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[0][:200]


# Asking


def evaluate(scorer: Scorer, name: str, tasks: dict[str, Task], items: int, settings: EvalConfig) -> TaskResult:
    """Returns the result of one task, or of the members of a group, whose questions then count alike; `items` 0 asks all."""
    sizes = {leaf: len(task.eval_docs) for leaf, task in tasks.items()}
    chosen = {leaf: spread(sizes[leaf], count) for leaf, count in shares(sizes, items).items() if count}
    tasks = {leaf: tasks[leaf] for leaf in chosen}
    for leaf, task in tasks.items():
        ask(task, chosen[leaf])
    chats = settings.chat_template
    model, named = ScorerLM(scorer, name, chats), {"tasks": tasks, "groups": {}, "group_map": {}}
    how = {"samples": chosen, "apply_chat_template": chats, "fewshot_as_multiturn": chats}
    # Bootstraps fork, which JAX's threads do not survive. What it and its tasks print is not for us.
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
    scores = {}
    for key, score in by_metric.items():
        metric, _, way = key.partition(",")
        if way and not isinstance(score, str | None):
            scores[_named(task, metric, way)] = float(score)
    return scores


def _named(task: Task, metric: str, way: str) -> str:
    ways = [entry["name"] for entry in task.get_config("filter_list") or ()] or ["none"]
    return metric if way == ways[0] else f"{metric},{way}"


def _items(task: Task, samples: list[dict], prefix: str) -> list[Item]:
    """The questions of one task with the scores whose mean is the task's; `detail["chance"]` is what guessing scores."""
    # A perplexity is no such mean: what the harness keeps of it by question is a log p, which `detail` has.
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
    """Seeds Python's and NumPy's own random numbers as lm-evaluation-harness does; afterwards they are as before."""
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

    A text gets the ids that lm_eval's `hf` model gives it with the exported tokenizer: what documents begin with, once, then
    the text. Unlike there a rolling likelihood has it once too: `hf` puts it in front of a text that already begins with it.

    `chats` is True if contexts are conversations, as `apply_chat_template` writes them.
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
        """Returns a conversation in the model's own template; without its system message if the template refuses it."""
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
        """Returns the ids of a text, as a document's beginning unless `add_special_tokens` is False."""
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
            written = completions.complete(self.scorer, prompts, stops, settings, 0, self._what)
            texts |= zip(numbers, written, strict=True)
        return [texts[number] for number in range(len(requests))]


def _settings(spec: dict) -> tuple[tuple[str, ...], SampleConfig]:
    """Returns (stop strings, settings) of a task's `generation_spec`."""
    until: str | Iterable[str] = spec.get("until") or ()
    sampled = spec.get("do_sample", spec.get("temperature", 0) > 0) and spec.get("temperature", 1) > 0
    limit = next((spec[key] for key in ("max_gen_toks", "max_new_tokens", "max_tokens") if key in spec), _NEW_TOKENS)
    settings = completions.greedy(int(limit))
    if sampled:
        changed = {key: spec[key] for key in ("temperature", "top_k", "top_p") if key in spec}
        settings = SampleConfig(**{**vars(settings), "temperature": 1.0, **changed})
    return (until,) if isinstance(until, str) else tuple(until), settings
