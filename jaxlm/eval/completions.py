"""Continues prompts up to a task's stop strings, for benchmarks that judge what a model writes."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from jaxlm.config import SampleConfig
from jaxlm.data.chats import chat
from jaxlm.devices import processes
from jaxlm.eval.likelihood import Scorer

_ROWS = 32  # prompts in a batch, at most


def greedy(max_new_tokens: int) -> SampleConfig:
    never = {"prompts": (), "every_steps": 0, "at_steps": (), "also_greedy": False, "chat_template": False}
    return SampleConfig(**never, max_new_tokens=max_new_tokens, temperature=0.0, top_k=0, top_p=1.0)


def complete(
    scorer: Scorer,
    prompts: Sequence[Sequence[int]],
    stops: Sequence[str],
    settings: SampleConfig,
    what: str,
    follows: bool = False,
) -> list[str]:
    """Returns the text that follows each prompt, up to the first stop string, which may span tokens, or to EOS.

    A prompt that leaves no room for `max_new_tokens` is cut on the left, as lm-evaluation-harness does; new tokens take
    half of the context at most. A line says how many prompts were cut. `follows` is that of `Coder.decode`: True keeps a space
    at the beginning of a text, which is indentation in a program. With tokenizers such as Llama 2's, lm-evaluation-harness's
    `hf` drops that space.
    """
    stops = [stop for stop in stops if stop]
    rows = continue_ids(scorer, prompts, stops, settings, what)
    return [_cut(scorer.tokenizer.decode(row, follows), stops) for row in rows]


def continue_ids(
    scorer: Scorer, prompts: Sequence[Sequence[int]], stops: Sequence[str], settings: SampleConfig, what: str
) -> list[list[int]]:
    """Returns the ids of the texts of `complete`, without end tokens. Text may follow a stop string: `complete` cuts it."""
    room = min(settings.max_new_tokens, scorer.context // 2)
    if room < settings.max_new_tokens:
        scorer.say_once(
            f"{what}: {room:,} new tokens, half of the model's context, instead of {settings.max_new_tokens:,}"
        )
    limit = scorer.context - room
    if cut := sum(len(prompt) > limit for prompt in prompts):
        scorer.say_once(
            f"{what}: {cut:,} of {len(prompts):,} prompts leave no room for {room:,} new tokens in the model's context of "
            f"{scorer.context:,}: cut on the left"
        )
    settings = dataclasses.replace(settings, max_new_tokens=room)
    order = sorted(range(len(prompts)), key=lambda number: -len(prompts[number]))
    size = max(1, min(_ROWS, scorer.tokens // max(1, min(limit, max(map(len, prompts), default=1)) + room)))
    rows: dict[int, list[int]] = {}
    with processes.working(what, len(prompts), "texts") as tell, jax.set_mesh(scorer.mesh):
        for start in range(0, len(order), size):
            taken = order[start : start + size]
            batch = [list(prompts[number][-limit:]) for number in taken]
            # Fill the last batch up to the size of the others, so that one program serves all.
            batch += batch[-1:] * (min(size, len(order)) - len(batch))
            new = _continue(scorer, batch, stops, settings, seed=start)
            rows |= zip(taken, new[: len(taken)], strict=True)
            tell(len(rows))
    return [rows[number] for number in range(len(prompts))]


def _continue(
    scorer: Scorer, prompts: list[list[int]], stops: Sequence[str], settings: SampleConfig, seed: int
) -> list[list[int]]:
    """Returns the new ids of one batch. Generation ends once each row has reached a stop string or an end token."""
    tokenizer = scorer.tokenizer
    ends = chat.ends(tokenizer)
    rows: list[list[int]] = [[] for _ in prompts]
    stopped = np.zeros(len(prompts), bool)
    reach = max((len(stop.encode()) for stop in stops), default=0)  # no stop has more tokens than bytes
    for new in scorer.generator.stream(prompts, settings, stop_ids=ends, seed=seed):
        for number, ids in enumerate(new):
            rows[number] += ids
            if ids and stops and not stopped[number]:
                tail = tokenizer.decode([i for i in rows[number][-reach - len(ids) :] if i not in ends])
                stopped[number] = any(stop in tail for stop in stops)
            stopped[number] |= bool(rows[number]) and rows[number][-1] in ends
        if stopped.all():
            break
    return [[i for i in ids if i not in ends] for ids in rows]


def _cut(text: str, stops: Sequence[str]) -> str:
    places = [place for stop in stops if (place := text.find(stop)) >= 0]
    return text[: min(places)] if places else text
