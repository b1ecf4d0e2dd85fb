"""Finds strings, and what a text copies, in the documents of a data directory: decodes all tokens and searches their bytes."""

import dataclasses
import hashlib
import itertools
import re
from collections.abc import Callable, Iterator

import numpy as np

from jaxlm.data.shards.shards import SPLITS, DataDir, Document
from jaxlm.data.tokenizer.coder import Coder

_AT_ONCE = 4 << 20  # tokens decoded at a time, or one document
_AROUND = 30  # bytes shown before and after a match
_PROBE, _LEAST = 32, 64  # bytes: what is looked up; the shortest copy
_EXCERPT = 60  # bytes of a copy
_REPEATS = 64
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


@dataclasses.dataclass(frozen=True)
class Copy:
    """A stretch of a text that documents hold verbatim; the first document is named."""

    start: int  # in the text, in bytes
    length: int  # in bytes
    documents: int
    source: str
    split: str
    doc_id: str
    excerpt: str


class Decoder:
    """Decodes ids into bytes, many at a time."""

    def __init__(self, coder: Coder):
        pieces = coder.piece_bytes()
        self._lengths = np.array([len(piece) for piece in pieces])
        self._offsets = np.cumsum(self._lengths) - self._lengths
        self._bytes = np.frombuffer(b"".join(pieces), np.uint8)

    def __call__(self, ids_N: np.ndarray) -> tuple[bytes, np.ndarray]:
        """Returns (the bytes, how many of these the first 0, 1, ..., N ids give)."""
        lengths_N = self._lengths[ids_N]
        ends_N1 = np.concatenate([[0], np.cumsum(lengths_N)])
        index = np.repeat(self._offsets[ids_N] - ends_N1[:-1], lengths_N) + np.arange(ends_N1[-1])
        return self._bytes[index].tobytes(), ends_N1


def tokens(data: DataDir) -> int:
    """Returns how many tokens there are to search."""
    return sum(data.entry(source, split)["tokens"] for source in data.sources for split in SPLITS)


def documents(data: DataDir, source: str, split: str) -> Iterator[tuple[list[Document], np.ndarray]]:
    """Yields (documents that follow one another, their tokens) until the end of a stream."""
    stream = data.stream(source, split)
    for first in range(0, stream.tokens, _AT_ONCE):
        last = min(first + _AT_ONCE, stream.tokens)
        begun = [each for each in data.documents(source, split, first, last) if each.start >= first]
        if begun:
            yield begun, stream.read(begun[0].start, begun[-1].start + begun[-1].tokens)


def matches(data: DataDir, pattern: re.Pattern[bytes], tell: Callable[[int], object]) -> Iterator[Match]:
    """Yields the documents whose bytes match, training text first. `tell` gets the tokens that were searched."""
    decode, done = Decoder(data.tokenizer()), 0
    for split, source in itertools.product(SPLITS, data.sources):
        for group, ids_N in documents(data, source, split):
            raw, ends_N1 = decode(ids_N)
            for each in group:
                at = each.start - group[0].start
                begin, end = int(ends_N1[at]), int(ends_N1[at + each.tokens])
                spans = [match.span() for match in pattern.finditer(raw, begin, end)]
                if spans:
                    near = raw[max(begin, spans[0][0] - _AROUND) : min(end, spans[0][1] + _AROUND)]
                    yield Match(
                        *(source, split, each.doc_id, each.start, each.tokens, len(spans)),
                        " ".join(near.decode("utf-8", "replace").split()),
                        hashlib.sha256(raw[begin:end]).hexdigest(),
                    )
            tell(done := done + len(ids_N))


def copies(data: DataDir, text: bytes, tell: Callable[[int], object]) -> list[Copy]:
    """Returns the stretches of 64 bytes or more that a text copies from documents, longest first, none inside another.

    The decoded documents are cut into probes of 32 bytes, which are looked up among all windows of the text by their hash;
    what is equal grows both ways. A stretch of 63 bytes holds a whole probe, wherever it begins. A window that the text
    repeats more than 64 times, such as spaces, is looked up at its first 64 places.
    """
    if len(text) < _LEAST:
        return []
    windows = _hashes(np.lib.stride_tricks.sliding_window_view(np.frombuffer(text, np.uint8), _PROBE).copy())
    order = np.argsort(windows, kind="stable")
    windows, decode, done = windows[order], Decoder(data.tokenizer()), 0
    where: dict[tuple[int, int], list[tuple[str, str, str]]] = {}  # (start, end) in the text -> documents
    for split, source in itertools.product(SPLITS, data.sources):
        for group, ids_N in documents(data, source, split):
            raw, ends_N1 = decode(ids_N)
            whole = len(raw) // _PROBE * _PROBE
            probes = _hashes(np.frombuffer(raw[:whole], np.uint8).reshape(-1, _PROBE))
            first, last = np.searchsorted(windows, probes), np.searchsorted(windows, probes, side="right")
            begins = ends_N1[[each.start - group[0].start for each in group]]
            grown: dict[int, int] = {}  # place in the documents minus place in the text -> how far it was followed
            for probe in np.flatnonzero(last > first).tolist():
                place = probe * _PROBE
                owner = int(np.searchsorted(begins, place, side="right")) - 1
                begin = int(begins[owner])
                end = int(ends_N1[group[owner].start - group[0].start + group[owner].tokens])
                for at in order[first[probe] : last[probe]][:_REPEATS].tolist():
                    if (
                        place + _PROBE <= grown.get(place - at, 0)
                        or raw[place : place + _PROBE] != text[at : at + _PROBE]
                    ):
                        continue
                    left, right = _grow(raw, text, place, at, begin, end)
                    grown[place - at] = place + right
                    if left + right >= _LEAST:
                        where.setdefault((at - left, at + right), []).append((source, split, group[owner].doc_id))
            tell(done := done + len(ids_N))
    return _outermost(text, where)


def _hashes(windows_Nx32: np.ndarray) -> np.ndarray:
    return (windows_Nx32.view("<u8") * _FACTORS).sum(axis=1, dtype=np.uint64)


def _grow(raw: bytes, text: bytes, place: int, at: int, begin: int, end: int) -> tuple[int, int]:
    """Returns how many equal bytes lie before and from these places of a document [begin, end) and the text."""
    left = right = 0
    while place - left > begin and at - left > 0 and raw[place - left - 1] == text[at - left - 1]:
        left += 1
    while place + right < end and at + right < len(text) and raw[place + right] == text[at + right]:
        right += 1
    return left, right


def _outermost(text: bytes, where: dict[tuple[int, int], list[tuple[str, str, str]]]) -> list[Copy]:
    kept: list[Copy] = []
    for (start, end), holders in sorted(where.items(), key=lambda item: (item[0][0] - item[0][1], item[0])):
        if not any(copy.start <= start and end <= copy.start + copy.length for copy in kept):
            excerpt = " ".join(text[start:end][:_EXCERPT].decode("utf-8", "replace").split())
            kept.append(Copy(start, end - start, len({*holders}), *holders[0], excerpt))
    return kept
