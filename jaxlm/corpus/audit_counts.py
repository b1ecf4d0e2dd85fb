"""Counts known junk, words, repeated lines and clauses of a source for the audit, in one pass and bounded memory."""

import collections
import dataclasses
import re
import sys
from collections.abc import Iterable

from jaxlm.corpus.audit_patterns import GROUPS

MAX_ENTRIES = 50_000
_MIN_COUNT = 5
_EXAMPLE_AT = 3  # a string's count from which on examples are kept
_CONTEXT = 50  # characters on each side
_MAX_WORD = 40  # longer ones are blobs
_LINE_CHARS = (10, 300)
_CLAUSE_CHARS = (20, 300)
_CLAUSE_SPACES = 4  # between four words, and the one after the mark
_CJK = "\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
# In a run of characters without spaces: <tag>, [NAME], Chinese or Japanese, a word with its apostrophe.
_PARTS = re.compile(rf"</?[\w|.:-]{{1,40}}/?>|\[/?[A-Za-z_]{{2,30}}\]|[{_CJK}]+|[^\W{_CJK}]+(?:['\u2019][^\W{_CJK}]+)?")
_MARKS = '.,;:!?()"\u201c\u201d|'  # where a clause ends
_DIGITS = re.compile(r"\d+")
_POSSESSIVES = ("'s", "\u2019s")


@dataclasses.dataclass(frozen=True, slots=True)
class _Document:
    number: int  # within its source
    doc_id: str
    text: str


class Entry:
    """How often a string occurs, in how many documents, with how many characters, and examples as (document id, context)."""

    __slots__ = ("chars", "count", "documents", "example_at", "examples", "key", "last")

    def __init__(self, key: str, example_at: int):
        self.key = key
        self.count = self.documents = self.chars = 0
        self.last = 0  # the last document's number
        self.example_at = example_at  # the count from which on an example is kept
        self.examples: tuple[tuple[str, str], ...] = ()

    def add(self, n: int, document: _Document, literal: str = "") -> None:
        """Counts a string that occurs `n` times in the document. `literal` is its form there; "" if that equals the key."""
        self.count += n
        if self.last != document.number:
            self.last = document.number
            self.documents += 1
        if self.count >= self.example_at:
            self.keep_example(document, literal)

    def keep_example(self, document: _Document, literal: str = "") -> None:
        """Keeps the text around the string as an example, unless this document gave one already."""
        if self.examples and self.examples[-1][0] == document.doc_id:
            return
        start, size = document.text.find(literal or self.key), len(literal or self.key)
        if start < 0:  # digits stand as 0 in the key
            match = re.search(re.escape(self.key).replace("0", r"\d+"), document.text)
            start = match.start() if match else 0
        excerpt = document.text[max(0, start - _CONTEXT) : start + min(size, 2 * _CONTEXT) + _CONTEXT]
        self.examples += ((document.doc_id, " ".join(excerpt.split())),)
        if len(self.examples) == (1 if self.key.islower() else 3):
            self.example_at = sys.maxsize


class Table:
    """Counts strings in bounded memory, after the lossy counting of Manku and Motwani (2002).

    If there are more than `2 * limit` strings, the `limit` most frequent stay. A count may be too low by `lost` at
    most. At the end, strings seen fewer than `min_count` times are dropped.
    """

    def __init__(self, limit: int, min_count: int):
        self.limit, self.min_count, self.lost = limit, min_count, 0
        self.entries: dict[str, Entry] = {}
        self._once: set[str] = set()  # most lines never come back: an entry is for those that do

    def entry(self, key: str) -> Entry:
        """Returns the entry of a string; makes a new one if there is none."""
        entry = self.entries.get(key)
        if entry is None:
            entry = self.entries[key] = Entry(key, min(self.min_count, _EXAMPLE_AT))
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
        """Keeps the `limit` most frequent strings.

        If strings tie at the limit, none of them stays, so that their order does not matter.
        """
        cut = 0
        if len(self) > self.limit:
            cut = 1
            self._once.clear()
        if len(self.entries) > self.limit:
            cut = sorted((entry.count for entry in self.entries.values()), reverse=True)[self.limit]
            self.entries = {key: entry for key, entry in self.entries.items() if entry.count > cut}
        self.lost += cut

    def finish(self) -> None:
        """Drops strings that are too rare."""
        self.prune()
        self._once.clear()
        self.entries = {key: entry for key, entry in self.entries.items() if entry.count >= self.min_count}
        for key, entry in self.entries.items():
            entry.chars = entry.chars or entry.count * len(key)


@dataclasses.dataclass
class Counts:
    """How often a source has each junk pattern, word, line and clause, as counted by `scan`.

    The keys of `junk` are "GROUP:label". The keys of the other tables are the words, lines and clauses themselves (in
    lines every digit is 0).
    """

    source: str
    junk: Table
    words: Table
    lines: Table
    clauses: Table
    documents: int = 0
    bytes: int = 0
    total_words: int = 0

    @property
    def tables(self) -> tuple[Table, ...]:
        return self.junk, self.words, self.lines, self.clauses


def scan(source: str, documents: Iterable[tuple[str, str]], max_entries: int = MAX_ENTRIES) -> Counts:
    """Counts a source's (doc_id, text) pairs in one pass.

    Memory does not grow with the corpus. While reading, memory holds one document and at most `2 * max_entries` strings
    of each of four kinds; afterwards at most `max_entries` strings that occur five times or more. If a source has more
    different strings, the rare ones are dropped, and counts may be too low by `Table.lost`. With the default, scanning
    takes at most about 150 MB, and each finished source a few megabytes.
    """
    counts = Counts(source, *(Table(max_entries, n) for n in (1, _MIN_COUNT, _MIN_COUNT, _MIN_COUNT)))
    splits: dict[str, tuple[Entry, ...]] = {}
    for number, (doc_id, text) in enumerate(documents, start=1):
        document = _Document(number, doc_id, text)
        counts.documents = number
        counts.bytes += len(text) if text.isascii() else len(text.encode("utf-8", "replace"))
        runs = collections.Counter(text.split())
        longest = max(map(len, runs), default=0)
        for name, group in GROUPS.items():
            for match in group.matches(text) if longest >= group.min_run else ():
                entry = counts.junk.entry(f"{name}:{group.label_of(match)}")
                entry.chars += len(match[0])
                entry.add(1, document, match[0])
        counts.total_words += _count_words(counts.words, runs, splits, document)
        _count_lines(counts.lines, counts.clauses, document)
        for table in counts.tables:
            if len(table) > 2 * max_entries:
                table.prune()
                splits.clear()  # it holds entries
        if len(splits) > 2 * max_entries:
            splits.clear()
    for table in counts.tables:
        table.finish()
    return counts


def _count_words(
    words: Table, runs: collections.Counter[str], splits: dict[str, tuple[Entry, ...]], document: _Document
) -> int:
    """Counts the words in a document's runs of characters without spaces; returns how many words there are.

    `splits` remembers which words a run holds.
    """
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
    """Splits `(PersonX's` into PersonX, `a<br>b` into a, <br>, b.

    Marks alone (`@-@`, `====`) are a word of at most four.
    """
    words = [part[:-2] if part.endswith(_POSSESSIVES) else part for part in _PARTS.findall(run)]
    if not words and len(run) > 1:
        words = [run[:4]]
    return [word for word in words if len(word) <= _MAX_WORD and not word.isdigit()]


def _count_lines(lines: Table, clauses: Table, document: _Document) -> None:
    """Counts a document's lines, and the clauses between marks in longer lines, with digits as 0."""
    text = _DIGITS.sub("0", document.text)
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
