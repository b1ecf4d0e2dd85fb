"""Finds strings in the documents of a data directory, and what a text copies from them: decodes and searches their tokens.

All tokens, or those of the places where an index (`string_index`) says that the string may be.
"""

import dataclasses
import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from jaxlm.data.shards.shards import SPLITS, DataDir, Document
from jaxlm.data.tokenizer.decoder import Decoder
from jaxlm.host.console import Tell

_AT_ONCE = 1 << 18  # tokens decoded at a time, or one document
_AROUND = 30  # bytes or characters shown before and after a match
_PROBE = 32  # bytes that are looked up
_SHORTEST = 64  # bytes of a copy
_EXCERPT = 60  # bytes of a copy that are shown
_REPEATS = 64
BETWEEN = b"\xff"  # parts texts that are looked up together: no document holds it, since UTF-8 has no such byte
Group = tuple[str, str, list[Document], np.ndarray]  # source, split, documents that follow one another, their tokens
Ranges = Sequence[tuple[int, int]]  # of tokens of a stream, each of whole documents
Places = Mapping[tuple[str, str], Ranges]  # (source, split) -> ranges
_FACTORS = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93], np.uint64)


@dataclasses.dataclass(frozen=True)
class Match:
    """A document that holds the string. `start` and `tokens` are its place in the source's stream, separator included."""

    source: str
    split: str
    doc_id: str
    start: int
    tokens: int
    times: int  # without overlaps
    excerpt: str  # around the first
    sha256: str  # of the decoded text


@dataclasses.dataclass
class Copy:
    """A stretch of a text that documents hold verbatim; the first document is named."""

    start: int  # in the text, in bytes
    length: int  # in bytes
    documents: int
    source: str
    split: str
    doc_id: str
    excerpt: str

    @property
    def end(self) -> int:
        return self.start + self.length


def tokens_to_search(data: DataDir) -> int:
    return sum(data.entry(source, split)["tokens"] for source in data.sources for split in SPLITS)


def streams(data: DataDir) -> list[tuple[str, str]]:
    """Returns (source, split) of all streams, training text first."""
    return [(source, split) for split, source in itertools.product(SPLITS, data.sources)]


def texts(data: DataDir, places: Places | None = None) -> Iterator[Group]:
    """Yields all documents, or those of the places, stream by stream."""
    for stream in streams(data):
        yield from documents(data, *stream, None if places is None else places.get(stream, ()))


def documents(data: DataDir, source: str, split: str, ranges: Ranges | None = None) -> Iterator[Group]:
    """Yields documents that follow one another with their tokens, of a stream or of ranges of its tokens."""
    stream = data.stream(source, split)
    for start, stop in [(0, stream.tokens)] if ranges is None else ranges:
        for first in range(start, stop, _AT_ONCE):
            begun = data.documents(source, split, first, min(first + _AT_ONCE, stop))
            if group := [each for each in begun if each.start >= first]:
                yield source, split, group, stream.read(group[0].start, group[-1].start + group[-1].tokens)


def each_document(data: DataDir, source: str, split: str) -> Iterator[tuple[Document, np.ndarray]]:
    """Yields (a document, its tokens) until the end of a stream."""
    for *_, group, ids_N in documents(data, source, split):
        for each in group:
            at = each.start - group[0].start
            yield each, ids_N[at : at + each.tokens]


def matches(texts: Iterable[Group], decode: Decoder, pattern: re.Pattern, tell: Tell) -> Iterator[Match]:
    """Yields the documents that match, in their bytes or, for a pattern of str, their text.

    `tell` gets the number of tokens that were searched.
    """
    done = 0
    for source, split, group, ids_N in texts:
        raw, ends_N1 = decode(ids_N)
        for each in group:
            at = each.start - group[0].start
            # A view, since `pos` of `finditer` would let ^ and look-behind see the document before.
            content = memoryview(raw)[int(ends_N1[at]) : int(ends_N1[at + each.tokens])]
            text = content if isinstance(pattern.pattern, bytes) else str(content, "utf-8", "replace")
            spans = [match.span() for match in pattern.finditer(text)]
            if spans:
                near = text[max(0, spans[0][0] - _AROUND) : spans[0][1] + _AROUND]
                words = near if isinstance(near, str) else str(near, "utf-8", "replace")
                place = source, split, each.doc_id, each.start, each.tokens
                yield Match(*place, len(spans), " ".join(words.split()), hashlib.sha256(content).hexdigest())
        tell(done := done + len(ids_N))


def copies(texts: Iterable[Group], decode: Decoder, text: bytes, tell: Tell) -> list[Copy]:
    """Returns the stretches of 64 bytes or more that a text copies from documents, longest first, none inside another.

    The decoded documents are cut into probes of 32 bytes, which are looked up among all windows of the text by their hash;
    what is equal grows both ways. A stretch of 63 bytes holds a whole probe, wherever it begins. Several texts are joined by
    `BETWEEN`. What one of them repeats is looked up at few places: see `_windows`.
    """
    if len(text) < _SHORTEST:
        return []
    text_C, done = np.frombuffer(text, np.uint8), 0
    hashes, starts = _windows(text_C)
    copied: dict[tuple[int, int], Copy] = {}
    for source, split, group, ids_N in texts:
        raw, ends_N1 = decode(ids_N)
        raw_C = np.frombuffer(raw, np.uint8)
        probes = _hashes(raw_C[: len(raw) // _PROBE * _PROBE].reshape(-1, _PROBE))
        first, last = (np.searchsorted(hashes, probes, side=side) for side in ("left", "right"))
        begins = ends_N1[[each.start - group[0].start for each in group] + [len(ids_N)]]
        grown: dict[int, int] = {}  # place in the documents minus place in the text -> how far it was followed
        counted = set()  # (stretch of the text, document)
        for probe in np.flatnonzero(last > first).tolist():
            place = probe * _PROBE
            owner = int(np.searchsorted(begins, place, side="right")) - 1
            for at in starts[first[probe] : last[probe]].tolist():
                if place + _PROBE <= grown.get(place - at, 0):
                    continue
                left = _equal(raw_C[begins[owner] : place][::-1], text_C[:at][::-1])
                right = _equal(raw_C[place : begins[owner + 1]], text_C[at:])
                grown[place - at] = place + right
                stretch = at - left, at + right
                if right >= _PROBE and left + right >= _SHORTEST and (stretch, owner) not in counted:
                    counted.add((stretch, owner))
                    words = " ".join(str(text[slice(*stretch)][:_EXCERPT], "utf-8", "replace").split())
                    new = Copy(stretch[0], left + right, 0, source, split, group[owner].doc_id, words)
                    copied.setdefault(stretch, new).documents += 1
        tell(done := done + len(ids_N))
    outermost: list[Copy] = []
    for copy in sorted(copied.values(), key=lambda copy: (-copy.length, copy.start)):
        if not any(long.start <= copy.start and copy.end <= long.end for long in outermost):
            outermost.append(copy)
    return outermost


def _windows(text_C: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the hashes of a text's windows of 32 bytes, sorted, and where each begins.

    Of a run of one character only the first window, of another window at most 64 places in each of the joined texts.
    """
    hashes = _hashes(np.lib.stride_tricks.sliding_window_view(text_C, _PROBE).copy())
    starts = np.flatnonzero(np.insert(hashes[1:] != hashes[:-1], 0, True))
    hashes, part = hashes[starts], np.cumsum(text_C == BETWEEN[0])[starts]
    order = np.lexsort((part, hashes))  # stable
    hashes, part, starts = hashes[order], part[order], starts[order]
    few = np.ones(len(starts), bool)
    few[_REPEATS:] = (hashes[_REPEATS:] != hashes[:-_REPEATS]) | (part[_REPEATS:] != part[:-_REPEATS])
    return hashes[few], starts[few]


def _hashes(windows_Nx32: np.ndarray) -> np.ndarray:
    return (windows_Nx32.view("<u8") * _FACTORS).sum(axis=1, dtype=np.uint64)


def _equal(a_C: np.ndarray, b_C: np.ndarray) -> int:
    """Returns how many bytes are equal at the beginning."""
    size, last = min(len(a_C), len(b_C)), _PROBE
    while not (differs := a_C[: min(last, size)] != b_C[: min(last, size)]).any() and last < size:
        last *= 2
    return int(differs.argmax()) if differs.any() else size
