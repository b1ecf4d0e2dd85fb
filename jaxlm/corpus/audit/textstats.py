"""Describes samples of texts in numbers: counts of words and their divergence, length, readability, format.

A sample consists of passages (parts of documents of at most 4000 characters), chosen by a hash of their content. So the
same texts give the same sample in any order.
"""

import array
import collections
import dataclasses
import hashlib
import heapq
import re
import typing
from collections.abc import Iterable, Sequence

import numpy as np

from jaxlm.corpus import words as words_lib

PASSAGE_CHARS = 4000
_FEW_DOCUMENTS = 10
_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
_VOWELS = re.compile(r"[aeiouy]+")
_SILENT = re.compile(r"\w\w(?:[^\Waeiouyl]e|[^\Waeiouytd]ed)\b")
_SENTENCE = re.compile(r"[.!?\u2026]+[\"'\u201d\u2019)\]\u00bb]*(?=\s|$)|[\u3002\uff01\uff1f]+|\n[ \t]*\n")
_LINE_FORMATS = {
    "list": re.compile(r"\s*(?:[-*+\u2022\u2023\u25e6]|\(?(?:\d{1,3}|[a-z])[.)])\s+\S"),
    "table": re.compile(r"\s*\|.*\|\s*$|[^\t]+\t[^\t]*\t|\s*\+[-=]{2,}\+|\s*[-=]{3,}(?:\s+[-=]{3,})+\s*$"),
    "heading": re.compile(r"\s{0,3}#{1,6} +.*[^\W\d]|\s*(={1,6}) ?[^=]+ ?\1\s*$|[=~^*-]{4,}\s*$"),
    "code": re.compile(
        r"\s*(?:def \w+\(|class \w+.*[:{]\s*$|import [\w.]+(?: as \w+)?(?:, [\w.]+)*;?\s*$"
        r"|from [\w.]+ import |@\w[\w.]*(?:\(|\s*$)"
        r"|#(?:include|define|ifdef|!)|>>> |\$ \w|//|/\*|</?\w+[^>]*>\s*$"
        r"|(?:self\.)?[A-Za-z_][\w.\[\]'\"]* ?(?:[-+*/|&:]?=|->) ?\S.*[^.?!]$|[\w.]+\([^()]*\);?\s*$"
        r"|(?:else|try|finally)\s*:\s*$|except\b[\w ,.()]*:\s*$|for\b.+\bin\b.+:\s*$|with\b.+\(.*:\s*$"
        r"|(?:if|elif|while)\b.*[()=<>\[\]_.].*:\s*$|(?:if|elif|while) (?:not )?\w+:\s*$"
        r"|\w+;\s*$)"
        r"|(?: {2,}|\t+)(?:return|raise|yield|assert)\b.*[\w)\]}'\"]\s*$|.*[=()\[\]<>].*;\s*$|.*[{}]\s*$|.*\):\s*$"
    ),
}
FORMATS = tuple(_LINE_FORMATS)


@dataclasses.dataclass(frozen=True)
class Sample:
    """Passages of a source, sorted by their hashes.

    Attributes:
      passages: texts of at most `PASSAGE_CHARS` characters.
      groups: the number of each passage's document, int[passages], in the order in which documents first occur in the
        sample. If there are few documents, every passage has a number of its own.
      lengths: the characters of every document that was read, sampled or not, int[documents].
      n_bytes: the number of bytes that were read.
    """

    passages: list[str]
    groups: np.ndarray
    lengths: np.ndarray
    n_bytes: int


def sample(texts: Iterable[str], sample_chars: int, read_bytes: int) -> Sample:
    """Reads up to `read_bytes` of the texts, and keeps about `sample_chars` of passages, those with the lowest hashes."""
    heap: list[tuple[int, int, str]] = []  # of (-hash, document, passage), the highest hash on top
    lengths, total, read = array.array("Q"), 0, 0
    for document, text in enumerate(texts):
        raw = text.encode("utf-8", "replace")
        key = hashlib.blake2b(raw, digest_size=8).digest()
        lengths.append(len(text))
        read += len(raw)
        for start in range(0, len(text), PASSAGE_CHARS):
            digest = hashlib.blake2b(start.to_bytes(8, "little"), digest_size=8, key=key).digest()
            passage = text[start : start + PASSAGE_CHARS]
            heapq.heappush(heap, (-int.from_bytes(digest, "little"), document, passage))
            total += len(passage)
            while total - len(heap[0][2]) >= sample_chars:
                total -= len(heapq.heappop(heap)[2])
        if read >= read_bytes:
            break
    heap.sort(key=lambda item: (-item[0], item[2]))
    number: dict[int, int] = {}
    groups = np.asarray([number.setdefault(document, len(number)) for _, document, _ in heap], np.int64)
    if len(number) < _FEW_DOCUMENTS:
        groups = np.arange(len(heap))
    return Sample([passage for _, _, passage in heap], groups, np.frombuffer(lengths, np.uint64).astype(np.int64), read)


class Vocabulary:
    """Numbers lower-case words, for all the samples that are compared."""

    def __init__(self) -> None:
        self._ids: collections.defaultdict[str, int] = collections.defaultdict()
        self._ids.default_factory = self._ids.__len__

    def __len__(self) -> int:
        return len(self._ids)

    def ids(self, text: str) -> np.ndarray:
        """Returns the numbers of a text's words, int64[words]. A new word gets a new number."""
        return np.asarray([self._ids[word] for word in words_lib.split(text.lower())], np.int64)

    def names(self) -> list[str]:
        """Returns the word of each number."""
        return list(self._ids)


def bigrams(ids: np.ndarray) -> np.ndarray:
    """Returns each pair of neighbours as one number, `first << 32 | second`: int64[words - 1]."""
    return ids[:-1] << 32 | ids[1:]


def js_divergence(a: np.ndarray, b: np.ndarray) -> float:
    """Returns the Jensen-Shannon divergence (Lin 1991) between the values of two int arrays, by their counts.

    In bits, from 0 to 1; 0 if an array is empty.
    """
    if not len(a) or not len(b):
        return 0.0
    values, places = np.unique(np.concatenate([a, b]), return_inverse=True)
    p = np.bincount(places[: len(a)], minlength=len(values)) / len(a)
    q = np.bincount(places[len(a) :], minlength=len(values)) / len(b)
    return js_of_shares(p, q)


def js_of_shares(p: np.ndarray, q: np.ndarray) -> float:
    """Returns the Jensen-Shannon divergence in bits of two distributions, float[V] each."""
    m = (p + q) / 2

    def kl(x: np.ndarray) -> float:
        some = x > 0
        return float(np.sum(x[some] * np.log2(x[some] / m[some])))

    return max(0.0, (kl(p) + kl(q)) / 2)


def nearest_mixture(components: np.ndarray, target: np.ndarray, steps: int = 1000) -> np.ndarray:
    """Returns the weights of the mixture of components nearest to the target: least KL(target || mixture), by EM.

    The problem is convex, so that the start does not matter. Deterministic.

    Args:
      components: float[S, V], distributions that are positive wherever the target is.
      target: float[V], a distribution.
      steps: the number of steps of EM.

    Returns:
      The weights, float[S], not negative, with the sum 1.
    """
    some = target > 0
    components, target = components[:, some], target[some]
    weights = np.full(len(components), 1 / len(components))
    for _ in range(steps):
        joint = weights[:, None] * components
        new = (joint / joint.sum(0)) @ target
        new /= new.sum()
        done = np.abs(new - weights).max() < 1e-6
        weights = new
        if done:
            break
    return weights


def quantiles(lengths: np.ndarray) -> dict[str, int]:
    """Returns "p5", "p25", "p50", "p75", "p95" and "mean" of the documents' lengths in characters."""
    if not len(lengths):
        return {}
    values = np.quantile(lengths, _QUANTILES)
    values_at = {f"p{round(100 * q)}": round(float(v)) for q, v in zip(_QUANTILES, values, strict=True)}
    return {**values_at, "mean": round(float(lengths.mean()))}


def readability(passages: Sequence[str]) -> dict[str, float]:
    """Returns words a sentence, characters a word, and Flesch's reading ease (1948: about 60 = plain English, 30 = papers).

    Counts each group of vowels, except a silent e, as a syllable, so the reading ease is meaningful only for English.
    """
    n_words = n_chars = n_sentences = n_syllables = 0
    for text in passages:
        plain = [word for word in words_lib.split(text) if word[0].isalpha()]
        n_words += len(plain)
        joined = " ".join(plain).lower()
        n_chars += len(joined) - max(0, len(plain) - 1)
        n_syllables += len(_VOWELS.findall(joined)) - len(_SILENT.findall(joined))
        n_sentences += max(1, len(_SENTENCE.findall(text.rstrip()))) if plain else 0
    if not n_words:
        return {"words_per_sentence": 0.0, "chars_per_word": 0.0, "flesch": 0.0}
    per_sentence = n_words / n_sentences
    ease = 206.835 - 1.015 * per_sentence - 84.6 * max(n_syllables, 1) / n_words
    return {"words_per_sentence": per_sentence, "chars_per_word": n_chars / n_words, "flesch": ease}


def formats(passages: Sequence[str]) -> dict[str, dict[str, float]]:
    """Returns two shares for each of list, table, heading and code: {"lines": share, "passages": share}.

    They are the share of lines that look like it, and the share of passages that contain it. A passage contains a
    format if at least two of its lines look like it; one line is enough for a heading. Each line counts for one format
    only: the first that fits, in that order. If more than a fifth of a passage's lines are code, its headings count as
    code (they are comments).
    """
    lines_of, passages_of = collections.Counter(), collections.Counter()
    n_lines = 0
    for text in passages:
        here: typing.Counter[str] = collections.Counter()
        fenced, lines = False, [line for line in text.splitlines() if line and not line.isspace()]
        n_lines += len(lines)
        for line in lines:
            fence = line.lstrip().startswith("```")
            fenced ^= fence
            if kind := "code" if fenced or fence else _line_format(line):
                here[kind] += 1
        if here["code"] > len(lines) / 5:
            here["code"] += here.pop("heading", 0)
        lines_of += here
        passages_of.update(kind for kind, count in here.items() if count >= (1 if kind == "heading" else 2))
    return {
        kind: {"lines": lines_of[kind] / max(n_lines, 1), "passages": passages_of[kind] / max(len(passages), 1)}
        for kind in FORMATS
    }


def _line_format(line: str) -> str | None:
    if len(line) > 300:  # the patterns' time grows with the square of the length
        line = f"{line[:200]} {line[-100:]}"
    for kind in ("list", "table", "heading", "code"):
        if _LINE_FORMATS[kind].match(line):
            return kind
    return None
