"""The one way from a text to the ids that a model reads: what a text begins with, then the text.

A text without it is one that the model has never seen the like of (Gemma: a perplexity of 5.9e9 instead of 3.46 on
LAMBADA, lm-evaluation-harness, pull request 1465). `tests/data/tokenizer/test_ids.py` lists every program that feeds
text to a model.
"""

import codecs
from collections.abc import Iterable, Sequence

import numpy as np

from jaxlm.data.tokenizer.coder import Coder


def document(tokenizer: Coder, text: str) -> list[int]:
    """Returns the ids of a document that begins with this text: `tokenizer.opening` once, then the text."""
    return [*tokenizer.opening, *tokenizer.encode(text)]


def conversation(tokenizer: Coder, text: str) -> list[int]:
    """Returns the ids of a conversation that `data.chat` rendered: `tokenizer.opening` once, also if the template wrote it."""
    return opened(tokenizer, tokenizer.encode_marked(text))


def opened(tokenizer: Coder, ids: Sequence[int]) -> list[int]:
    """Returns the ids of a text that somebody else encoded, with what is missing of `tokenizer.opening` in front."""
    return [*_missing(tokenizer, ids), *ids]


def conversations(
    tokenizer: Coder, texts: Sequence[str], cuts: Sequence[Sequence[int]]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns for each text (the ids of `conversation`, int32[n]; how many stand in front of each cut, int64, or -1)."""
    whole = []
    for ids, at in tokenizer.encode_cut(texts, cuts):
        front = _missing(tokenizer, ids.tolist())
        whole.append((np.concatenate([np.asarray(front, np.int32), ids]), np.where(at < 0, at, at + len(front))))
    return whole


def _missing(tokenizer: Coder, ids: Sequence[int]) -> tuple[int, ...]:
    """What is missing in front of ids whose template may have written the end of `tokenizer.opening` already."""
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


class Text:
    """The text of a row whose ids come a few at a time; how they are parted does not matter.

    Holds back what may be half a character or the beginning of a stop string. The first whole one ends it, and is
    `stopped`.
    """

    def __init__(self, tokenizer: Coder, stops: Sequence[str] = ()):
        self._pieces, self._stops = tokenizer.piece_bytes(), tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self.stopped: str | None = None

    def feed(self, ids: Iterable[int]) -> str:
        """Returns the text that is sure now. Ids behind the vocabulary become nothing."""
        raw = b"".join(self._pieces[i] for i in map(int, ids) if i < len(self._pieces))
        return self._take(self._decoder.decode(raw))

    def close(self) -> str:
        """Returns the rest: what was held back, with U+FFFD for a character that was never whole."""
        return self._take(self._decoder.decode(b"", final=True), whole=True)

    def _take(self, new: str, whole: bool = False) -> str:
        if self.stopped is not None:
            return ""
        text = self._held + new
        ends = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            _, at, self.stopped = min(ends)
            self._held = ""
            return text[:at]
        held = 0 if whole else self._unsure(text)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def _unsure(self, text: str) -> int:
        """The length of the longest end of a text with which a stop string begins."""
        ends = (text[-n:] for n in range(min(len(text), self._longest - 1), 0, -1))
        return next((len(end) for end in ends if any(len(end) < len(s) and s.startswith(end) for s in self._stops)), 0)
