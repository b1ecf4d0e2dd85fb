"""Finds documents unlike the rest of their source by how a text is made: function words, variety, marks, own words.

It needs no list of junk: keyword lists have no function words, spun text repeats itself, a bad scan is full of words that
no other document has, minified code is all marks.
"""

import itertools
import random
import re
import typing
import zlib

import numpy as np

_SAMPLE = 20_000  # documents, drawn at random from all
_TOKENS = 300  # read of a document
_LEAST_TOKENS = 20  # of a document that can be judged
_FEW = 50  # documents that show what is usual
_COMMON = 100  # words of a source that hold sentences together
_FAR = 6.0  # robust standard deviations from the median
_LEAST_SPREAD = 0.01  # of a feature
_EXAMPLES = 8
_EXCERPT = 100  # characters
_CHARS = 2000  # in which marks are counted
_MARKS = re.compile(r"[^\W\d_]+|\s+")

# Feature -> (-1 if low values are junk, 1 if high ones; what such documents are).
FEATURES = {
    "glue": (-1, "few function words: lists of keywords, menus, data"),
    "repeats": (1, "repeats itself: spun text, templates, logs"),
    "own": (1, "words that no other document has: a bad scan, codes, garbled text"),
    "marks": (1, "mostly marks and digits: minified code, dumps, logs"),
}


class Odd(typing.NamedTuple):
    """The documents at the far end of a feature."""

    why: str
    documents: int  # in the whole source, by the sample
    far: float  # how far the farthest is, in robust standard deviations
    examples: tuple[tuple[str, str], ...]  # (document id, its beginning), the farthest first


class _Document(typing.NamedTuple):
    doc_id: str
    begins: str
    words: np.ndarray  # uint64, hashes of 32 bits
    repeats: float  # the share of pairs of words that occurred before
    marks: float  # the share of characters that are neither letters nor spaces


class Outliers:
    """Collects a sample of a source's documents, and tells which are unlike the rest."""

    def __init__(self) -> None:
        self._random = random.Random(0)
        self._seen = 0
        self._documents: list[_Document] = []

    def add(self, doc_id: str, text: str) -> None:
        """Takes a document into the sample, or does not (reservoir sampling)."""
        tokens = text[: 12 * _TOKENS].split()[:_TOKENS]
        if len(tokens) < _LEAST_TOKENS and len(text) < 12 * _LEAST_TOKENS:
            return
        self._seen += 1
        place = len(self._documents)
        if place >= _SAMPLE and (place := self._random.randrange(self._seen)) >= _SAMPLE:
            return
        words = np.fromiter((zlib.crc32(token.lower().encode("utf-8", "replace")) for token in tokens), np.uint64)
        repeats = 1 - len(set(itertools.pairwise(words.tolist()))) / max(1, len(words) - 1)
        chars = text[:_CHARS]
        marks = len(_MARKS.sub("", chars)) / len(chars)
        document = _Document(doc_id, " ".join(text[: 2 * _EXCERPT].split())[:_EXCERPT], words, repeats, marks)
        self._documents[place : place + 1] = [document]  # in place of another, or at the end

    def odd(self) -> list[Odd]:
        """Returns the odd documents by feature; each document counts for the feature in which it is farthest."""
        if len(self._documents) < _FEW:
            return []
        far = np.stack(
            [side * _robust(values) for (side, _), values in zip(FEATURES.values(), self._features(), strict=True)]
        )
        own, farthest = far.argmax(axis=0), far.max(axis=0)
        odd = []
        for number, (_, why) in enumerate(FEATURES.values()):
            which = np.flatnonzero((own == number) & (farthest > _FAR))
            which = which[np.argsort(-farthest[which], kind="stable")]
            if len(which):
                examples = tuple(self._documents[i][:2] for i in which[:_EXAMPLES])
                documents = round(len(which) * self._seen / len(self._documents))
                odd.append(Odd(why, documents, float(farthest[which[0]]), examples))
        return odd

    def _features(self) -> tuple[np.ndarray, ...]:
        """Returns each feature of each document, float64[documents], in the order of `FEATURES`."""
        lengths = np.asarray([len(document.words) for document in self._documents])
        owner = np.repeat(np.arange(len(lengths), dtype=np.uint64), lengths)
        words = np.concatenate([document.words for document in self._documents])
        once_each = np.unique(owner << np.uint64(32) | words)  # a document's words, each once
        kinds, documents = np.unique(once_each & np.uint64(0xFFFFFFFF), return_counts=True)
        common = kinds[np.argsort(-documents, kind="stable")[:_COMMON]]
        glue = np.bincount(owner.astype(np.int64), np.isin(words, common), len(lengths)) / np.maximum(1, lengths)
        owner_of_kind = (once_each >> np.uint64(32)).astype(np.int64)
        alone = np.isin(once_each & np.uint64(0xFFFFFFFF), kinds[documents == 1])
        alone, words_of = (np.bincount(owner_of_kind, weights, len(lengths)) for weights in (alone, None))
        own = alone / np.maximum(1, words_of)
        repeats, marks = (np.asarray([getattr(d, name) for d in self._documents]) for name in ("repeats", "marks"))
        return glue, repeats, own, marks


def _robust(values: np.ndarray) -> np.ndarray:
    middle = np.median(values)
    return (values - middle) / max(_LEAST_SPREAD, 1.4826 * float(np.median(np.abs(values - middle))))
