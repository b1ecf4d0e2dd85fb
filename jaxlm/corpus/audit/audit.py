"""Finds repeated strings that no person would write, before a tokenizer or a model sees them.

`scan` counts known junk, words, lines and clauses of each source; `rank` compares the sources by log-odds ratios with
an informative Dirichlet prior (Monroe, Colaresi and Quinn 2008, "Fightin' Words"). A conspicuous string may belong to
the subject, so only known junk, words of unnatural shape in a fixed frame, and lines of menus are called junk, unless
the target has them too.
"""

import collections
import dataclasses
import math
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence

from jaxlm.corpus.audit.counts import HALVES, Counts, Entry, scan
from jaxlm.corpus.sources.base import SourceSpec, SourceStats
from jaxlm.corpus.sources.embedded import iterate_embedded
from jaxlm.corpus.sources.units import read_unit, split_source
from jaxlm.corpus.stages import registry
from jaxlm.corpus.stages.junk_patterns import FURNITURE, GROUPS

_PRIOR_WORDS = 10_000.0  # the weight of the Dirichlet prior
_MIN_Z = 3.0
_FEW_WORDS = 20  # added to the words of a shape, so that few words dominate nothing
_OWN = 0.8  # concentration from which on a string is a source's own
_MIN_DOCUMENTS = 3  # of a line or clause, where the source has that many
_LONG_LINE, _LONG_CLAUSE = 40, 60  # characters from which on a repetition can't be chance
_PER_KIND = 20  # findings of a kind and source
_OWN_WORDS = 1  # of a shape and source that are no junk, but of its domain
_VERY_FAR = 20.0  # robust standard deviations
_DOMINANT = 0.2  # share of a source's words of a shape, from which on a word in a fixed frame is junk
_FRAME_WORDS = 2
_MANY_A_DOCUMENT = 2  # placeholders come again and again
_KNOWN_THERE = 0.1  # the contrast text has a string too, if its rate there is at least this share of the rate here
_MENU_CHARS = 40  # of a line in a menu, at most
_EACH_PAGE = 0.1  # of the documents: a line that ends at least this share of them is a footer
_MANY_PAGES = 0.01  # of the documents: short lines that at least this share of them has in one order are a menu
_PLACEHOLDER = re.compile(r"([A-Z][a-z]{2,})[A-Z]")  # PersonX
_SLOT = re.compile(r"\[[A-Z]+(?:_[A-Z0-9]+)+\]")  # [CUSTOMER_NAME]
DOCUMENTS = "documents"  # the kind of findings about whole documents
_SENTENCE = re.compile(r"[.!?:;,]$|^[#|>*-]|^0|^```|[=(){}]")
# Placeholders that the stage `pii` writes.
_OURS = frozenset(("<EMAIL>", "<IP>", "<MAC>", "<PHONE>", "<SECRET>"))
_PUNCTUATION = ".,;:!?'\"-()\u2013\u2014\u2018\u2019\u201c\u201d\u2026"
_CAMEL = re.compile(r"[a-z][A-Z]|[A-Z]{2}[a-z]{2}")
_SURNAME = re.compile(r"(?:Mc|Mac|De|Di|Du|La|Le|Van|[OD]['\u2019])[A-Z][a-z]+")


@dataclasses.dataclass(frozen=True)
class Finding:
    """A string that a source repeats."""

    kind: str  # of `GROUPS`, or "token" (a word of unnatural shape), "word", "line", "clause", "documents"
    text: str  # every digit as 0, except in words
    pattern: str  # makes the stage `junk` remove it; "" if it is only characteristic of the source
    why: str
    source: str
    count: int  # too low if memory was short (see `scan`)
    documents: int
    share_of_documents: float
    concentration: float  # 1: only in this source; 0.5: as often as elsewhere
    score: float  # the harm, 0 to 100
    examples: tuple[tuple[str, str], ...]  # (document id, text around it)

    @property
    def is_junk(self) -> bool:
        return bool(self.pattern)

    def to_row(self) -> dict[str, object]:
        examples = [{"document": doc_id, "text": text} for doc_id, text in self.examples]
        return dataclasses.asdict(self) | {"junk": self.is_junk, "examples": examples}


def rank(sources: Sequence[Counts], contrast: Counts | None = None) -> list[Finding]:
    """Returns all findings, junk first, the worst first, at most 20 of a kind and source. Strings of `contrast` are no junk."""
    findings = []
    for counts in sources:
        others = [other for other in (*sources, contrast) if other is not None and other is not counts]
        by_kind = collections.defaultdict(list)
        for find in (_known_junk, _words, _repeated):
            for finding in find(counts, others, contrast):
                by_kind[finding.kind, finding.is_junk].append(finding)
        for (kind, is_junk), alike in by_kind.items():
            most = _PER_KIND if is_junk or kind not in ("token", "word") else _OWN_WORDS
            findings += sorted(alike, key=_worst_first)[:most]
        findings += _unlike_the_rest(counts)
    return sorted(findings, key=_worst_first)


def _worst_first(finding: Finding) -> tuple:
    return not finding.is_junk, finding.kind != DOCUMENTS, -finding.score, finding.source, finding.kind, finding.text


def _unlike_the_rest(counts: Counts) -> Iterator[Finding]:
    """Yields a finding for each kind of documents unlike the rest of their source. A person must look at these."""
    for odd in counts.outliers.odd():
        share = odd.documents / counts.documents
        score = 100 * min(1.0, odd.far / _VERY_FAR) * max(0.1, math.sqrt(share))
        numbers = (odd.documents, odd.documents, share, 1.0, score)
        yield Finding(DOCUMENTS, odd.why, "", "documents unlike the rest", counts.source, *numbers, odd.examples)


def _is_habit(table: str, key: str, entry: Entry, counts: Counts, contrast: Counts | None) -> bool:
    """Returns True if the string is in several documents, and seldom in the contrast text."""
    if entry.documents < min(_MIN_DOCUMENTS, counts.documents):
        return False
    there = getattr(contrast, table).entries.get(key) if contrast else None
    return there is None or there.count / contrast.bytes < _KNOWN_THERE * entry.count / counts.bytes


def _known_junk(counts: Counts, others: list[Counts], contrast: Counts | None) -> Iterator[Finding]:
    for key, entry in counts.junk.entries.items():
        kind, _, label = key.partition(":")
        group, concentration = GROUPS[kind], _concentration("junk", key, entry, counts, others)
        debris = group.debris.match(label) and not entry.frame.is_shown
        junk = debris and _is_habit("junk", key, entry, counts, contrast)
        pattern = group.remover(kind, label) if junk else ""
        yield _finding(kind, label, pattern, group.about, counts, entry, concentration, group.severity)


def _words(counts: Counts, others: list[Counts], contrast: Counts | None) -> Iterator[Finding]:
    """Yields the source's own words, scored by how much each dominates the source's own words of its shape."""
    own: dict[str, dict[str, float]] = collections.defaultdict(dict)  # shape -> word -> concentration
    for word, entry in counts.words.entries.items():
        kind = shape(word)
        if kind == "plain" and not others:
            continue
        concentration = _concentration("words", word, entry, counts, others)
        # General prose is too little text for a z-score of its own, and has no words of unnatural shape.
        sure = kind != "plain" and others in ([], [contrast])
        if concentration >= _OWN and (sure or _log_odds_z(word, entry, counts, others) >= _MIN_Z):
            own[kind][word] = concentration
    for kind, words in own.items():
        total = sum(counts.words.entries[word].count for word in words)
        siblings = collections.Counter(_stem(word) for word in words)
        for word, concentration in words.items():
            if kind != "plain" and _is_known(word):
                continue
            entry = counts.words.entries[word]
            dominance = entry.count / (total + _FEW_WORDS)
            severity = _SHAPES[kind] * (dominance if kind == "plain" else math.sqrt(dominance))
            habit = _is_habit("words", word, entry, counts, contrast)
            why = _why_junk(word, kind, entry, dominance, siblings) if habit else ""
            pattern, why = (rf"(?<!\w){_escape(word)}(?!\w)", why) if why else ("", "a word of this source")
            kind_of_finding = "word" if kind == "plain" else "token"
            yield _finding(kind_of_finding, word, pattern, why, counts, entry, concentration, severity)


def _why_junk(word: str, kind: str, entry: Entry, dominance: float, siblings: Mapping[str, int]) -> str:
    """Returns why a word typical of a source is junk; "" if it may be a term of its domain."""
    if _SHAPES[kind] < _SURE_SHAPE or word in _OURS or entry.frame is None or entry.frame.is_shown:
        return ""
    twins = _stem(word) and siblings[_stem(word)] > 1 and entry.count >= _MANY_A_DOCUMENT * entry.documents
    if twins or _SLOT.fullmatch(word):
        return "a placeholder for a name"
    if dominance >= _DOMINANT and entry.frame.fixed_words() >= _FRAME_WORDS:
        return "always between the same words"
    return ""


def _stem(word: str) -> str:
    """Returns "Person" for "PersonX"; "" if the word does not look like a placeholder."""
    match = _PLACEHOLDER.fullmatch(word)
    return match[1] if match else ""


# How surely a word of this shape is junk if it makes up all the source's own words of the shape.
_SHAPES = {"bracketed": 1.0, "camel": 1.0, "underscored": 0.8, "capitals": 0.5, "marks": 0.3, "mixed": 0.2}
_SHAPES |= {"acronym": 0.2, "plain": 0.2}
_SURE_SHAPE = 0.3  # acronyms and words with digits are never removed


def shape(word: str) -> str:
    """Returns the shape of a word, a key of `_SHAPES`; "plain" is the shape of ordinary words."""
    if word.islower() and word.isalpha():
        return "plain"
    if word[0] == "<" or (word[0] == "[" and (word.isupper() or "_" in word)):  # [It] is an editor's
        return "bracketed"
    if not any(map(str.isalnum, word)):
        # ```, ## and <= are formats and operators, #-# is neither.
        return "marks" if len(word) > 2 and len(set(word)) > 1 and word.strip(_PUNCTUATION) else "plain"
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
    """Returns the z-score of a word's log-odds ratio against the other sources (Monroe et al. 2008, equations 16 and 22)."""
    here, there = entry.count, _elsewhere("words", word, others)
    n_here, n_there = counts.total_words, sum(other.total_words for other in others)
    if not n_there:
        return math.inf
    prior = _PRIOR_WORDS * (here + there) / (n_here + n_there)
    odds_here = (here + prior) / (n_here + _PRIOR_WORDS - here - prior)
    odds_there = (there + prior) / (n_there + _PRIOR_WORDS - there - prior)
    return math.log(odds_here / odds_there) / math.sqrt(1 / (here + prior) + 1 / (there + prior))


def _repeated(counts: Counts, others: list[Counts], contrast: Counts | None) -> Iterator[Finding]:
    """Yields the lines that many documents share, and the source's own clauses that many documents share."""
    shown: list[tuple[str, int]] = []
    for kind, table, length, weight in (("line", "lines", _LONG_LINE, 0.6), ("clause", "clauses", _LONG_CLAUSE, 0.4)):
        for text, entry in sorted(getattr(counts, table).entries.items(), key=lambda item: (-len(item[0]), item[0])):
            if entry.documents < min(_MIN_DOCUMENTS, counts.documents) or sum(map(str.isalpha, text)) < 5:
                continue
            concentration = _concentration(table, text, entry, counts, others)
            if text.startswith("#") or (kind == "clause" and concentration < _OWN):  # headings are the same everywhere
                continue
            if any(text in longer and entry.count < 2 * n for longer, n in shown) or _is_known(text):
                continue
            shown.append((text, entry.count))
            pattern, why = "", "a passage that documents share"
            if _is_habit(table, text, entry, counts, contrast) and (role := _furniture(text, entry, counts)):
                why, pattern = role, _escape(text).replace("0", r"\d+")
                pattern = rf"^\s*{pattern}\s*$" if kind == "line" else pattern
            severity = weight * min(1, len(text) / length)
            yield _finding(kind, text, pattern, why, counts, entry, concentration, severity)


def _furniture(text: str, entry: Entry, counts: Counts) -> str:
    """Returns a repeated line's role on a page (menu, footer) if it surely is no part of the text; else ""."""
    if FURNITURE.search(text):
        return "a menu, notice or footer"
    if entry.frame is None or entry.frame.is_shown:
        return ""
    before, after = entry.frame.fixed(0), entry.frame.fixed(1)
    if after == "$" and before != "^" and entry.documents >= _EACH_PAGE * counts.documents:
        return "the end of each page"
    lines = [line for line in (before, text, after) if line not in ("^", "$")]
    if entry.documents < _MANY_PAGES * counts.documents or not (before and after and len(lines) > 1):
        return ""
    return "" if any(len(x) > _MENU_CHARS or _SENTENCE.search(x) for x in lines) else "a line of a menu"


def _is_known(text: str) -> bool:
    return any(next(group.matches(text), None) for group in GROUPS.values())


def _escape(text: str) -> str:
    return re.escape(text).replace(r"\ ", r"\s+")


def _elsewhere(table: str, key: str, others: list[Counts]) -> int:
    """Returns how often a string occurs in other sources; for a missing string, how often at most (`Table.lost`)."""
    tables = [getattr(other, table) for other in others]
    return sum(t.entries[key].count if key in t.entries else t.lost for t in tables)


def _concentration(table: str, key: str, entry: Entry, counts: Counts, others: list[Counts]) -> float:
    here = entry.count / counts.bytes
    return here / (here + _elsewhere(table, key, others) / max(1, sum(other.bytes for other in others)))


def _finding(
    kind: str, text: str, pattern: str, why: str, counts: Counts, entry: Entry, concentration: float, severity: float
) -> Finding:
    share = entry.documents / counts.documents
    evidence = entry.documents / (entry.documents + 2)  # little for few documents: one document of two is no habit yet
    harm = math.sqrt(max(share * evidence, min(1.0, entry.chars / counts.bytes)))
    numbers = (entry.count, entry.documents, share, concentration, 100 * severity * harm)
    return Finding(kind, text, pattern, why, counts.source, *numbers, entry.examples)


_TARGET_BYTES = 8_000_000
_GENERAL_BYTES = 1_000_000
_FEW_BYTES = 100_000  # of a source tell nothing about its words


def contrast_of(sizes: Sequence[int], target: str, html: dict, halves: Sequence[str] = HALVES) -> Counts | None:
    """Returns the counts of the target, or of general prose for a single source; None for several sources or little text.

    `sizes`: the bytes of each source.
    """
    if target:
        return scan("target", target_texts(target, _TARGET_BYTES, html), halves=halves)
    if len(sizes) != 1 or sizes[0] < _FEW_BYTES:
        return None
    prose = iterate_embedded("prose", min(_GENERAL_BYTES, sizes[0]))
    return scan("general prose", prose, halves=halves)


def target_texts(path: str, limit: int, html: dict) -> Iterator[tuple[str, str]]:
    """Yields (id, text) of about `limit` bytes of `prepare.target`. Raises ConfigError if there is nothing at `path`."""
    spec = SourceSpec("target", path, max_bytes=limit)
    units = split_source(spec, max(1 << 20, limit))
    stage = registry.make(registry.StageSpec("html", html), pathlib.Path())
    documents = (document for unit in units for document in read_unit(unit, spec, SourceStats()))
    return ((d.id, d.text) for d in documents if stage.apply(d, collections.Counter()) is None)
