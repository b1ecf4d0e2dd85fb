"""Which tokens of a conversation the model has to say: its ids, and what each of them counts for."""

import typing
from collections.abc import Collection, Sequence

import numpy as np

from jaxlm.config import ConfigError
from jaxlm.data.chats import chat
from jaxlm.data.chats.examples import Chat, Messages, without
from jaxlm.data.tokenizer.coder import Coder
from jaxlm.data.tokenizer.ids import conversations

GIVEN, SAID, ENDS = 0, 1, 2  # tokens: given; for the model to say; for the model to say, and the end of an answer
UNWRITTEN = "the model's chat template does not write it"


class Masked(typing.NamedTuple):
    """A conversation as ids."""

    ids: np.ndarray  # int32[n], with the tokenizer's opening
    kinds: np.ndarray  # GIVEN, SAID or ENDS, uint8[n]
    turns: np.ndarray  # the number of ids before each assistant message, int64; approximate if it is not learnt
    otherwise: tuple[int, ...] = ()  # answers to learn that are written differently than when each is the last message


class Unmasked(typing.NamedTuple):
    """Why a conversation can't be masked."""

    why: str = ""
    keys: tuple[str, ...] = ()  # keys of the conversation that the template writes nowhere


# An answer begins or ends inside a token: a single token holds the newline before the answer and its first newline, say. A
# model that is asked for the answer never sees these ids.
INSIDE = Unmasked()
Side = Masked | Unmasked


def masked(tokenizer: Coder, chats: Sequence[Chat], ignore: Collection[str] = ()) -> list[Side]:
    """Returns each conversation as Masked, or Unmasked with the reason. Raises ConfigError if the model has no template."""
    writer = chat.Writer(tokenizer)
    written = [_written(writer, one, ignore) for one in chats]
    fit = [text for text in written if isinstance(text, chat.Written)]
    cuts = [[*(cut for span in text.spans for cut in span[1:]), *_begins(text)] for text in fit]
    coded = iter(conversations(tokenizer, [text.text for text in fit], cuts))
    controls = frozenset(tokenizer.controls.values())
    return [
        text if isinstance(text, Unmasked) else _masked(text, one.trained(), *next(coded), controls)
        for one, text in zip(chats, written, strict=True)
    ]


def _written(writer: chat.Writer, one: Chat, ignore: Collection[str]) -> chat.Written | Unmasked:
    if one.keys and (keys := unwritten(writer, one, ignore)):
        return Unmasked(keys=keys)
    try:
        return writer.written(one.messages, one.tools, one.trained(), one.last)
    except ConfigError as error:
        return Unmasked(str(error))


def unwritten(writer: chat.Writer, one: Chat, ignore: Collection[str] = ()) -> tuple[str, ...]:
    """Returns the keys of a chat, without `ignore`, that the template does not write, or for which it refuses the chat."""
    messages, tools, keys = one.messages, one.tools, []
    for key in (key for key in one.keys if key not in ignore):
        having = [number for number, message in enumerate(messages) if key in message or message["role"] == key]
        less = without(messages, key), None if key == "tools" else tools
        # A template may drop from earlier messages what it writes while they are the last.
        ends = {len(messages), having[-1] + 1 if having else len(messages)}
        shorter = [
            (text_of(writer, messages[:end], tools), text_of(writer, without(messages[:end], key), less[1]))
            for end in ends
        ]
        if all(bare and whole in (bare, None) for whole, bare in shorter):
            (messages, tools), keys = less, [*keys, key]
    return tuple(keys)


def text_of(writer: chat.Writer, messages: Messages, tools: chat.Tools) -> str | None:
    """Returns a conversation as text; None if the template refuses it, "" if the template crashes."""
    try:
        return writer.either(messages, lambda sound: writer.write(sound, False, writer.sound(tools)))
    except ConfigError as error:
        return "" if isinstance(error, chat.Broken) else None


def _begins(text: chat.Written) -> list[int]:
    return [] if text.begins == [span.first for span in text.spans] else text.begins


def _masked(
    text: chat.Written, trained: frozenset[int], found: np.ndarray, at: np.ndarray, controls: frozenset[int]
) -> Side:
    spans, begins = at[: 2 * len(text.spans)].reshape(-1, 2), at[2 * len(text.spans) :]
    if (spans < 0).any():
        return INSIDE
    kinds, last = np.full(len(found), GIVEN, np.uint8), {span.number: i for i, span in enumerate(text.spans)}
    for i, (span, (first, behind)) in enumerate(zip(text.spans, spans, strict=True)):
        if span.number in trained:
            kinds[first:behind] = SAID
            if behind > first and last[span.number] == i and int(found[behind - 1]) in controls:
                kinds[behind - 1] = ENDS
    counted, otherwise = np.count_nonzero(kinds[1:]), tuple(number for number in text.otherwise if number in trained)
    if not counted and not otherwise:
        return Unmasked("nothing in it is the assistant's, or its answers have weight 0")
    if counted == len(found) - 1:
        return Unmasked("all of it is the assistant's: the chat template marks too much, or nobody asks")
    return Masked(found, kinds, np.maximum.accumulate(begins) if len(begins) else spans[:, 0], otherwise)
