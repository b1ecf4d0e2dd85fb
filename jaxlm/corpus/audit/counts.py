"""Counts known junk, words, repeated lines and clauses of a source for the audit, in one pass and bounded memory."""

import collections
import dataclasses
import functools
import re
import sys
from collections.abc import Callable, Iterable, Sequence

from jaxlm.corpus.audit.outliers import Outliers
from jaxlm.corpus.stages.junk_patterns import GROUPS, Shown

MAX_ENTRIES = 50_000
HALVES = ("words", "lines")  # words and outliers; known junk, lines and clauses
_MIN_COUNT = 5
_EXAMPLE_AT = 3  # a string's count from which on examples are kept
_CONTEXT = 50  # characters on each side
_SEARCHED = 1 << 17  # characters of a document in which examples are looked up: one of megabytes has thousands
_MAX_WORD = 40  # longer ones are blobs
_LINE_CHARS = (10, 300)
_CLAUSE_CHARS = (20, 300)
_CLAUSE_SPACES = 4  # between four words, and the one after the mark
_CJK = "\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
# In a run of characters without spaces: <tag>, [NAME], Chinese or Japanese, a word with its apostrophe.
_PARTS = re.compile(rf"</?[\w|.:-]{{1,40}}/?>|\[/?[A-Za-z_]{{2,30}}\]|[{_CJK}]+|[^\W{_CJK}]+(?:['\u2019][^\W{_CJK}]+)?")
_MARKS = '.,;:!?()"\u201c\u201d|'  # where a clause ends
_DIGITS = re.compile(r"\d+")
_EDGES = "\"'`()[]{}<>.,;:!?*_\u2018\u2019\u201c\u201d"
_POSSESSIVES = ("'s", "\u2019s")
_FIXED = 0.6  # of the votes: one word at four places of five
_MIN_SEEN = 3
_LATER = 1.5  # a frame is looked at again when the count has grown by this factor
_SURROUNDINGS = 80  # characters of a frame


@dataclasses.dataclass(frozen=True)
class _Document:
    number: int  # within its source
    doc_id: str
    text: str

    @functools.cached_property
    def digits_as_0(self) -> "_Document":
        return dataclasses.replace(self, text=_DIGITS.sub("0", self.text))

    def find_digits(self, key: str) -> int:
        """Returns where a string, in which each number stands as 0, begins in the text; -1 if it does not."""
        at = self.digits_as_0.text.find(key, 0, _SEARCHED)
        return at + sum(self._longer[: self.digits_as_0.text.count("0", 0, max(0, at))])

    @functools.cached_property
    def _longer(self) -> list[int]:
        """Returns by how much each number of the text is longer than the 0 that stands for it."""
        return [len(number) - 1 for number in _DIGITS.findall(self.text)]

    @functools.cached_property
    def shown(self) -> Shown:
        return Shown(self.text)


class Frame:
    """The majority word at each position around a string, by voting (Boyer and Moore 1991)."""

    __slots__ = ("_votes", "_words", "seen", "shown")

    def __init__(self) -> None:
        self.seen = self.shown = 0  # places of the string; places in code or quotes
        self._words: list[str] = []
        self._votes: list[int] = []

    def add(self, words: tuple[str, ...], shown: bool) -> None:
        self.seen += 1
        self.shown += shown
        if not self._votes:
            self._words, self._votes = list(words), [0] * len(words)
        for i, word in enumerate(words):
            if not self._votes[i]:
                self._words[i] = word
            self._votes[i] += 1 if self._words[i] == word else -1

    @property
    def is_shown(self) -> bool:
        """True if at least half of the string's places are in code or quotes."""
        return 2 * self.shown >= max(1, self.seen)

    def fixed(self, position: int) -> str:
        """Returns the word that is nearly always at a position; "" if there is none."""
        if self.seen < _MIN_SEEN or self._votes[position] < _FIXED * self.seen:
            return ""
        return self._words[position]

    def fixed_words(self) -> int:
        """Returns how many words next to the string, at most two on each side, are nearly always the same."""
        return sum(bool(self.fixed(a)) + bool(self.fixed(a) and self.fixed(b)) for a, b in ((1, 0), (2, 3)))


Surroundings = Callable[[_Document, int, int], tuple[str, ...]]


def _words_around(document: _Document, start: int, end: int) -> tuple[str, ...]:
    """Returns two words before and two after on the same line, outside the run that holds the string; "" for no word."""
    text = document.text
    before = text[max(0, start - _SURROUNDINGS) : start].rpartition("\n")[2]
    after = text[end : end + _SURROUNDINGS].partition("\n")[0]
    if before.lstrip().startswith("#"):  # in a heading the same words around a string are no sign
        return "", "", "", ""
    left = [_plain(run) for run in before.rpartition(" ")[0].split()[-2:]]
    right = [_plain(run) for run in after.partition(" ")[2].split()[:2]]
    return *(["", "", *left][-2:]), *([*right, "", ""][:2])


def _plain(run: str) -> str:
    word = _DIGITS.sub("0", run.strip(_EDGES))
    return word if any(map(str.isalpha, word)) else ""


def _lines_around(document: _Document, start: int, end: int) -> tuple[str, ...]:
    """Returns the line before and the line after; "^" and "$" at the ends of a document."""
    text = document.text
    before = text[max(0, start - 4 * _SURROUNDINGS) : start].rstrip().rpartition("\n")[2].strip()
    after = text[end : end + 4 * _SURROUNDINGS].lstrip().partition("\n")[0].strip()
    at_start, at_end = not text[:start].strip(), not text[end:].strip()
    return "^" if at_start else before[:_SURROUNDINGS], "$" if at_end else after[:_SURROUNDINGS]


class Entry:
    """A string's number of occurrences, documents and characters, its frame, and examples as (document id, context)."""

    __slots__ = ("_around", "chars", "count", "documents", "example_at", "examples", "frame", "key", "last")

    def __init__(self, key: str, example_at: int, around: Surroundings | None = None):
        self.key = key
        self.count = self.documents = self.chars = 0
        self.last = 0  # the last document's number
        self.example_at = example_at  # the count from which on an example is kept
        self.examples: tuple[tuple[str, str], ...] = ()
        self.frame: Frame | None = None
        self._around = around

    def add(self, n: int, document: _Document, literal: str = "") -> None:
        """Counts a string that occurs `n` times in the document. `literal` is its form there; "" if that equals the key."""
        self.count += n
        if self.last != document.number:
            self.last = document.number
            self.documents += 1
        if self.count >= self.example_at:
            self.keep_example(document, literal)

    def keep_example(self, document: _Document, literal: str = "") -> None:
        """Keeps the text around the string as an example, unless this document gave one already; notes the string's frame."""
        text, wanted, at = document.text, 1 if self.key.islower() else 3, -1
        if len(self.examples) < wanted and not (self.examples and self.examples[-1][0] == document.doc_id):
            at, size = text.find(literal or self.key, 0, _SEARCHED), len(literal or self.key)
            if at < 0 and "0" in self.key:  # where digits stand
                at = document.find_digits(self.key)
            if at < 0 and len(text) > _SEARCHED:
                return
            at = max(at, 0)
            excerpt = text[max(0, at - _CONTEXT) : at + min(size, 2 * _CONTEXT) + _CONTEXT]
            self.examples += ((document.doc_id, " ".join(excerpt.split())),)
        if self._around:
            self._note_frame(document, self._around, at)
            self.example_at = max(self.count + 1, int(self.count * _LATER))
        elif len(self.examples) == wanted:
            self.example_at = sys.maxsize

    def _note_frame(self, document: _Document, around: Surroundings, at: int) -> None:
        if around is _lines_around:
            document, at = document.digits_as_0, -1
        at = document.text.rfind(self.key, 0, _SEARCHED) if at < 0 else at
        if at >= 0:
            self.frame = self.frame or Frame()
            self.frame.add(around(document, at, at + len(self.key)), document.shown.at(at, at + len(self.key)))


class Table:
    """Counts strings in bounded memory, by lossy counting (Manku and Motwani 2002): counts are too low by at most `lost`."""

    def __init__(self, limit: int, min_count: int, around: Surroundings | None = None):
        self.limit, self.min_count, self.lost = limit, min_count, 0
        self._around = around
        self.entries: dict[str, Entry] = {}
        self._once: set[str] = set()  # strings seen once: most never recur, so they get no entry yet

    def entry(self, key: str) -> Entry:
        """Returns the entry of a string; makes a new one if there is none."""
        entry = self.entries.get(key)
        if entry is None:
            # Ordinary words stand in sentences: no frame is noted.
            around = None if key.isalpha() and (key.islower() or key.istitle()) else self._around
            entry = self.entries[key] = Entry(key, min(self.min_count, _EXAMPLE_AT), around)
        return entry

    def add(self, key: str, n: int, document: _Document) -> None:
        """Counts a string that occurs `n` times in a document. Call it once for each document."""
        if key not in self.entries:
            if n == 1 and key not in self._once:
                self._once.add(key)
                return
            if key in self._once:
                self._once.remove(key)
                entry = self.entry(key)
                entry.count = entry.documents = 1
        self.entry(key).add(n, document)

    def __len__(self) -> int:
        return len(self.entries) + len(self._once)

    def prune(self) -> None:
        """Keeps the `limit` most frequent strings, without those that tie at the limit, so that their order does not matter."""
        cut = 0
        if len(self) > self.limit:
            cut = 1
            self._once.clear()
        if len(self.entries) > self.limit:
            cut = sorted((entry.count for entry in self.entries.values()), reverse=True)[self.limit]
            self.entries = {key: entry for key, entry in self.entries.items() if entry.count > cut}
        self.lost += cut

    def finish(self) -> None:
        """Drops strings that occur fewer than `min_count` times."""
        self.prune()
        self._once.clear()
        self.entries = {key: entry for key, entry in self.entries.items() if entry.count >= self.min_count}
        for key, entry in self.entries.items():
            entry.chars = entry.chars or entry.count * len(key)


@dataclasses.dataclass
class Counts:
    """How often a source has each junk pattern ("GROUP:label"), word, line and clause (in lines every digit is 0)."""

    source: str
    junk: Table
    words: Table
    lines: Table
    clauses: Table
    outliers: Outliers
    documents: int = 0
    bytes: int = 0
    total_words: int = 0

    @property
    def tables(self) -> tuple[Table, ...]:
        return self.junk, self.words, self.lines, self.clauses


def scan(
    source: str, documents: Iterable[tuple[str, str]], max_entries: int = MAX_ENTRIES, halves: Sequence[str] = HALVES
) -> Counts:
    """Counts a source's (doc_id, text) pairs in one pass; `halves` leaves tables out, for `joined`.

    Memory holds one document and at most `2 * max_entries` strings of each of four kinds, about 150 MB by default; if a
    source has more, the rare ones are dropped, and counts may be too low by `Table.lost`.
    """
    words, lines = (Table(max_entries, _MIN_COUNT, around) for around in (_words_around, _lines_around))
    counts = Counts(source, Table(max_entries, 1), words, lines, Table(max_entries, _MIN_COUNT), Outliers())
    splits: dict[str, tuple[Entry, ...]] = {}
    for number, (doc_id, text) in enumerate(documents, start=1):
        document = _Document(number, doc_id, text)
        counts.documents = number
        counts.bytes += len(text) if text.isascii() else len(text.encode("utf-8", "replace"))
        runs = collections.Counter(text.split())
        if "words" in halves:
            counts.outliers.add(doc_id, text)
            counts.total_words += _count_words(counts.words, runs, splits, document)
        if "lines" in halves:
            _count_junk(counts.junk, max(map(len, runs), default=0), document)
            _count_lines(counts.lines, counts.clauses, document)
        for table in counts.tables:
            if len(table) > 2 * max_entries:
                table.prune()
                splits.clear()  # `splits` holds entries that were pruned
        if len(splits) > 2 * max_entries:
            splits.clear()
    for table in counts.tables:
        table.finish()
    return counts


def joined(words: Counts, lines: Counts) -> Counts:
    """Returns what one scan of the same documents counts, given a scan for each of `HALVES`."""
    return dataclasses.replace(words, junk=lines.junk, lines=lines.lines, clauses=lines.clauses)


def _count_junk(junk: Table, longest: int, document: _Document) -> None:
    """Counts the known junk in a document, whose longest run of characters without spaces is `longest`."""
    for name, group in GROUPS.items():
        for match in group.matches(document.text) if longest >= group.min_run else ():
            entry = junk.entry(f"{name}:{group.label_of(match)}")
            entry.chars += len(match[0])
            entry.add(1, document, match[0])
            entry.frame = entry.frame or Frame()
            entry.frame.add((), document.shown.at(*match.span()))


def _count_words(
    words: Table, runs: collections.Counter[str], splits: dict[str, tuple[Entry, ...]], document: _Document
) -> int:
    """Counts the words in a document's runs of characters without spaces; returns how many words there are."""
    total, number = 0, document.number
    for run, n in runs.items():
        entries = splits.get(run)
        if entries is None:
            entries = splits[run] = tuple(map(words.entry, _split(run))) if len(run) <= 4 * _MAX_WORD else ()
        for entry in entries:  # as Entry.add, without the call: this loop takes the most time
            entry.count += n
            total += n
            if entry.last != number:
                entry.last = number
                entry.documents += 1
            if entry.count >= entry.example_at:
                entry.keep_example(document)
    return total


def _split(run: str) -> list[str]:
    """Splits `(PersonX's` into PersonX, `a<br>b` into a, <br>, b. Marks alone (`====`) are a word of 4 characters at most."""
    words = [part[:-2] if part.endswith(_POSSESSIVES) else part for part in _PARTS.findall(run)]
    if not words and len(run) > 1:
        words = [run[:4]]
    return [word for word in words if len(word) <= _MAX_WORD and not word.isdigit()]


def _count_lines(lines: Table, clauses: Table, document: _Document) -> None:
    """Counts a document's lines, and the clauses between marks in longer lines, with digits as 0."""
    text = document.digits_as_0.text
    whole = collections.Counter(map(str.strip, text.split("\n")))
    for line, n in whole.items():
        if _LINE_CHARS[0] <= len(line) <= _LINE_CHARS[1]:
            lines.add(line, n, document)
    for mark in _MARKS:  # three times as fast as one regular expression
        text = text.replace(mark, "\n")
    for raw, n in collections.Counter(text.split("\n")).items():
        if _CLAUSE_CHARS[0] <= len(raw) <= _CLAUSE_CHARS[1] and raw.count(" ") >= _CLAUSE_SPACES:
            clause = raw.strip()
            if clause not in whole:
                clauses.add(clause, n, document)
