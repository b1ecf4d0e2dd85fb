"""The only way from a text to the ids that a model reads: the tokenizer's opening, then the text.

Without the opening, a text is unlike all that the model has seen (Gemma: a perplexity of 5.9e9 instead of 3.46 on
LAMBADA, lm-evaluation-harness, pull request 1465). `tests/data/tokenizer/test_ids.py` lists every program that feeds
text to a model.
"""

from collections.abc import Sequence

import numpy as np

from jaxlm.data.tokenizer.coder import Coder


def document(tokenizer: Coder, text: str) -> list[int]:
    """Returns the ids of a document that begins with this text: `tokenizer.opening` once, then the text."""
    return [*tokenizer.opening, *tokenizer.encode(text)]


def conversation(tokenizer: Coder, text: str) -> list[int]:
    """Returns the ids of a conversation that `chats.chat` rendered: `tokenizer.opening` once, also if the template wrote it."""
    return opened(tokenizer, tokenizer.encode_marked(text))


def opened(tokenizer: Coder, ids: Sequence[int]) -> list[int]:
    """Returns ids that were encoded elsewhere, with the part of `tokenizer.opening` that they lack in front."""
    return [*_missing(tokenizer, ids), *ids]


def conversations(
    tokenizer: Coder, texts: Sequence[str], cuts: Sequence[Sequence[int]]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns for each text (the ids of `conversation`, int32[n]; the number of ids before each cut, int64, or -1)."""
    whole = []
    for ids, at in tokenizer.encode_cut(texts, cuts):
        front = _missing(tokenizer, ids.tolist())
        whole.append((np.concatenate([np.asarray(front, np.int32), ids]), np.where(at < 0, at, at + len(front))))
    return whole


def _missing(tokenizer: Coder, ids: Sequence[int]) -> tuple[int, ...]:
    """Returns the part of `tokenizer.opening` that ids lack in front; a template may have written its end already."""
    opening = tokenizer.opening
    there = next(n for n in range(len(opening), -1, -1) if tuple(ids[:n]) == opening[len(opening) - n :])
    return opening[: len(opening) - there]


def training_documents(tokenizer: Coder, texts: list[str]) -> list[np.ndarray]:
    """Returns the ids of each document as shards hold it, int32[n], the separator in front.

    A tokenizer whose separator is not EOS (BOS, mostly) gets EOS at the end, so that the model learns to stop.
    """
    opening, separator = tokenizer.opening, tokenizer.separator_id
    front = opening if opening[:1] == (separator,) else (separator, *opening)
    back = () if separator == tokenizer.eos_id else (tokenizer.eos_id,)
    front, back = np.asarray(front, np.int32), np.asarray(back, np.int32)
    return [np.concatenate([front, ids, back]) for ids in tokenizer.encode_batch(texts)]
