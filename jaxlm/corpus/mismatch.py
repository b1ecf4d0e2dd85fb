"""Makes the mismatch report: how far the sources are from one another, and from a sample of the style that is wanted.

For each source: length, readability, format. For each pair: the Jensen-Shannon divergence of words and of pairs of
words; the same between two halves of one source, which is what chance gives (the floor); how well a classifier tells
passages of the two apart (area under the ROC curve, 0.5 by chance), with the words that tell. Then the mixture of
sources nearest to the target (least KL divergence of words, by EM; the unigram mixture of Jelinek and Mercer 1980), and
advice in words.

All of it is measured on samples of a few megabytes, and words do not show truth or quality: try the advice in a pilot.
"""

import dataclasses
import itertools
import typing
from collections.abc import Iterable, Mapping

import numpy as np
import scipy.sparse
from sklearn.feature_extraction.text import TfidfTransformer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from jaxlm.config import ConfigError
from jaxlm.corpus import textstats
from jaxlm.corpus.advice import advise
from jaxlm.corpus.comparison import TARGET, Mixture, Pair, Report

_FEATURES = 30_000  # words and pairs of words that the classifier sees: the most frequent
_MIXTURE_WORDS = 50_000
_CLASSIFIED = 1000  # passages of each side at most
_FOLDS = 4
_TELLING = 10
_SMOOTHING = 0.02  # of each source's words, drawn from all sources: no word is impossible


def compare(
    sources: Mapping[str, Iterable[str]],
    target: Iterable[str] | None = None,
    *,
    weights: Mapping[str, float] | None = None,
    sample_mb: float = 2.0,
    read_mb: float = 64.0,
) -> Report:
    """Compares sources with one another and with a target, on samples. Deterministic; the order of texts does not matter.

    Args:
      sources: name -> texts of documents.
      target: texts like those that the model should write.
      weights: source -> its weight in the mixture in use; default: all equal.
      sample_mb: the megabytes of passages to keep from each source.
      read_mb: the most megabytes to read of each source.

    Raises:
      ConfigError: a source or the target has no text, or a source is named "target".
    """
    if target is not None and TARGET in sources:
        raise ConfigError('no source may be named "target" in a mismatch report: rename it')
    vocabulary, profiles = textstats.Vocabulary(), {}
    everything = dict(sources) | ({TARGET: target} if target is not None else {})
    for name, texts in everything.items():
        found = textstats.sample(texts, round(sample_mb * 1e6), round(read_mb * 1e6))
        if not any(passage.strip() for passage in found.passages):
            raise ConfigError(f"{'the target' if name == TARGET else f'source {name}'} has no text to compare")
        profiles[name] = _Profile(found, vocabulary)
    features = _features(profiles)
    names = [(a, b) for a, b in itertools.combinations(sources, 2)]
    names += [(a, TARGET) for a in sources] if target is not None else []
    terms = vocabulary.names()
    pairs = [_pair(a, b, profiles, features, terms) for a, b in names]
    now = dict.fromkeys(sources, 1.0) if weights is None else {name: float(weights[name]) for name in sources}
    now = {name: weight / sum(now.values()) for name, weight in now.items()}
    mixture = _mixture(profiles, now, len(vocabulary)) if target is not None else None
    described = {name: profile.describe() for name, profile in profiles.items()}
    return Report(described, pairs, mixture, advise(described, pairs, mixture))


class _Profile:
    """A sample as numbers: the words of each passage, and of two halves that share no document."""

    def __init__(self, sample: textstats.Sample, vocabulary: textstats.Vocabulary):
        self.sample = sample
        self.passages = [vocabulary.ids(passage) for passage in sample.passages]
        self.words = np.concatenate(self.passages)
        self.bigrams = [textstats.bigrams(ids) for ids in self.passages]
        # By turns in the order of the hashes of each document's first passage here.
        turn = {group: i % 2 for i, group in enumerate(dict.fromkeys(sample.groups.tolist()))}
        side = [turn[group] for group in sample.groups.tolist()]
        self.halves = [self._half(side, half) for half in (0, 1)]

    def _half(self, side: list[int], half: int) -> tuple[np.ndarray, np.ndarray]:
        chosen = [i for i, s in enumerate(side) if s == half]
        empty = [np.empty(0, np.int64)]
        return tuple(np.concatenate([of[i] for i in chosen] + empty) for of in (self.passages, self.bigrams))

    def describe(self) -> dict[str, typing.Any]:
        """Returns the source's entry in the report."""
        return {
            "documents": len(self.sample.lengths),
            "bytes": self.sample.n_bytes,
            "sampled_words": len(self.words),
            "length": textstats.quantiles(self.sample.lengths),
            "readability": textstats.readability(self.sample.passages),
            "formats": textstats.formats(self.sample.passages),
        }


def _divergence(a: _Profile, b: _Profile, kind: int) -> tuple[float, float]:
    """Returns (JS of a and b, mean JS between the halves of each), on samples of one size. kind 0: words, 1: bigrams."""
    size = min(len(half[kind]) for half in a.halves + b.halves)

    def js(x: tuple[np.ndarray, ...], y: tuple[np.ndarray, ...]) -> float:
        return textstats.js_divergence(x[kind][:size], y[kind][:size])

    across = [js(x, y) for x, y in zip(a.halves, b.halves, strict=True)]
    within = [js(*a.halves), js(*b.halves)]
    return float(np.mean(across)), float(np.mean(within))


@dataclasses.dataclass(frozen=True)
class _Features:
    """TF-IDF of passages (CSR float[passages, F]) by source, and each column's word or bigram as `textstats` numbers them."""

    rows: dict[str, scipy.sparse.csr_matrix]
    columns: np.ndarray
    is_word: np.ndarray


def _features(profiles: Mapping[str, _Profile]) -> _Features:
    """Takes the most frequent words and bigrams of all passages; two thirds are words."""
    keys, passages_of = [], {name: len(p.passages) for name, p in profiles.items()}
    for kind, limit in ((0, _FEATURES * 2 // 3), (1, _FEATURES // 3)):
        everything = [ids for p in profiles.values() for ids in (p.passages, p.bigrams)[kind]]
        row = np.repeat(np.arange(len(everything)), [len(ids) for ids in everything])
        values, column, counts = np.unique(np.concatenate(everything), return_inverse=True, return_counts=True)
        best = np.sort(np.argsort(-counts, kind="stable")[:limit])
        place = np.full(len(values), -1)
        place[best] = np.arange(len(best))
        kept = place[column] >= 0
        shape = (len(everything), len(best))
        ones = np.ones(int(kept.sum()))
        keys.append((values[best], scipy.sparse.csr_matrix((ones, (row[kept], place[column][kept])), shape=shape)))
    matrix = TfidfTransformer(sublinear_tf=True).fit_transform(scipy.sparse.hstack([m for _, m in keys], format="csr"))
    ends = np.cumsum(list(passages_of.values()))
    rows = {name: matrix[end - passages_of[name] : end] for name, end in zip(passages_of, ends.tolist(), strict=True)}
    columns = np.concatenate([values for values, _ in keys])
    return _Features(rows, columns, np.arange(len(columns)) < len(keys[0][0]))


def _pair(a: str, b: str, profiles: Mapping[str, _Profile], features: _Features, terms: list[str]) -> Pair:
    words, floor_words = _divergence(profiles[a], profiles[b], 0)
    pairs, floor_pairs = _divergence(profiles[a], profiles[b], 1)
    # Hashes order the passages: the first ones are a sample.
    size = min(_CLASSIFIED, features.rows[a].shape[0], features.rows[b].shape[0])
    x = scipy.sparse.vstack([features.rows[name][:size] for name in (a, b)], format="csr")
    y = np.repeat([0, 1], size)
    groups_b = profiles[b].sample.groups[:size] + 1 + profiles[a].sample.groups.max()
    auc = _auc(x, y, np.concatenate([profiles[a].sample.groups[:size], groups_b]))
    weight = _classifier().fit(x, y).coef_[0]
    # How much each feature adds to the difference of the two sides' mean scores.
    effect = weight * np.asarray(x[size:].mean(0) - x[:size].mean(0))[0]

    def telling(sign: int) -> list[str]:
        side = np.where(np.sign(weight) == sign, effect, 0)
        best = np.argsort(-side, kind="stable")[:_TELLING]
        return [_name(features, i, terms) for i in best.tolist() if side[i] > 0]

    return Pair(a, b, words, floor_words, pairs, floor_pairs, auc, telling(-1), telling(1))


def _name(features: _Features, column: int, terms: list[str]) -> str:
    value = int(features.columns[column])
    return terms[value] if features.is_word[column] else f"{terms[value >> 32]} {terms[value & 0xFFFFFFFF]}"


def _classifier() -> LogisticRegression:
    # The dual: ten times as fast with more features than passages.
    return LogisticRegression(C=10.0, solver="liblinear", dual=True, random_state=0, max_iter=1000)


def _auc(x: scipy.sparse.csr_matrix, y: np.ndarray, groups: np.ndarray) -> float | None:
    """Returns the mean over folds that share no document; None if a side has fewer documents than folds."""
    if min(len(np.unique(groups[y == side])) for side in (0, 1)) < _FOLDS:
        return None
    fold = np.empty(len(y), np.int64)
    for side in (0, 1):  # each side's documents by turns, so that every fold has both sides
        fold[y == side] = np.unique(groups[y == side], return_inverse=True)[1] % _FOLDS
    scores = []
    for test in (fold == number for number in range(_FOLDS)):
        model = _classifier().fit(x[~test], y[~test])
        scores.append(roc_auc_score(y[test], model.decision_function(x[test])))
    return float(np.mean(scores))


def _mixture(profiles: Mapping[str, _Profile], now: Mapping[str, float], size: int) -> Mixture:
    """Finds the mixture nearest to the target, over the most frequent words. All sources count alike, and are smoothed."""
    words = {name: profile.words for name, profile in profiles.items()}
    counts = {name: np.bincount(ids, minlength=size) / len(ids) for name, ids in words.items()}
    best = np.argsort(-sum(counts.values()), kind="stable")[:_MIXTURE_WORDS]
    names = list(now)
    components = np.stack([counts[name][best] for name in names])
    target = counts[TARGET][best] / counts[TARGET][best].sum()
    everywhere = components.mean(0) + 1e-9
    smooth = (1 - _SMOOTHING) * components + _SMOOTHING * everywhere / everywhere.sum()
    weights = textstats.nearest_mixture(smooth, target)
    mixed = {"now": np.asarray([now[name] for name in names]) @ components, "nearest": weights @ components}
    js = {key: textstats.js_of_shares(shares / shares.sum(), target) for key, shares in mixed.items()}
    nearest = dict(zip(names, weights.tolist(), strict=True))
    return Mixture(dict(now), nearest, js["now"], js["nearest"])
