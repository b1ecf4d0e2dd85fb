"""Continues prompts up to a task's stop strings, for benchmarks that judge what a model writes."""

import dataclasses
from collections.abc import Sequence

import jax

from jaxlm.config import SampleConfig
from jaxlm.data.chats import chat
from jaxlm.devices import processes
from jaxlm.eval.likelihood import Scorer
from jaxlm.models.decode import generate, schedule

_ROWS = 32  # prompts that are continued at once, at most


def greedy(max_new_tokens: int) -> SampleConfig:
    return SampleConfig(max_new_tokens=max_new_tokens, temperature=0.0, top_k=0, top_p=1.0)


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
    tokenizer, ends = scorer.tokenizer, chat.ends(scorer.tokenizer)
    settings = dataclasses.replace(settings, max_new_tokens=room)
    asks = generate.asks([prompt[-limit:] for prompt in prompts], settings, ends)
    order = sorted(range(len(asks)), key=lambda number: -len(asks[number].ids))  # prompts read together are padded
    tickets, left = [schedule.Ticket(asks[number]) for number in order], len(asks)
    longest = len(tickets[0].ask.ids) if tickets else 0
    rows: list[list[int]] = [[] for _ in asks]
    reach = max((len(stop.encode()) for stop in stops), default=0)  # no stop has more tokens than bytes
    with processes.working(what, len(asks), "texts") as tell, jax.set_mesh(scorer.mesh):
        at_once = max(1, min(_ROWS, scorer.tokens // (longest + room), len(asks)))
        for place, update in schedule.answers(scorer.engine, tickets, at_once):
            number = order[place]
            new = [token.id for token in update.tokens if token.id not in ends]
            rows[number] += new
            tail = tokenizer.decode(rows[number][-reach - len(new) :]) if new and stops else ""
            if any(stop in tail for stop in stops):
                tickets[place].cancel()
            left -= bool(update.ended)
            tell(len(asks) - left)
    return rows


def _cut(text: str, stops: Sequence[str]) -> str:
    places = [place for stop in stops if (place := text.find(stop)) >= 0]
    return text[: min(places)] if places else text
