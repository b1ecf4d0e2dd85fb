"""Draws many answers at once to prompts known in advance: the rollouts of a step of reinforcement learning."""

import collections
import dataclasses
import itertools
import typing

import numpy as np

from jaxlm.config import RunError
from jaxlm.models.decode.engine import Drawn, Engine, Entry, Settings, check_prompts

TOGETHER = 2048  # about how many tokens of several prompts are read at once


def draw(
    engine: Engine,
    prompts: typing.Sequence[typing.Sequence[int]],
    max_new_tokens: int,
    *,
    stop_ids: typing.Sequence[int] = (),
    seeds: typing.Sequence[int],
) -> list[tuple[list[int], np.ndarray]]:
    """Draws an answer to each prompt at temperature 1. Returns (ids, float32 log p of each id) for each prompt, in their order.

    An answer depends on its prompt, its seed and the weights, and on the other answers only by rounding. The same call gives
    the same bits, whatever the engine did before. Equal prompts next to each other are read once. A row whose answer has
    ended gets the next prompt, so there may be more answers than rows. All earlier requests of the engine are dropped.

    Args:
      max_new_tokens: of an answer, at least 1; an answer also ends when prompt and answer fill the context.
      stop_ids: the ids that end an answer; the answer includes the stop id.
      seeds: one for each answer; equal prompts with equal seeds get equal answers, up to rounding.

    Raises:
      ConfigError: a prompt is empty, has an id outside the vocabulary or leaves no room in the context.
      RunError: the logits are not finite.
    """
    check_prompts(engine.model, prompts)
    engine.reset()
    context, ends = engine.model.config.max_seq_len, frozenset(map(int, stop_ids))
    answers = [
        _Answer(tuple(map(int, ids)), int(seed), min(max_new_tokens, context - len(ids)))
        for ids, seed in zip(prompts, seeds, strict=True)
    ]
    waiting, busy, group = collections.deque(answers), {}, _Group(engine)
    while waiting or busy:
        entering = {row: waiting.popleft() for row in range(engine.rows) if row not in busy and waiting}
        busy |= entering
        need = max(one.slots(engine.burst) for one in busy.values())
        engine.resize(max(engine.slots, engine.length_for(need)))
        group.enter(entering, waiting)
        drawn = engine.step(np.isin(np.arange(engine.rows), list(busy)), steps=engine.burst)
        busy = {row: one for row, one in busy.items() if not one.take(drawn, row, ends)}
    return [(one.ids, np.float32(one.logp)) for one in answers]


@dataclasses.dataclass
class _Answer:
    """An answer that is being drawn."""

    prompt: tuple[int, ...]
    seed: int
    room: int  # new tokens, at most
    ids: list[int] = dataclasses.field(default_factory=list)
    logp: list[float] = dataclasses.field(default_factory=list)

    def slots(self, steps: int) -> int:
        return len(self.prompt) + min(len(self.ids) + steps - 1, self.room)

    def take(self, drawn: Drawn, row: int, stop_ids: frozenset[int]) -> bool:
        """Appends the tokens that its row has drawn, up to the answer's end. Returns True if the answer has ended."""
        own = (x_NxB[:, row].tolist() for x_NxB in (drawn.token_NxB, drawn.sound_NxB, drawn.logprobs.chosen))
        for token, sound, logp in zip(*own, strict=True):
            if not sound:
                raise RunError("the logits are not finite: have the weights diverged?")
            self.ids.append(token)
            self.logp.append(logp)
            if token in stop_ids or len(self.ids) >= self.room:
                return True
        return False


class _Group:
    """The prompts that the engine read together last, and their Prefill."""

    def __init__(self, engine: Engine):
        self._engine, self._places, self._prefill = engine, {}, None

    def enter(self, entering: dict[int, _Answer], waiting: typing.Iterable[_Answer]) -> None:
        """Puts prompts into rows (`entering`: row -> answer). Reads those not yet read, and with them the next of `waiting`."""
        left = list(entering.items())
        while left:
            count = next((n for n, (_, one) in enumerate(left) if one.prompt not in self._places), len(left))
            if count:
                entries = [
                    Entry(row, Settings(seed=one.seed, logprobs=0), self._places[one.prompt])
                    for row, one in left[:count]
                ]
                self._engine.insert(self._prefill, entries)
                left = left[count:]
            if left:
                self._read([one.prompt for _, one in left] + [one.prompt for one in waiting])

    def _read(self, prompts: list[tuple[int, ...]]) -> None:
        most = max(1, TOGETHER // self._engine.chunk)
        together = list(itertools.islice(dict.fromkeys(prompts), min(most, self._engine.rows)))
        self._places = {prompt: place for place, prompt in enumerate(together)}
        self._prefill = self._engine.begin(*together)
        while self._prefill.left:
            self._engine.read(self._prefill)
