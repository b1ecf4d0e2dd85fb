"""The junk audit: finds repeated strings that no person would write, before a tokenizer or a model sees them.

`scan` counts known junk, words, lines and clauses of each source in one pass; `rank` compares the sources. A word
belongs to a source if its log-odds ratio against the other sources, with an informative Dirichlet prior, is high
(Monroe, Colaresi and Quinn 2008, "Fightin' Words"). Such a word is suspect if its shape is unnatural (`PersonX`,
`foo_bar`, `<name>`) and it dominates the source's words of that shape: one of a thousand identifiers is code, one of
three is junk. If there is only one source, only the shape counts.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from jaxlm.corpus.audit_counts import MAX_ENTRIES, Counts, Entry, Table, scan
from jaxlm.corpus.audit_patterns import GROUPS

__all__ = ["Finding", "audit", "rank", "scan"]

_PRIOR_WORDS = 10_000.0  # the weight of the Dirichlet prior
_MIN_Z = 3.0
_FEW_WORDS = 20  # of a shape dominate nothing
_OWN = 0.8  # concentration from which on a string is a source's own
_MIN_DOCUMENTS = 3  # of a line or clause, where the source has that many
_LONG_LINE, _LONG_CLAUSE = 40, 60  # characters from which on a repetition can't be chance
_PER_KIND = 20  # findings of a kind and source
_PUNCTUATION = ".,;:!?'\"-()\u2013\u2014\u2018\u2019\u201c\u201d\u2026"
_CAMEL = re.compile(r"[a-z][A-Z]|[A-Z]{2}[a-z]{2}")
_SURNAME = re.compile(r"(?:Mc|Mac|De|Di|Du|La|Le|Van|[OD]['\u2019])[A-Z][a-z]+")


@dataclasses.dataclass(frozen=True)
class Finding:
    """A string that a source repeats.

    Attributes:
      kind: a group of `audit_patterns`, or "token" (a word of unnatural shape), "word", "line", "clause".
      text: the repeated string, with every digit as 0, except in words.
      pattern: the group's name or a regular expression that makes the stage `junk` remove it.
      source: the name of the source that repeats it. The same junk in two sources makes two findings.
      count, documents: how often it occurs, and in how many documents; too low if memory was short (see `scan`).
      share_of_documents: `documents` as a share of the source's documents.
      concentration: its rate per byte in this source, divided by the sum of this rate and its rate in the other sources
        together. 1: only here (or there is only one source); 0.5: as often as elsewhere.
      score: the harm, 0 to 100: how surely it is junk, times the square root of its share of the source's documents, or
        of its bytes if that share is larger.
      examples: up to three (document id, text around it).
    """

    kind: str
    text: str
    pattern: str
    source: str
    count: int
    documents: int
    share_of_documents: float
    concentration: float
    score: float
    examples: tuple[tuple[str, str], ...]

    def to_row(self) -> dict[str, object]:
        """Returns the finding as a plain dict, for tables and JSON."""
        examples = [{"document": doc_id, "text": text} for doc_id, text in self.examples]
        return dataclasses.asdict(self) | {"examples": examples}


def audit(
    documents_by_source: Mapping[str, Iterable[tuple[str, str]]], max_entries: int = MAX_ENTRIES
) -> list[Finding]:
    """Returns the junk in the documents of each source, worst first. Deterministic.

    Args:
      documents_by_source: source -> its (doc_id, text) pairs.
      max_entries: the bound on memory; see `scan`.
    """
    return rank([scan(name, documents, max_entries) for name, documents in documents_by_source.items()])


def rank(sources: Sequence[Counts]) -> list[Finding]:
    """Returns all findings in the sources, worst first, and at most 20 of a kind for each source."""
    findings = []
    for counts in sources:
        others = [other for other in sources if other is not counts]
        by_kind = collections.defaultdict(list)
        for found in (_known_junk, _words, _repeated):
            for finding in found(counts, others):
                by_kind[finding.kind].append(finding)
        for found in by_kind.values():
            findings += sorted(found, key=_worst_first)[:_PER_KIND]
    return sorted(findings, key=_worst_first)


def _worst_first(finding: Finding) -> tuple:
    return -finding.score, finding.source, finding.kind, finding.text


def _known_junk(counts: Counts, others: list[Counts]) -> Iterator[Finding]:
    for key, entry in counts.junk.entries.items():
        kind, _, label = key.partition(":")
        concentration = _concentration(entry, counts, [(o, o.junk, key) for o in others])
        yield _finding(kind, label, kind, counts, entry, concentration, GROUPS[kind].severity)


def _words(counts: Counts, others: list[Counts]) -> Iterator[Finding]:
    """Yields the words that belong to the source, scored by how much they dominate its own words of their shape."""
    own: dict[str, dict[str, float]] = collections.defaultdict(dict)  # shape -> word -> concentration
    for word, entry in counts.words.entries.items():
        kind = shape(word)
        if kind == "plain" and not others:
            continue
        concentration = _concentration(entry, counts, [(o, o.words, word) for o in others])
        if concentration >= _OWN and _log_odds_z(word, entry, counts, others) >= _MIN_Z:
            own[kind][word] = concentration
    for kind, words in own.items():
        total = sum(counts.words.entries[word].count for word in words)
        for word, concentration in words.items():
            if kind != "plain" and _is_known(word):
                continue
            entry = counts.words.entries[word]
            dominance = entry.count / (total + _FEW_WORDS)
            severity = _SHAPES[kind] * (dominance if kind == "plain" else math.sqrt(dominance))
            pattern = rf"(?<!\w){_escape(word)}(?!\w)"
            yield _finding(
                "word" if kind == "plain" else "token", word, pattern, counts, entry, concentration, severity
            )


# How surely a word of this shape is junk when all the source's own words of the shape are this one.
_SHAPES = {"bracketed": 1.0, "camel": 1.0, "underscored": 0.8, "capitals": 0.5, "marks": 0.3, "mixed": 0.2}
_SHAPES |= {"acronym": 0.2, "plain": 0.2}


def shape(word: str) -> str:
    """Returns the shape of a word, a key of `_SHAPES`; "plain" is the shape of ordinary words."""
    if word.islower() and word.isalpha():
        return "plain"
    if word[0] == "<" or (word[0] == "[" and (word.isupper() or "_" in word)):  # [It] is an editor's
        return "bracketed"
    if not any(map(str.isalnum, word)):
        return "marks" if word.strip(_PUNCTUATION) else "plain"
    if "_" in word:
        return "underscored"
    if word.isupper() and word.isalpha() and len(word) > 1:
        return "capitals" if len(word) > 4 else "acronym"
    if _CAMEL.search(word) and not _SURNAME.fullmatch(word):
        return "camel"
    if any(map(str.isdigit, word)):
        return "mixed"
    return "plain"


def _log_odds_z(word: str, entry: Entry, counts: Counts, others: list[Counts]) -> float:
    """Returns the z-score of a word's log-odds ratio here against elsewhere (Monroe et al. 2008, equations 16 and 22)."""
    here, there = entry.count, _elsewhere([(o, o.words, word) for o in others])
    n_here, n_there = counts.total_words, sum(other.total_words for other in others)
    if not n_there:
        return math.inf
    prior = _PRIOR_WORDS * (here + there) / (n_here + n_there)
    odds_here = (here + prior) / (n_here + _PRIOR_WORDS - here - prior)
    odds_there = (there + prior) / (n_there + _PRIOR_WORDS - there - prior)
    return math.log(odds_here / odds_there) / math.sqrt(1 / (here + prior) + 1 / (there + prior))


def _repeated(counts: Counts, others: list[Counts]) -> Iterator[Finding]:
    """Yields lines, and clauses that belong to the source, that occur in many documents.

    Each text in its longest form only.
    """
    shown: list[tuple[str, int]] = []
    for kind, table, length, weight in (("line", "lines", _LONG_LINE, 0.6), ("clause", "clauses", _LONG_CLAUSE, 0.4)):
        for text, entry in sorted(getattr(counts, table).entries.items(), key=lambda item: (-len(item[0]), item[0])):
            if entry.documents < min(_MIN_DOCUMENTS, counts.documents) or sum(map(str.isalpha, text)) < 5:
                continue
            concentration = _concentration(entry, counts, [(o, getattr(o, table), text) for o in others])
            if kind == "clause" and concentration < _OWN:
                continue
            if any(text in longer and entry.count < 2 * n for longer, n in shown) or _is_known(text):
                continue
            shown.append((text, entry.count))
            pattern = _escape(text).replace("0", r"\d+")
            pattern = rf"^\s*{pattern}\s*$" if kind == "line" else pattern
            yield _finding(kind, text, pattern, counts, entry, concentration, weight * min(1, len(text) / length))


def _is_known(text: str) -> bool:
    """True if the text holds known junk, which has a finding of its own."""
    return any(next(group.matches(text), None) for group in GROUPS.values())


def _escape(text: str) -> str:
    return re.escape(text).replace(r"\ ", r"\s+")


def _elsewhere(places: list[tuple[Counts, Table, str]]) -> int:
    """Counts occurrences in other sources. What memory may have dropped there counts as there."""
    return sum(table.entries[key].count if key in table.entries else table.lost for _, table, key in places)


def _concentration(entry: Entry, counts: Counts, places: list[tuple[Counts, Table, str]]) -> float:
    other_bytes = sum(other.bytes for other, _, _ in places)
    here, there = entry.count / counts.bytes, _elsewhere(places) / max(1, other_bytes)
    return here / (here + there)


def _finding(
    kind: str, text: str, pattern: str, counts: Counts, entry: Entry, concentration: float, severity: float
) -> Finding:
    share = entry.documents / counts.documents
    evidence = entry.documents / (entry.documents + 2)  # one document of two is no habit yet
    harm = math.sqrt(max(share * evidence, min(1.0, entry.chars / counts.bytes)))
    numbers = (entry.count, entry.documents, share, concentration, 100 * severity * harm)
    return Finding(kind, text, pattern, counts.source, *numbers, entry.examples)
