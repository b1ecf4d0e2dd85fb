"""The prompts of a run as its data: the prompts of a step are a pure function of the seed and the number of its batch.

They are rows of a file, each once an epoch, or questions that a task generates without end.
"""

import dataclasses
import functools
import hashlib
import itertools
import json
import pathlib
import re
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from importlib import metadata

import numpy as np

from jaxlm.config import Config, ConfigError, RunError, nearest
from jaxlm.data.batches import encoded, loader
from jaxlm.data.batches.example_rows import Texts
from jaxlm.data.batches.order import Order
from jaxlm.data.chats import chat, examples, masks
from jaxlm.data.chats.records import Messages, Notes, Row, Unfit, message_of
from jaxlm.data.shards.mixture import Windows
from jaxlm.data.shards.verify import Verifier
from jaxlm.data.tokenizer.coder import Coder
from jaxlm.host.console import Say
from jaxlm.step.objectives import policy
from jaxlm.train.rl.process import Failed, Processes

_KEPT = 4  # batches in memory: the log asks for them again
_TRIES = 64  # questions to generate for one item at most, until one fits
_HALF = 2**31  # training takes the questions with lower numbers, evaluation those from this number on
_AT_ONCE = 16  # questions generated in one order, so that the order ends in time
_PROBED = 16  # questions generated to see how long they are
_COLUMNS = ("answer", "task")  # of a task's questions
_TRUTH = "####"  # GSM8K's mark before the final answer
_ONE_IN = 8  # one question in this many is for evaluation
KINDS = ("reasoning_gym", "gsm8k")
_COMMA = re.compile(r",(?![^\[(]*[\])])")  # not between the brackets of a value


class Spec(typing.NamedTuple):
    """One task: its text in the config, its kind (one of KINDS), its name, and its options as texts."""

    text: str
    kind: str
    name: str
    options: Mapping[str, str]


def parse_tasks(tasks: str) -> list[Spec]:
    """Returns the tasks that `reward.tasks` names. Raises ConfigError if one is malformed."""
    return [_spec(text.strip()) for text in _COMMA.split(tasks)] if tasks.strip() else []


def _spec(text: str) -> Spec:
    kind, _, rest = text.partition(":")
    if kind not in KINDS:
        raise ConfigError(f"config.reward.tasks: there is no kind of task {kind!r}; {nearest(kind, KINDS)}")
    if kind == "gsm8k":
        return Spec(text, kind, rest, {})
    name, _, query = rest.partition("?")
    if not name:
        raise ConfigError(f"config.reward.tasks: {text!r} names no task: reasoning_gym:chain_sum, for example")
    options = {}
    for part in filter(None, query.split("&")):
        key, equals, value = part.partition("=")
        if not equals:
            raise ConfigError(f"config.reward.tasks: {part!r} in {text!r} is no key=value")
        options[key] = value
    return Spec(text, kind, name, options)


def for_evaluation(question: str) -> bool:
    """True if a question is never trained on: one in eight, by a hash of its text."""
    return hashlib.blake2b(question.encode(), digest_size=1).digest()[0] % _ONE_IN == 0


@dataclasses.dataclass(frozen=True)
class Item:
    """One prompt.

    Attributes:
      place: its file and line, "gsm8k.jsonl:12", or its task and the question's number, "reasoning_gym:chain_sum 17".
      judge: (the task's index in `reward.tasks`, the question's number, or for gsm8k the true answer); None without a task.
    """

    messages: Messages
    ids: list[int]
    columns: Mapping
    place: str
    judge: tuple[int, int | str] | None = None
    truth: str | None = None

    @property
    def prompt(self) -> str:
        return self.messages[-1]["content"]


@dataclasses.dataclass(frozen=True)
class Rows:
    """Prompts of a file, in another order each epoch."""

    name: str
    train: Sequence[Item]
    val: Sequence[Item]
    seed: int
    sha256: str

    @functools.cached_property
    def tokens(self) -> int:
        return sum(len(item.ids) for item in self.train)

    @functools.cached_property
    def columns(self) -> Collection[str]:
        return {name for item in (*self.train, *self.val) for name in item.columns}

    def draw(self, numbers: Sequence[int]) -> list[Item]:
        """Returns the training items of these draws (counted from 0), the same in each process."""
        size = len(self.train)
        return [self.train[_order(self.seed, number // size, size)[number % size]] for number in numbers]

    def held_out(self, count: int) -> list[Item]:
        return list(self.val[:count])


@functools.lru_cache(maxsize=8)
def _order(seed: int, number: int, size: int) -> np.ndarray:
    return np.random.default_rng([seed, number]).permutation(size)


class Reader(typing.NamedTuple):
    """Reads files as `Rows`.

    Attributes:
      val_fraction: the share of prompts to hold out, by a hash of the prompt.
      val_path: a file of held-out prompts; "" to hold out `val_fraction` instead.
    """

    tokenizer: Coder
    room: int
    seed: int
    val_fraction: float
    val_path: str
    say: Callable[[str], object]
    notes: Notes

    def rows(self, path: str, key: str, task: int | None = None) -> Rows:
        """Returns the prompts of a file, a folder or a glob. Raises ConfigError.

        `task`: the index of the task `gsm8k` that reads the file; None for prompts without a true answer.
        """
        items = self._items(path, key, task)
        if self.val_path:
            train, val = items, self._items(self.val_path, "examples.val_path", task)
        else:
            keys_E = np.asarray([encoded.key(item.messages) for item in items], np.uint64)
            out_E = encoded.held_out(keys_E, self.val_fraction)
            train = [item for item, out in zip(items, out_E, strict=True) if not out]
            val = [item for item, out in zip(items, out_E, strict=True) if out]
            if not val:
                why = "since all are the same: name others by examples.val_path"
                self.say(f"none of the prompts of {path} is held out, {why}")
        return Rows(path, train, val, self.seed, _sha256(train))

    def _items(self, path: str, key: str, task: int | None) -> list[Item]:
        if not path and task is not None:
            file = "gsm8k:FILE.jsonl, or --config.data.path=FILE.jsonl"
            raise ConfigError(f"config.reward.tasks=gsm8k needs its file: {file}")
        read = examples.read_prompts(path, key, self.notes, _question if task is not None else None)
        items, long = [], 0
        while chunk := list(itertools.islice(read, encoded.CHUNK)):
            rendered = [(prompt, text) for prompt in chunk if (text := self._rendered(prompt)) is not None]
            ids_of_prompts = chat.all_ids(self.tokenizer, [text for _, text in rendered])
            for (prompt, _), ids in zip(rendered, ids_of_prompts, strict=True):
                if len(ids) > self.room:
                    long += 1
                    continue
                truth = None if task is None else prompt.columns["answer"]
                judge = None if task is None else (task, truth)
                items.append(Item(prompt.messages, ids, prompt.columns, str(prompt.place), judge, truth))
        self.notes.check()
        if not items:
            why = self.too_long("all its prompts are") if long else self.notes.left_out or "it has no prompts"
            raise ConfigError(f"{path}: {why}")
        if long:
            self.say(f"{long:,} of {long + len(items):,} prompts of {path} are left out: {self.too_long('they are')}")
        return items

    def _rendered(self, prompt: examples.Asked) -> str | None:
        """Returns a prompt as text; None if the template refuses it. Notes refusals, and keys that the template leaves out."""
        example = examples.Chat(prompt.messages, prompt.place, tools=prompt.tools)
        if example.keys:
            for key in masks.unwritten(chat.Writer(self.tokenizer), example, self.notes.ignore):
                self.notes.note("refused", key, prompt.place, masks.UNWRITTEN)
        try:
            return chat.render(self.tokenizer, prompt.messages, tools=prompt.tools)
        except ConfigError as error:
            self.notes.note("unfit", "", prompt.place, str(error))
            return None

    def too_long(self, who: str) -> str:
        """Returns a line on prompts that do not fit, with what to do; it begins with `who`: "they are"."""
        return (
            f"{who} longer than the {self.room:,} tokens that train.seq_len leaves besides rollout.max_new_tokens; raise "
            "train.seq_len or train.batch_size"
        )


def _question(row: Row) -> tuple[Messages, dict[str, str]]:
    """Returns (messages, columns) of a GSM8K record; the column `answer` is the text behind #### at the end of its `answer`."""
    question, answer = row.get("question"), row.get("answer")
    if not isinstance(question, str) or not isinstance(answer, str):
        raise Unfit("gsm8k needs a question and an answer, both texts")
    _, mark, truth = answer.rpartition(_TRUTH)
    if not mark or not truth.strip():
        raise Unfit(f"the answer does not end with {_TRUTH} and the final answer, as GSM8K's do")
    return (message_of("user", question),), {"task": "gsm8k", "answer": truth.strip()}


def _sha256(items: Iterable[Item]) -> str:
    digest = hashlib.sha256()
    for item in items:
        digest.update(json.dumps([item.ids, dict(item.columns)], default=str).encode())
    return digest.hexdigest()


class Made:
    """Questions of a reasoning-gym task, with the methods of `Rows`. Raises ConfigError if none fits, RunError if none is made.

    Draw n may take the task's questions 64 n to 64 n + 63, counted from a start that depends on the seed. It takes the first
    that fits and is not for evaluation: by a hash of the text, one question in eight is for evaluation only. So no held-out
    question is ever trained on, however few the task has. The held-out questions are the same for all seeds.
    """

    tokens, columns = 0, _COLUMNS

    def __init__(self, spec: Spec, number: int, process: Processes, reader: Reader):
        self.name, self._number, self._process, self._reader = spec.text, number, process, reader
        self._start = int(np.random.SeedSequence([reader.seed, number]).generate_state(1)[0]) % (_HALF // _TRIES)
        self._label = f"{spec.kind}:{spec.name}"
        version = metadata.version("reasoning_gym")
        self.sha256 = hashlib.sha256(f"{spec.text} {version} {reader.room}".encode()).hexdigest()
        self._held_out: list[Item] = []
        self._asked = 0
        made = self._questions([(self._start * _TRIES + i) % _HALF for i in range(_PROBED)])
        fits = [item for item in made if isinstance(item, Item)]
        if not fits:
            why = reader.too_long("its questions are") if None in made else made[0]
            raise ConfigError(f"config.reward.tasks={spec.text}: {why}")
        if long := made.count(None):
            of = f"{long} of the first {_PROBED} questions of {self._label}"
            reader.say(f"{of} are left out, and others generated: {reader.too_long('they are')}")

    def draw(self, numbers: Sequence[int]) -> list[Item]:
        """Returns the items of these draws. Raises RunError if the task makes no question that fits."""
        own = [(self._start + number) * _TRIES % _HALF for number in numbers]
        items = self._first(own, lambda item: not for_evaluation(item.prompt))
        if None in items:
            raise RunError(f"{self._label}: in {_TRIES} tries no question was short enough and not held out")
        return items

    def held_out(self, count: int) -> list[Item]:
        if count > self._asked:
            own = [_HALF + number * _TRIES for number in range(self._asked, count)]
            self._held_out += self._first(own, lambda item: for_evaluation(item.prompt))
            self._asked = count
        return [item for item in self._held_out[:count] if item]

    def _first(self, own: Sequence[int], fits: Callable[[Item], bool]) -> list[Item | None]:
        """Returns for each draw the first of its 64 questions, numbered from `own` on, that `fits`; None if none does."""
        chosen: list[Item | None] = [None] * len(own)
        for again in range(_TRIES):
            missing = [i for i, item in enumerate(chosen) if item is None]
            if not missing:
                break
            made = self._questions([own[i] + again for i in missing])
            for i, item in zip(missing, made, strict=True):
                if isinstance(item, Item) and fits(item):
                    chosen[i] = item
        return chosen

    def _questions(self, numbers: Sequence[int]) -> list[Item | str | None]:
        """Returns the questions of these numbers; None for a question that is too long, a text for a failure."""
        questions = []
        for first in range(0, len(numbers), _AT_ONCE):
            part = numbers[first : first + _AT_ONCE]
            answers = self._ask([(self._number, number) for number in part])
            questions += [self._item(*pair) for pair in zip(part, answers, strict=True)]
        return questions

    def _ask(self, wanted: list[tuple[int, int]]) -> list:
        try:
            return self._process.ask("draw", wanted)
        except Failed:
            try:
                return self._process.ask("draw", wanted)
            except Failed as error:
                raise RunError(f"{self._label} makes no questions: it {error}") from None

    def _item(self, number: int, made: Sequence[str | None] | str) -> Item | str | None:
        if isinstance(made, str):
            return f"it makes no questions: {made}"
        question, truth = made
        messages = ({"role": "user", "content": question},)
        ids = chat.ids(self._reader.tokenizer, messages)
        if len(ids) > self._reader.room:
            return None
        columns = {"task": self._label, "answer": truth}
        return Item(messages, ids, columns, f"{self._label} {number}", (self._number, number), truth)


Source = Rows | Made


@dataclasses.dataclass(frozen=True)
class Prompts(Order):
    """The prompts of a run in their order, drawn from several sources in turn.

    Attributes:
      count, room: the number of prompts of a batch; the most tokens of a prompt.
    """

    data: Texts
    sources: tuple[Source, ...]
    seed: int
    count: int
    room: int
    passed_over: Windows = ()

    def parts(self) -> dict[str, str]:
        return {"data": self.data.sha256, "seed": str(self.seed), "prompts": str(self.count)}

    def made(self, number: int, rows: None) -> list[Item]:
        """Returns all prompts of a batch (see `Order`). Raises RunError if a task can't make them."""
        draws = range(number * self.count, (number + 1) * self.count)
        kinds, items = len(self.sources), {}
        for kind, source in enumerate(self.sources):
            own = [draw for draw in draws if draw % kinds == kind]
            if own:
                items |= dict(zip(own, source.draw([draw // kinds for draw in own]), strict=True))
        return [items[draw] for draw in draws]

    @functools.cached_property
    def _asked(self) -> Callable[[int], list[Item]]:
        """Returns a function that draws a batch, caches the newest, and draws none ahead: the process does one order a time."""
        return functools.lru_cache(_KEPT)(loader.dataset(self).__getitem__)

    def step(self, step: int) -> list[Item]:
        return list(self._asked(step - 1))

    def held_out(self, count: int) -> list[Item]:
        """Returns up to `count` prompts that are never trained on, the same each time."""
        shares = [len(range(kind, count, len(self.sources))) for kind in range(len(self.sources))]
        return [item for source, share in zip(self.sources, shares, strict=True) for item in source.held_out(share)]

    def places(self, step: int) -> list[str]:
        return [item.place for item in self.step(step)]

    def passes(self, steps: int) -> dict[str, float]:
        """Returns source -> how many epochs of it a run of `steps` steps is; without endless sources."""
        draws = steps * self.count / len(self.sources)
        return {source.name: draws / len(source.train) for source in self.sources if source.tokens}


def room(config: Config) -> int:
    """Returns the most tokens that a prompt may have: its part of a row, less `rollout.max_new_tokens`."""
    return config.train.seq_len // policy.in_row(config) - config.rollout.max_new_tokens


def make(config: Config, tokenizer: Coder, process: Processes, say: Say) -> Prompts:
    """Returns the prompts of `reward.tasks`, or without tasks of `data.path`. Raises ConfigError; RunError if a task fails."""
    d, r = config.data, config.reward
    notes = Notes(config.examples.ignore)
    reader = Reader(tokenizer, room(config), config.seed, d.val_fraction, config.examples.val_path, say, notes)
    specs = parse_tasks(r.tasks)
    if not specs and not d.path:
        raise ConfigError(
            f"{config.program} needs prompts: --config.data.path=FILE.jsonl of rows with a prompt or messages, or "
            "--config.reward.tasks=reasoning_gym:chain_sum"
        )
    sources = tuple(_source(spec, number, d.path, process, reader) for number, spec in enumerate(specs))
    sources = sources or (reader.rows(d.path, "data.path"),)
    if r.function:
        try:
            process.ask("takes", sorted({name for source in sources for name in source.columns}))
        except Failed as error:
            raise RunError(f"reward.function={r.function}: {error}") from None
    # The function gets all columns.
    for line in notes.lines({name for source in sources for name in source.columns} if r.function else ()):
        say(line)
    tokens = {source.name: source.tokens for source in sources if source.tokens}
    sha256 = hashlib.sha256(" ".join([*(source.sha256 for source in sources), tokenizer.sha256]).encode()).hexdigest()
    texts = Texts(tokenizer, sha256, tokens, Verifier(pathlib.Path()), notes.as_before())
    return Prompts(texts, sources, config.seed, config.rollout.prompts, reader.room)


def _source(spec: Spec, number: int, path: str, process: Processes, reader: Reader) -> Source:
    if spec.kind == "gsm8k":
        return reader.rows(spec.name or path, "reward.tasks" if spec.name else "data.path", number)
    return Made(spec, number, process, reader)
