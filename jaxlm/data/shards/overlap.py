"""Finds a model's texts in the training data, by ids: verbatim runs of at least `SEED` tokens."""

from collections.abc import Callable, Sequence

import numpy as np

from jaxlm.corpus.dedup.signatures import ngram_hashes
from jaxlm.data.shards.shards import DataDir

SEED = 8  # tokens of the shortest run that is found
_CHUNK = 1 << 20  # tokens read at a time
_BITS = 20  # of the table that says which places to look at
_MIX = np.uint64(0x9E3779B97F4A7C15)


def runs(
    data: DataDir, texts: Sequence[Sequence[int]], most: int = 0, tell: Callable[[int], None] = lambda done: None
) -> list[np.ndarray]:
    """Returns for each token the length of the longest run that begins there and is in the training data, int32[tokens].

    Runs under `SEED` count as 0. `texts` are ids without ends of documents; reads `most` tokens (0 = all), from each
    source in proportion.
    """
    search = Found(texts)
    counts, done = data.token_counts(), 0
    whole = sum(counts.values())
    for source, tokens in counts.items():
        stream = data.stream(source)
        end = tokens * most // whole if 0 < most < whole else tokens
        for start in range(0, end, _CHUNK):
            stop = min(start + _CHUNK, end)
            search.look(stream.read(start, min(stop + search.longest, end)))
            tell(done + stop)
        done += end
    return search.runs


class Found:
    """Looks for runs of some texts in pieces of other text; `runs` has the longest so far."""

    def __init__(self, texts: Sequence[Sequence[int]]):
        self._texts = [np.asarray(text, np.int64) for text in texts]
        self.runs = [np.zeros(len(text), np.int32) for text in self._texts]
        self.longest = max(map(len, self._texts), default=0)
        self._places: dict[int, list[tuple[int, int]]] = {}  # hash of a run of SEED tokens -> (text, where it begins)
        self._wanted = np.zeros(1 << _BITS, bool)
        self._seen: set[bytes] = set()
        for number, text in enumerate(self._texts):
            hashes = _hashes(text)
            self._wanted[_slots(hashes)] = True
            for start, value in enumerate(hashes.tolist()):
                self._places.setdefault(value, []).append((number, start))
        self._known = np.sort(np.fromiter(self._places, np.uint64, len(self._places)))

    def look(self, piece: np.ndarray) -> None:
        """Records the runs that are in a piece of text, int[tokens]."""
        hashes = _hashes(piece)
        hits = np.flatnonzero(self._wanted[_slots(hashes)])
        hits = hits[np.isin(hashes[hits], self._known)]
        # A run of n tokens is n - SEED + 1 hits in a row.
        for group in np.split(hits, np.flatnonzero(np.diff(hits) > 1) + 1) if len(hits) else ():
            end = int(group[-1]) + SEED
            for place, value in zip(group.tolist(), hashes[group].tolist(), strict=True):
                same = np.asarray(piece[place : min(place + self.longest, end)], np.int32)
                if (key := same.tobytes()) not in self._seen:  # a million equal tokens are compared once
                    self._seen.add(key)
                    self._compare(value, same)

    def _compare(self, value: int, same: np.ndarray) -> None:
        """Records the runs at the beginning of the text `same`; `value` is the hash of its first `SEED` tokens."""
        for number, start in self._places[value]:
            text, longest = self._texts[number], self.runs[number]
            limit = min(len(text) - start, len(same))
            if limit > longest[start]:
                differ = np.flatnonzero(text[start : start + limit] != same[:limit])
                length = int(differ[0]) if len(differ) else limit
                if length >= SEED:  # fewer only if two hashes are equal by chance
                    longest[start] = max(longest[start], length)


def longest(runs_T: np.ndarray) -> int:
    """Returns the length of a text's longest run, by its array from `runs`; 0 if it is shorter than `SEED`."""
    return int(runs_T.max(initial=0))


def share(runs_T: np.ndarray, least: int) -> float:
    """Returns the share of a text's tokens that are in runs of at least `least` tokens; 0 for a text without tokens."""
    covered = np.zeros(len(runs_T), bool)
    for start in np.flatnonzero(runs_T >= least):
        covered[start : start + runs_T[start]] = True
    return float(covered.mean()) if len(covered) else 0.0


def _hashes(ids: np.ndarray) -> np.ndarray:
    """Returns a hash of the SEED tokens from each place on, uint64[tokens - SEED + 1]."""
    return ngram_hashes(np.asarray(ids).astype(np.uint64) + np.uint64(1), [SEED])[0]


def _slots(hashes: np.ndarray) -> np.ndarray:
    return ((hashes ^ hashes >> np.uint64(31)) * _MIX >> np.uint64(64 - _BITS)).astype(np.intp)
