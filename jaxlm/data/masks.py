"""Conversations to ids, and which of them the model is to say: each answer of the assistant and the token that ends it.

The ids are those of the model's own template, and so is the mask: what `{% generation %}` marks, as transformers'
`return_assistant_tokens_mask` has it. A mask of nothing or of everything is an error, since training on it would go on in
silence.
"""

import typing
from collections.abc import Iterator, Sequence

import numpy as np

from jaxlm.config import ConfigError
from jaxlm.data import chat, ids
from jaxlm.data.coder import Coder
from jaxlm.data.examples import ASSISTANT, Chat

GIVEN, SAID, ENDS = 0, 1, 2  # a token that is given; one that the model is to say; one of these that ends an answer


class Masked(typing.NamedTuple):
    """A conversation as ids.

    Attributes:
      ids: int32[n], with what a document begins with in front.
      kinds: GIVEN, SAID or ENDS for each id, uint8[n].
      turns: how many ids stand in front of each of the assistant's messages, int64[messages of the assistant].
    """

    ids: np.ndarray
    kinds: np.ndarray
    turns: np.ndarray


def masked(tokenizer: Coder, chats: Sequence[Chat], num_threads: int) -> list[Masked | None]:
    """Returns the ids and masks of conversations; None for one of which an answer begins or ends inside a token.

    Then the model, which is asked with the text in front of the answer, never sees these ids. That is so where an answer
    begins with a line's end, for example, and the tokenizer has a token for two of them.

    Raises:
      ConfigError: the model has no template, or a conversation can't be masked. The message begins with its place.
    """
    writer = chat.Writer(tokenizer)
    written = list(_written(writer, chats))
    texts, cuts = [text for text, _ in written], [[cut for span in spans for cut in span] for _, spans in written]
    coded, controls = ids.conversations(tokenizer, texts, cuts, num_threads), frozenset(tokenizer.controls.values())
    return [_masked(one, found, at, controls) for one, (found, at) in zip(chats, coded, strict=True)]


def _written(writer: chat.Writer, chats: Sequence[Chat]) -> Iterator[tuple[str, chat.Spans]]:
    for one in chats:
        try:
            yield writer.spans(one.messages)
        except ConfigError as error:
            raise ConfigError(f"{one.place}: {error}") from None


def _masked(one: Chat, found: np.ndarray, at: np.ndarray, controls: frozenset[int]) -> Masked | None:
    if (at < 0).any():
        return None
    kinds, given = np.full(len(found), GIVEN, np.uint8), sum(m["role"] == ASSISTANT for m in one.messages[: one.given])
    for first, behind in at.reshape(-1, 2)[given:]:
        kinds[first:behind] = SAID
        if behind > first and int(found[behind - 1]) in controls:
            kinds[behind - 1] = ENDS
    counted = np.count_nonzero(kinds[1:])
    if not counted:
        raise ConfigError(f"{one.place}: nothing in it is the assistant's, so there is nothing to learn: leave it out")
    if counted == len(found) - 1:
        raise ConfigError(
            f"{one.place}: all of it is the assistant's: the chat template marks too much, or nobody asks"
        )
    return Masked(found, kinds, at[0::2])
