"""Finds strings in the documents of a data directory: decodes all tokens and searches their bytes, document by document."""

import dataclasses
import hashlib
import re
import typing
from collections.abc import Callable, Iterator

import numpy as np

from jaxlm.data.shards.shards import Document
from jaxlm.data.tokenizer.coder import Coder

if typing.TYPE_CHECKING:
    from jaxlm.data.shards.shards import DataDir

_AT_ONCE = 4 << 20  # tokens decoded at a time, or one document
_AROUND = 30  # bytes shown before and after a match


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


def documents(data: "DataDir", source: str, split: str) -> Iterator[tuple[list[Document], np.ndarray]]:
    """Yields (documents that follow one another, their tokens) until the end of a stream."""
    stream = data.stream(source, split)
    for first in range(0, stream.tokens, _AT_ONCE):
        last = min(first + _AT_ONCE, stream.tokens)
        begun = [each for each in data.documents(source, split, first, last) if each.start >= first]
        if begun:
            yield begun, stream.read(begun[0].start, begun[-1].start + begun[-1].tokens)


def matches(data: "DataDir", pattern: re.Pattern[bytes], tell: Callable[[int], object]) -> Iterator[Match]:
    """Yields the documents whose bytes match, training text first. `tell` gets the tokens that were searched."""
    decode, done = Decoder(data.tokenizer()), 0
    for split, source in ((split, source) for split in ("train", "val") for source in data.sources):
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
