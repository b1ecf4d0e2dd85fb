"""Rewards of answers: a task's judgement, the user's function, the format, a reward model's score.

    process = make(config.reward, workdir)
    scores, parts = Rewarder(config.reward, process)(items, answers)     # float32[N]; {"exact": float32[N], ...}

Legend: N answers.
"""

import collections
import functools
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from jaxlm import models
from jaxlm.config import ConfigError, RewardConfig, RunError
from jaxlm.data.batches import pack_examples
from jaxlm.data.chats import chat
from jaxlm.data.chats.examples import ASSISTANT
from jaxlm.data.tokenizer.ids import conversation
from jaxlm.devices import sharding
from jaxlm.host import console, sandbox_child
from jaxlm.host.console import Say
from jaxlm.models.decode.engine import power_of_two
from jaxlm.plan import settle
from jaxlm.step.objectives import reward
from jaxlm.step.step import cast
from jaxlm.train.origin import Origin
from jaxlm.train.rl import judges
from jaxlm.train.rl.process import OUTPUT, Failed, Processes
from jaxlm.train.rl.prompts import Item, parse_tasks

_LOST = 8  # the most answers of one call on which a task may hang or die
_ALONE_S = 5.0  # for a task to judge one answer; usually milliseconds
_CANDIDATES = 32  # true answers that are tried as the constant one
_ROWS = 8  # scored by a reward model at one time
_SHOWN = 60  # characters of an answer in a message
Chat = Sequence[Mapping[str, str]]
Model = Callable[[Sequence[Chat]], np.ndarray]  # chats that end with an answer -> their scores, float32[N]


def make(config: RewardConfig, folder: pathlib.Path | None = None) -> Processes:
    """Returns the processes of tasks, function and format, started, so that missing packages are seen at once.

    Raises ConfigError if a task, function or package is missing, or a task runs answers as code without consent or
    confinement; RunError if a process does not start.
    """
    specs = parse_tasks(config.tasks)
    evaluating = [spec.text for spec in specs if spec.kind == "reasoning_gym" and spec.name in judges.EVALUATED]
    if evaluating and not config.run_code:
        raise ConfigError(
            f"config.reward.tasks={evaluating[0]} runs what the policy writes as Python, in processes without network, disk "
            "and your environment: --config.reward.run_code=True allows it"
        )
    loaded = [(spec.kind, spec.name, dict(spec.options)) for spec in specs]
    processes = Processes(loaded, config.function, config.format, config.timeout_s, folder)
    processes.start()
    if evaluating and not sandbox_child.has_landlock():
        console.say("reward.run_code: what the policy writes can read files, since this kernel has no Landlock")
    return processes


class Rewarder:
    def __init__(self, config: RewardConfig, process: Processes, model: Model | None = None, say: Say = console.say):
        self._config, self._process, self._model, self._say = config, process, model, say
        tasks = parse_tasks(config.tasks)
        self._kinds = [task.kind if task.kind == "gsm8k" else f"{task.kind}:{task.name}" for task in tasks]
        self._told: set[str] = set()

    def __call__(self, items: Sequence[Item], answers: Sequence[str]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Returns (the sum of all parts, float32[N]; the parts by name). Raises RunError, which names item and answer."""
        c, parts = self._config, {}
        if c.tasks:
            parts["exact"] = self.exact(items, answers)
        if c.function:
            parts["function"] = self._together(f"reward.function={c.function}", self._function, items, answers)
        if c.format:
            matched = self._each("reward.format", self._format, items, answers, lambda item: "reward.format")
            parts["format"] = matched * np.float32(c.format_weight)
        if self._model:
            answered = zip(items, answers, strict=True)
            chats = [[*item.messages, {"role": ASSISTANT, "content": answer}] for item, answer in answered]
            parts["model"] = self._finite(self._model(chats), items, answers)
        return sum(parts.values(), np.zeros(len(items), np.float32)).astype(np.float32), parts

    def exact(self, items: Sequence[Item], answers: Sequence[str], order: str = "exact") -> np.ndarray:
        """Returns 1 for each answer that its task judges right, else 0, float32[N]. Raises RunError if tasks hang on many.

        `order`: "exact_truth" if the answers are true answers of the tasks, which need no fork. An answer that its task can't
        judge gets 0: some tasks raise on unexpected answers, or take for ever. Each task's first such answer is reported.
        """
        ask = functools.partial(self._exact, order)
        return self._each("reward.tasks", ask, items, answers, lambda item: self._kinds[item.judge[0]])

    def close(self) -> None:
        self._process.close()

    def _exact(self, order: str, items: Sequence[Item], answers: Sequence[str]) -> list[float]:
        judged = [(*item.judge, answer) for item, answer in zip(items, answers, strict=True)]
        timeout_s = self._config.timeout_s if len(items) > 1 else min(_ALONE_S, self._config.timeout_s)
        scores = self._process.ask(order, judged, timeout_s=timeout_s)
        for item, answer, score in zip(items, answers, scores, strict=True):
            if isinstance(score, str):
                self._unjudged(self._kinds[item.judge[0]], item, answer, score)
        return [0.0 if isinstance(score, str) else score for score in scores]

    def _function(self, items: Sequence[Item], answers: Sequence[str]) -> list[float]:
        names = sorted({name for item in items for name in item.columns})
        columns = {name: [item.columns.get(name) for item in items] for name in names}
        return self._process.ask("function", [item.prompt for item in items], list(answers), columns)

    def _format(self, items: Sequence[Item], answers: Sequence[str]) -> list[float]:
        return self._process.ask("format", list(answers))

    def _together(self, what: str, ask: Callable, items: Sequence[Item], answers: Sequence[str]) -> np.ndarray:
        """Returns the rewards of all answers by one call of `ask`, which may compare them. A failed call is tried once more."""
        for last in (False, True):
            try:
                return np.asarray(ask(items, answers), np.float32)
            except Failed as error:
                why = str(error)
            if not last:
                self._say(f"{what}: {why}; it is tried once more")
        # One answer after the other, to name the answer on which it fails.
        end = time.monotonic() + self._config.timeout_s
        for item, answer in zip(items, answers, strict=True):
            if time.monotonic() > end:
                break
            try:
                ask([item], [answer])
            except Failed as error:
                raise RunError(f"{what}: {error}; on {_where(item, answer)}{self._output()}") from None
        first = f"the first of {len(items)} answers is {_where(items[0], answers[0])}"
        raise RunError(f"{what}: {why}; it failed twice on all answers together; {first}{self._output()}")

    def _each(
        self, what: str, ask: Callable, items: Sequence[Item], answers: Sequence[str], judge: Callable[[Item], str]
    ) -> np.ndarray:
        """Returns the rewards by `ask`, each of one answer. If the call fails, it asks for each: _LOST may fail, and get 0."""
        try:
            return np.asarray(ask(items, answers), np.float32)
        except Failed:
            scores, lost = [], 0
        for item, answer in zip(items, answers, strict=True):
            try:
                scores += ask([item], [answer])
            except Failed as error:
                lost += 1
                if lost > _LOST:
                    raise RunError(f"{what}: {error}; on {_where(item, answer)}{self._output()}") from None
                self._unjudged(judge(item), item, answer, str(error))
                scores.append(0.0)
        return np.asarray(scores, np.float32)

    def _unjudged(self, kind: str, item: Item, answer: str, why: str) -> None:
        if kind not in self._told:
            self._told.add(kind)
            first = f"{_where(item, answer)}: {why}"
            self._say(f"{kind} can't judge some answers, and they count as wrong; the first is {first}")

    def _finite(self, scores: np.ndarray, items: Sequence[Item], answers: Sequence[str]) -> np.ndarray:
        scores = np.asarray(scores, np.float32)
        for i in np.flatnonzero(~np.isfinite(scores)):
            raise RunError(f"reward.model={self._config.model} gave {scores[i]} on {_where(items[i], answers[i])}")
        return scores

    def _output(self) -> str:
        return f"; more in {self._process.folder / OUTPUT}" if self._process.folder else ""


def _where(item: Item, answer: str) -> str:
    shown = " ".join(answer.split())
    return f"{item.place}, answered {shown[:_SHOWN] + '...' * (len(shown) > _SHOWN)!r}"


class Scorer:
    """Scores chats by a reward model, at the token that ends the answer. Raises ConfigError without a head or chat template.

    Args:
      tokens: how long a chat may be; a longer chat loses its oldest tokens.
      moment: the present for its chat template (`chat.dated`).
    """

    def __init__(self, origin: Origin, mesh: Mesh, tokens: int, moment: str = ""):
        name, trained = origin.provenance["path"], origin.trained()
        if reward.HEAD not in trained:
            raise ConfigError(
                f"config.reward.model={name} gives no scores: it is no run of jaxlm train reward and no Hugging Face model "
                "with one label (ForSequenceClassification)"
            )
        self._tokenizer, self._mesh = chat.dated(origin.tokenizer(), moment), mesh
        self._writer = chat.Writer(self._tokenizer)
        config = settle.to_read(origin.config.model, mesh.devices.flat[0].platform)
        self._room = min(tokens, config.max_seq_len)
        self.model = model = models.build(config, config.attention)
        abstract = models.abstract_params(model)
        params = origin.params(abstract, sharding.tree_shardings(abstract, models.logical_axes(model), mesh))
        head = jax.device_put(trained[reward.HEAD], sharding.replicated(mesh))
        self.kernel = np.asarray(jax.tree.leaves(trained[reward.HEAD])[0], np.float32)
        variables = {"params": params, reward.HEAD: head}
        self._variables = jax.jit(cast, static_argnums=1)(variables, np.dtype(config.dtype))
        score = lambda variables, batch: reward.scores(model, variables, batch, None, 1)  # noqa: E731
        self._score: Callable = jax.jit(score, out_shardings=sharding.replicated(mesh))

    def __call__(self, chats: Sequence[Chat]) -> np.ndarray:
        """Returns the score of each chat, whose last message is the answer, float32[N]."""
        texts, scores = [self._ids(messages) for messages in chats], []
        length = max(16, power_of_two(max(map(len, texts))))
        for first in range(0, len(texts), _ROWS):
            part = texts[first : first + _ROWS]
            # One text a row, with one more target after the text: else its last token would not be read.
            rows = [[pack_examples.Segment([*ids, ids[-1]], np.zeros(len(ids)))] for ids in part]
            rows += rows[:1] * (_ROWS - len(rows))
            batch = jax.device_put(pack_examples.pack(rows, length), sharding.replicated(self._mesh))
            scores_BxS = self._score(self._variables, batch)
            scores += np.asarray(scores_BxS)[: len(part), 0].tolist()
        return np.asarray(scores, np.float32)

    def _ids(self, messages: Chat) -> list[int]:
        """Returns the ids of a chat up to the token that ends its last message; a long chat loses its oldest tokens."""
        text, spans, *_ = self._writer.written(messages, None, last=True)
        ids = conversation(self._tokenizer, text[: spans[-1].behind] if spans else text)
        over = len(ids) - self._room
        return ids if over <= 0 else [ids[0], *ids[over + 1 :]]


def baseline(items: Sequence[Item], rewarder: Rewarder) -> str:
    """Returns a line on the best constant answer of the 32 most frequent true ones of these items; "" if no item has one."""
    judged = [item for item in items if item.judge]
    truths = collections.Counter(item.truth for item in judged if item.truth is not None)
    shares: dict[str, float] = {}
    for answer, _ in truths.most_common(_CANDIDATES):
        shares[answer] = float(rewarder.exact(judged, [answer] * len(judged), "exact_truth").mean())
    if not shares:
        return ""
    best = max(shares, key=shares.get)
    right = f"always answering {best[:_SHOWN]!r} is right for {console.share(shares[best], 1)} of {len(judged):,}"
    return f"baseline: {right} held-out prompts; a policy that earns no more has learnt nothing of the task"
