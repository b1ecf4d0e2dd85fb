"""Measures how much sources differ from one another, and from a sample of the wanted style.

Compares samples of a few megabytes. Words show neither truth nor quality, so try the advice in a pilot run. A divergence
comes with its floor, the divergence of two halves of one source; the nearest mixture is a unigram mixture (Jelinek and
Mercer 1980).
"""

import collections
import dataclasses
import hashlib
import itertools
import math
import operator
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import scipy.sparse
from scipy.special import rel_entr
from sklearn.feature_extraction.text import TfidfTransformer
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import PredefinedSplit, cross_val_score

from jaxlm.config import ConfigError
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


@dataclasses.dataclass(frozen=True)
class Sample:
    """Passages of a source, sorted by their hashes."""

    passages: list[str]
    groups: np.ndarray  # int[passages]: the passage's document; with few documents, each passage is its own group
    lengths: np.ndarray  # int[documents], in characters, of all that were read
    n_bytes: int


def sample(texts: Iterable[str], sample_chars: int, read_bytes: int) -> Sample:
    """Reads up to `read_bytes` of the texts, and keeps about `sample_chars` of passages, those with the lowest hashes."""
    hashed: list[tuple[int, str, int]] = []  # (hash, passage, document)
    lengths, read = [], 0
    for document, text in enumerate(texts):
        raw = text.encode("utf-8", "replace")
        key = hashlib.blake2b(raw, digest_size=8).digest()
        lengths.append(len(text))
        read += len(raw)
        for start in range(0, len(text), PASSAGE_CHARS):
            digest = hashlib.blake2b(start.to_bytes(8, "little"), digest_size=8, key=key).digest()
            hashed.append((int.from_bytes(digest, "little"), text[start : start + PASSAGE_CHARS], document))
        if read >= read_bytes:
            break
    hashed.sort()
    sizes = np.cumsum([len(passage) for _, passage, _ in hashed])
    chosen = hashed[: np.searchsorted(sizes, sample_chars) + 1]
    number: dict[int, int] = {}
    groups = np.asarray([number.setdefault(document, len(number)) for *_, document in chosen], np.int64)
    if len(number) < _FEW_DOCUMENTS:
        groups = np.arange(len(chosen))
    return Sample([passage for _, passage, _ in chosen], groups, np.asarray(lengths, np.int64), read)


def js_divergence(a: np.ndarray, b: np.ndarray) -> float:
    """Returns the Jensen-Shannon divergence (Lin 1991) in bits between the values of two int arrays; 0 if one is empty."""
    if not len(a) or not len(b):
        return 0.0
    values, places = np.unique(np.concatenate([a, b]), return_inverse=True)
    p = np.bincount(places[: len(a)], minlength=len(values)) / len(a)
    q = np.bincount(places[len(a) :], minlength=len(values)) / len(b)
    return js_of_shares(p, q)


def js_of_shares(p: np.ndarray, q: np.ndarray) -> float:
    """Returns the Jensen-Shannon divergence in bits of two distributions, float[V] each."""
    m = (p + q) / 2
    return max(0.0, float(rel_entr(p, m).sum() + rel_entr(q, m).sum()) / math.log(4))


def nearest_mixture(components: np.ndarray, target: np.ndarray, steps: int = 1000) -> np.ndarray:
    """Returns the weights float[S] of the mixture of `components` float[S, V] nearest to `target` float[V].

    Minimises KL(target || mixture) by EM; the problem is convex, so the start does not matter.
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
    """Returns words per sentence, characters per word, and Flesch's reading ease (1948, English: 60 = plain, 30 = papers)."""
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

    A passage contains a format if two of its lines (for headings, one) look like the format. Where over a fifth of the
    lines are code, headings count as code (they are comments).
    """
    lines_of, passages_of = collections.Counter(), collections.Counter()
    n_lines = 0
    for text in passages:
        here: collections.Counter[str] = collections.Counter()
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
    n_lines, n_passages = max(n_lines, 1), max(len(passages), 1)
    return {k: {"lines": lines_of[k] / n_lines, "passages": passages_of[k] / n_passages} for k in _LINE_FORMATS}


def _line_format(line: str) -> str | None:
    if len(line) > 300:  # the patterns' time grows with the square of the length
        line = f"{line[:200]} {line[-100:]}"
    return next((kind for kind, pattern in _LINE_FORMATS.items() if pattern.match(line)), None)


TARGET = "target"  # its name among the sources
_FEATURES = 30_000  # words and pairs of words that the classifier sees: the most frequent
_MIXTURE_WORDS = 50_000
_CLASSIFIED = 1000  # passages of each side at most
_FOLDS = 4
_TELLING = 10
_SMOOTHING = 0.02  # of each source's words, drawn from all sources: no word is impossible
_ALIKE_AUC = 0.65  # below this, passages can hardly be told apart
_FAR_AUC = 0.9
_FAR_BITS = 0.05  # of divergence of words beyond chance
_GAIN = 0.005  # bits nearer to the target; for a smaller gain the mixture is kept
_DROP = 0.02  # a smaller share in the nearest mixture means: drop the source
_APART = 1.5  # times the distance that is usual among the sources
_CHANGE = 1.5  # times more or less than now
_NAMES = {"list": "lists", "table": "tables", "heading": "headings", "code": "code"}
# Parts of a source's entry: the ratio of two sources from which on it is worth naming, what the ratio is divided by to
# compare it with other differences, and the words.
_RATIOS = (
    ("readability", "words_per_sentence", 2.0, 2.0, "it has {:.1f} words a sentence against {:.1f}"),
    ("readability", "chars_per_word", 1.2, 2.0, "it has {:.1f} characters a word against {:.1f}"),
    ("length", "p50", 4.0, 10.0, "its documents' median is {:,} characters against {:,}"),
)


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two sources `a` and `b`, or a source and the target (then `b` is "target")."""

    a: str
    b: str
    js_words: float  # bits, from 0 (the same) to 1
    floor_words: float  # bits that chance alone causes: between halves of one source
    js_bigrams: float
    floor_bigrams: float
    auc: float | None  # of a classifier, cross-validated by document; None: too few documents
    telling_a: list[str]  # words by which the classifier knows `a`
    telling_b: list[str]

    @property
    def distance(self) -> float:
        """Returns the divergence of words in bits, minus the part that chance causes; at least 0."""
        return max(0.0, self.js_words - self.floor_words)


def compare(
    sources: Mapping[str, Iterable[str]],
    target: Iterable[str] | None = None,
    *,
    weights: Mapping[str, float] | None = None,
    sample_mb: float = 2.0,
    read_mb: float = 64.0,
) -> dict:
    """Compares sources with one another and with a target, on samples; the order of texts does not matter.

    Returns, as JSON values, "sources" (name -> its lengths, readability and formats), "pairs" (see `Pair`), "mixture" (see
    `_mixture`; None without a target) and "advice" (source -> action and sentence: what to do with it in a pilot). Raises
    ConfigError if a source or the target has no text.
    """
    numbers: dict[str, int] = {}  # of words and pairs of words, alike for all samples that are compared
    profiles: dict[str, _Profile] = {}
    everything = dict(sources) | ({TARGET: target} if target is not None else {})
    for name, texts in everything.items():
        passages = sample(texts, round(sample_mb * 1e6), round(read_mb * 1e6))
        if not any(passage.strip() for passage in passages.passages):
            raise ConfigError(f"{'the target' if name == TARGET else f'source {name}'} has no text to compare")
        profiles[name] = _Profile(passages, numbers)
    rows, terms = _features(profiles, list(numbers))
    names = [(a, b) for a, b in itertools.combinations(sources, 2)]
    names += [(a, TARGET) for a in sources] if target is not None else []
    pairs = [_pair(a, b, profiles, rows, terms) for a, b in names]
    now = dict.fromkeys(sources, 1.0) if weights is None else {name: float(weights[name]) for name in sources}
    now = {name: weight / sum(now.values()) for name, weight in now.items()}
    mixture = _mixture(profiles, now, len(numbers)) if target is not None else None
    described = {name: profile.describe() for name, profile in profiles.items()}
    advised = _advise(described, pairs, mixture)
    advice = {name: dict(zip(("action", "sentence"), each, strict=True)) for name, each in advised.items()}
    rows_of_pairs = [dataclasses.asdict(pair) | {"distance": pair.distance} for pair in pairs]
    return {"sources": described, "pairs": rows_of_pairs, "mixture": mixture, "advice": advice}


class _Profile:
    """A sample as numbers: the words and the pairs of words of each passage, and of two halves that share no document."""

    def __init__(self, sample: Sample, numbers: dict[str, int]):
        """A word or pair that `numbers` lacks gets the next number."""
        self.sample = sample
        words = [words_lib.split(passage.lower()) for passage in sample.passages]
        pairs = [[f"{a} {b}" for a, b in itertools.pairwise(passage)] for passage in words]
        self.passages = [
            [np.asarray([numbers.setdefault(term, len(numbers)) for term in passage], np.int64) for passage in kind]
            for kind in (words, pairs)
        ]
        self.words = np.concatenate(self.passages[0])
        # Documents take turns, in the order in which their first passages stand in the sample.
        turn = {group: i % 2 for i, group in enumerate(dict.fromkeys(sample.groups.tolist()))}
        side = [turn[group] for group in sample.groups.tolist()]
        self.halves = [[_where(kind, side, half) for kind in self.passages] for half in (0, 1)]

    def describe(self) -> dict:
        """Returns the source's entry in the report."""
        return {
            "documents": len(self.sample.lengths),
            "bytes": self.sample.n_bytes,
            "sampled_words": len(self.words),
            "length": quantiles(self.sample.lengths),
            "readability": readability(self.sample.passages),
            "formats": formats(self.sample.passages),
        }


def _where(passages: Sequence[np.ndarray], side: Sequence[int], half: int) -> np.ndarray:
    own = [passage for passage, own_side in zip(passages, side, strict=True) if own_side == half]
    return np.concatenate([np.empty(0, np.int64), *own])


def _divergence(a: _Profile, b: _Profile, kind: int) -> tuple[float, float]:
    """Returns (JS of a and b, mean JS between the halves of each), on samples of one size. kind 0: words, 1: pairs."""
    size = min(len(half[kind]) for half in a.halves + b.halves)

    def js(x: Sequence[np.ndarray], y: Sequence[np.ndarray]) -> float:
        return js_divergence(x[kind][:size], y[kind][:size])

    across = [js(x, y) for x, y in zip(a.halves, b.halves, strict=True)]
    within = [js(*a.halves), js(*b.halves)]
    return float(np.mean(across)), float(np.mean(within))


def _features(
    profiles: Mapping[str, _Profile], terms: Sequence[str]
) -> tuple[dict[str, scipy.sparse.csr_matrix], list[str]]:
    """Returns (source -> TF-IDF of its passages, CSR float[passages, F], by the most frequent terms; these F terms)."""
    passages = [np.concatenate(kinds) for profile in profiles.values() for kinds in zip(*profile.passages, strict=True)]
    everything, ends = np.concatenate(passages), np.cumsum([0, *map(len, passages)])
    counts = scipy.sparse.csr_matrix((np.ones(len(everything)), everything, ends), (len(passages), len(terms)))
    counts.sum_duplicates()
    often, is_pair = np.bincount(everything, minlength=len(terms)), np.asarray([" " in term for term in terms])
    kinds = (np.flatnonzero(~is_pair), _FEATURES * 2 // 3), (np.flatnonzero(is_pair), _FEATURES // 3)
    best = np.concatenate([own[np.sort(np.argsort(-often[own], kind="stable")[:limit])] for own, limit in kinds])
    matrix = TfidfTransformer(sublinear_tf=True).fit_transform(counts[:, best])
    bounds = np.cumsum([0, *(len(profile.sample.passages) for profile in profiles.values())]).tolist()
    rows = {name: matrix[a:b] for name, (a, b) in zip(profiles, itertools.pairwise(bounds), strict=True)}
    return rows, [terms[i] for i in best.tolist()]


def _pair(
    a: str, b: str, profiles: Mapping[str, _Profile], rows: Mapping[str, scipy.sparse.csr_matrix], terms: Sequence[str]
) -> Pair:
    words, floor_words = _divergence(profiles[a], profiles[b], 0)
    pairs, floor_pairs = _divergence(profiles[a], profiles[b], 1)
    # Hashes order the passages: the first ones are a sample.
    size = min(_CLASSIFIED, rows[a].shape[0], rows[b].shape[0])
    x = scipy.sparse.vstack([rows[name][:size] for name in (a, b)], format="csr")
    y = np.repeat([0, 1], size)
    groups_b = profiles[b].sample.groups[:size] + 1 + profiles[a].sample.groups.max()
    auc = _auc(x, y, np.concatenate([profiles[a].sample.groups[:size], groups_b]))
    weight = _classifier().fit(x, y).coef_[0]
    # How much each feature adds to the difference of the two sides' mean scores.
    effect = weight * np.asarray(x[size:].mean(0) - x[:size].mean(0))[0]

    def telling(sign: int) -> list[str]:
        side = np.where(np.sign(weight) == sign, effect, 0)
        best = np.argsort(-side, kind="stable")[:_TELLING]
        return [terms[i] for i in best.tolist() if side[i] > 0]

    return Pair(a, b, words, floor_words, pairs, floor_pairs, auc, telling(-1), telling(1))


def _classifier() -> LogisticRegression:
    # The dual: ten times as fast with more features than passages.
    return LogisticRegression(C=10.0, solver="liblinear", dual=True, random_state=0, max_iter=1000)


def _auc(x: scipy.sparse.csr_matrix, y: np.ndarray, groups: np.ndarray) -> float | None:
    """Returns the mean AUC over folds that share no document; None if a side has fewer documents than folds."""
    if min(len(np.unique(groups[y == side])) for side in (0, 1)) < _FOLDS:
        return None
    fold = np.empty(len(y), np.int64)
    for side in (0, 1):  # each side's documents by turns, so that every fold has both sides
        fold[y == side] = np.unique(groups[y == side], return_inverse=True)[1] % _FOLDS
    scores = cross_val_score(_classifier(), x, y, cv=PredefinedSplit(fold), scoring="roc_auc")
    return float(scores.mean())


def _mixture(profiles: Mapping[str, _Profile], now: Mapping[str, float], size: int) -> dict:
    """Returns the mixture in use ("now") and the one "nearest" to the target, and each one's bits from it ("js_...").

    By the most frequent words of all (smoothed) sources alike.
    """
    words = {name: profile.words for name, profile in profiles.items()}
    counts = {name: np.bincount(ids, minlength=size) / len(ids) for name, ids in words.items()}
    best = np.argsort(-sum(counts.values()), kind="stable")[:_MIXTURE_WORDS]
    names = list(now)
    components = np.stack([counts[name][best] for name in names])
    target = counts[TARGET][best] / counts[TARGET][best].sum()
    everywhere = components.mean(0) + 1e-9
    smooth = (1 - _SMOOTHING) * components + _SMOOTHING * everywhere / everywhere.sum()
    weights = nearest_mixture(smooth, target)
    mixed = {"now": np.asarray([now[name] for name in names]) @ components, "nearest": weights @ components}
    js = {f"js_{key}": js_of_shares(shares / shares.sum(), target) for key, shares in mixed.items()}
    return {"now": dict(now), "nearest": dict(zip(names, weights.tolist(), strict=True))} | js


Advice = tuple[str, str]  # keep, raise, lower or drop (without a target keep or try); a sentence


def _advise(sources: Mapping[str, dict], pairs: Sequence[Pair], mixture: dict | None) -> dict[str, Advice]:
    if mixture is not None:
        if mixture["js_now"] - mixture["js_nearest"] < _GAIN:
            why = "no mixture of these sources comes nearer to the target than the one now"
            bits = f"({mixture['js_now']:.2f} bits from it)"
            return {name: ("keep", f"Keep {name} as it is: {why} {bits}.") for name in mixture["now"]}
        to_target = {pair.a: pair for pair in pairs if pair.b == TARGET}
        return {name: _towards_target(name, sources, to_target[name], mixture) for name in mixture["now"]}
    pairs_of = {name: [pair for pair in pairs if name in (pair.a, pair.b)] for name in sources}
    nearest = {n: min(own, key=operator.attrgetter("distance"), default=None) for n, own in pairs_of.items()}
    usual = statistics.median(pair.distance for pair in nearest.values()) if pairs else 0.0
    return {name: _among_others(name, sources, pair, usual) for name, pair in nearest.items()}


def _towards_target(name: str, sources: Mapping[str, dict], pair: Pair, mixture: dict) -> Advice:
    now, nearest = mixture["now"][name], mixture["nearest"][name]
    near = f"{_percent(nearest)} in the mixture nearest to the target, {_percent(now)} now"
    if pair.auc is not None and pair.auc < _ALIKE_AUC:
        return "keep", f"Keep {name}: it can hardly be told from the target (AUC {pair.auc:.2f}); {near}."
    far = pair.distance > _FAR_BITS and (pair.auc is None or pair.auc > _FAR_AUC)
    apart = f"{near}; it is {pair.distance:.2f} bits from the target beyond chance{_told_apart(pair)}"
    why = _why(sources[name], sources[TARGET], pair.telling_a)
    if nearest < _DROP and far:
        return "drop", f"Drop {name}, or keep it only for what it teaches: {apart}{why}."
    if nearest * _CHANGE < now:
        return "lower", f"Lower {name}: {apart}{why}."
    if nearest > now * _CHANGE:
        return "raise", f"Raise {name}: {apart}."
    return "keep", f"Keep {name} as it is: {apart}."


def _among_others(name: str, sources: Mapping[str, dict], nearest: Pair | None, usual: float) -> Advice:
    if nearest is None:
        return "keep", f"Keep {name}: it is the only source, and there is no target to compare it with."
    other = nearest.b if nearest.a == name else nearest.a
    if nearest.auc is not None and nearest.auc < _ALIKE_AUC:
        alike = f"they can hardly be told apart (AUC {nearest.auc:.2f}), so that their two weights are one"
        return "keep", f"Keep {name}, but as one with {other}: {alike}."
    apart = f"{nearest.distance:.2f} bits beyond chance from {other}, the nearest of the others{_told_apart(nearest)}"
    if nearest.distance > max(_FAR_BITS, _APART * usual):
        telling = nearest.telling_a if nearest.a == name else nearest.telling_b
        why = f"{_why(sources[name], sources[other], telling)}; a target would tell whether that is wanted"
        return "try", f"Try {name} at half its weight in a pilot: it stands apart, {apart}{why}."
    return "keep", f"Keep {name}: it stands no further apart than is usual here, {apart}."


def _told_apart(pair: Pair) -> str:
    return "" if pair.auc is None else f", told apart with AUC {pair.auc:.2f}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f}%" if share >= 0.01 or share == 0 else "under 1%"


def _why(a: dict, b: dict, telling: Sequence[str]) -> str:
    """Returns words on the largest difference of format, sentences or length, and on the source's typical words."""
    differences = []
    for kind, shares in a["formats"].items():
        x, y = shares["lines"], b["formats"][kind]["lines"]
        if abs(x - y) > 0.05:
            words = f"{_percent(x)} of its lines are {_NAMES[kind]} against {_percent(y)}"
            differences.append((abs(x - y) * 10, words))
    for part, key, least, divisor, words in _RATIOS:
        x, y = a[part][key], b[part][key]
        if min(x, y) > 0 and (ratio := max(x / y, y / x)) > least:
            differences.append((ratio / divisor, words.format(x, y)))
    text = f", {max(differences)[1]}" if differences else ""
    shown = [f"'{word}'" for word in telling if any(c.isalnum() for c in word)][:4] or [f"'{w}'" for w in telling[:4]]
    return text + (f", known by {', '.join(shown)}" if shown else "")
