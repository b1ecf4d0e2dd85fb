"""What the audit counts, in one pass and bounded memory: known junk, words, repeated lines and clauses of a source."""

import collections
import dataclasses
import re
from collections.abc import Iterable, Iterator

from jaxlm.corpus.audit_patterns import GROUPS

MAX_ENTRIES = 100_000
_MIN_COUNT = 5
_EXAMPLE_FROM = 3  # a string's count from which on an example is kept
_CONTEXT = 50  # characters on each side
_MAX_WORD = 40  # longer ones are blobs
_LINE_CHARS = range(10, 301)
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
    """How often a string occurs, in how many documents, its characters in all, and examples (document id, context)."""

    __slots__ = ("chars", "count", "documents", "examples", "from_count", "key", "last", "wanted")

    def __init__(self, key: str, from_count: int):
        self.key = key
        self.count = self.documents = self.chars = 0
        self.last = 0  # the last document's number
        self.from_count = from_count  # from which on examples are kept
        self.wanted = 1 if key.islower() else 3  # examples still to be kept
        self.examples: tuple[tuple[str, str], ...] = ()

    def add(self, n: int, literal: str, document: _Document) -> None:
        """Counts `n` times what stands as `literal` in the document."""
        self.count += n
        self.chars += n * len(literal)
        if self.last != document.number:
            self.last = document.number
            self.documents += 1
        if self.wanted and self.count >= self.from_count:
            self._keep_example(literal, document)

    def _keep_example(self, literal: str, document: _Document) -> None:
        if self.examples and self.examples[-1][0] == document.doc_id:
            return
        at = document.text.find(literal)
        excerpt = document.text[max(0, at - _CONTEXT) : at + min(len(literal), 2 * _CONTEXT) + _CONTEXT]
        self.examples += ((document.doc_id, " ".join(excerpt.split())),)
        self.wanted -= 1


class Table:
    """Counts of strings in bounded memory, after the lossy counting of Manku and Motwani (2002).

    Of more than `2 * limit` strings the `limit` most frequent stay; `lost` is the most by which a count may be too low.
    Strings seen fewer than `min_count` times don't count in the end.
    """

    def __init__(self, limit: int, min_count: int):
        self.limit, self.min_count, self.lost = limit, min_count, 0
        self.entries: dict[str, Entry] = {}

    def entry(self, key: str) -> Entry:
        """The entry of a string, a new one if need be."""
        entry = self.entries.get(key)
        if entry is None:
            entry = self.entries[key] = Entry(key, min(self.min_count, _EXAMPLE_FROM))
        return entry

    def prune(self) -> None:
        """Keeps the most frequent, at most `limit`; of ties at the limit all go, so that their order does not matter."""
        if len(self.entries) > self.limit:
            cut = sorted((entry.count for entry in self.entries.values()), reverse=True)[self.limit]
            self.entries = {key: entry for key, entry in self.entries.items() if entry.count > cut}
            self.lost += cut


@dataclasses.dataclass
class Counts:
    """What `scan` found in a source: `junk` by "GROUP:label", the others by the string itself (digits of lines as 0)."""

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

    Memory does not grow with the corpus: at most `2 * max_entries` strings of each of four kinds while reading, and one
    document; afterwards at most `max_entries` that occur five times or more. Where a source has more different strings
    than that, the rare ones drop out, and counts may be too low by `Table.lost`.
    """
    counts = Counts(source, *(Table(max_entries, n) for n in (1, _MIN_COUNT, _MIN_COUNT, _MIN_COUNT)))
    splits: dict[str, tuple[Entry, ...]] = {}
    for number, (doc_id, text) in enumerate(documents, start=1):
        document = _Document(number, doc_id, text)
        counts.documents = number
        counts.bytes += len(text) if text.isascii() else len(text.encode("utf-8", "replace"))
        for name, group in GROUPS.items():
            for match in group.matches(text):
                counts.junk.entry(f"{name}:{group.label_of(match)}").add(1, match[0], document)
        counts.total_words += _count_words(counts.words, splits, document)
        lines = set()
        for line, raw in _lines(text):
            counts.lines.entry(line).add(1, raw, document)
            lines.add(line)
        for clause, raw in _clauses(text):
            if clause not in lines:
                counts.clauses.entry(clause).add(1, raw, document)
        for table in counts.tables:
            if len(table.entries) > 2 * max_entries:
                table.prune()
                splits.clear()  # it holds entries
        if len(splits) > 2 * max_entries:
            splits.clear()
    for table in counts.tables:
        table.prune()
        table.entries = {key: entry for key, entry in table.entries.items() if entry.count >= table.min_count}
    return counts


def _count_words(words: Table, splits: dict[str, tuple[Entry, ...]], document: _Document) -> int:
    """Counts a document's words; returns their number. `splits` remembers which words a run without spaces holds."""
    total = 0
    for run, n in collections.Counter(document.text.split()).items():
        entries = splits.get(run)
        if entries is None:
            entries = splits[run] = tuple(map(words.entry, _split(run))) if len(run) <= 4 * _MAX_WORD else ()
        for entry in entries:
            entry.add(n, entry.key, document)
            total += n
    return total


def _split(run: str) -> list[str]:
    """`(PersonX's` -> PersonX; `a<br>b` -> a, <br>, b; a run of marks alone (`@-@`, `====`) is a word of at most four."""
    words = [part[:-2] if part.endswith(_POSSESSIVES) else part for part in _PARTS.findall(run)]
    if not words and len(run) > 1:
        words = [run[:4]]
    return [word for word in words if len(word) <= _MAX_WORD and not word.isdigit()]


def _lines(text: str, min_spaces: int = 0) -> Iterator[tuple[str, str]]:
    """Each line: digits as 0 and white space as one space, and as it stands."""
    for raw in text.split("\n"):
        if len(raw) in _LINE_CHARS and raw.count(" ") >= min_spaces:
            yield _DIGITS.sub("0", " ".join(raw.split())), raw.strip()


def _clauses(text: str) -> Iterator[tuple[str, str]]:
    """Each stretch of four words or more between marks, as for lines."""
    for mark in _MARKS:  # three times as fast as one regular expression
        text = text.replace(mark, "\n")
    return _lines(text, min_spaces=4)  # three, and the one after the mark
