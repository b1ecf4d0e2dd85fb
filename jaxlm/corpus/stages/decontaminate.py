"""Removes documents that hold items of benchmarks, so that benchmark scores mean something.

By n-grams of normalised words, as in GPT-3 (Brown et al. 2020, appendix C); but one shared n-gram is no leak: a document
must hold a share of an item's question or answer.
"""

import collections.abc
import html
import itertools
import json
import math
import pathlib
import re
import unicodedata

import numpy as np

from jaxlm.config import ConfigError
from jaxlm.corpus.benchmarks import layouts, reading
from jaxlm.corpus.benchmarks.layouts import Item
from jaxlm.corpus.dedup.signatures import mix, ngram_hashes
from jaxlm.corpus.stage import Document, Edits, Remove, Settings, Stage

_KEY = "prepare.stages.decontaminate"


class Decontaminate(Stage):
    """Removes documents that hold an item of a benchmark, or the share `coverage` of a long one."""

    inputs = ("paths",)

    @classmethod
    def build(cls, settings: Settings, folder: pathlib.Path) -> list[str]:
        """Writes the index to `folder`. Returns a line for each file. Raises ConfigError if a file has nothing to index."""
        if not settings.paths:
            raise ConfigError("prepare.stages.decontaminate.paths is empty: name the benchmark files (jsonl, parquet)")
        fields, by_file = layouts.named(settings.fields, f"{_KEY}.fields"), {}
        for path in reading.files(settings.paths, f"{_KEY}.paths"):
            by_file[path] = layouts.items(path, fields)
        indexed = _write_index([item for items, _ in by_file.values() for item in items], settings, folder)
        lines, first = [], 0
        for path, (items, of_layouts) in by_file.items():
            first, count = first + len(items), int(indexed[first : first + len(items)].sum())
            if not count:
                raise ConfigError(
                    f"{path}: none of its {len(items):,} items has {settings.min_words} words of its own "
                    f"({_KEY}.min_words, max_items): leave the file out"
                )
            lines.append(f"{path}: {len(items):,} items, {count:,} indexed ({'; '.join(of_layouts)})")
        return lines

    def __init__(self, settings: Settings, folder: pathlib.Path):
        super().__init__(settings, folder)
        self._index = _Index(folder, _sizes(settings))

    def apply(self, document: Document, edits: Edits) -> Remove | None:
        """See `Stage.apply`. The detail names the item and the words that it shares with the document."""
        leak = self._index.find(document.text)
        return leak and Remove(f"contains {leak[0]}", f"{leak[1]}: {leak[2]}")


# Text to words.
_WORDS = re.compile(  # a character of Chinese, Japanese, Korean or Thai is a word, as no spaces part them
    r"[\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W_\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+"
)
_ASCII_WORDS = str.maketrans({chr(c): " " for c in range(128) if not chr(c).isalnum()})
_INVISIBLE = re.compile(
    r"[\u00ad\u034f\u061c\u180b-\u180e\u200b-\u200f\u202a-\u202e\u2060-\u2064\u2066-\u206f\ufe00-\ufe0f\ufeff]+"
)
_ENTITY = re.compile(r"&(?:#\d+|#x[0-9a-fA-F]+|[a-zA-Z]{2,8});")


def normalise(text: str) -> list[str]:
    """Returns a text's words (NFKC) without case, punctuation, invisible characters and HTML escapes."""
    for _ in range(2):  # "&amp;lt;" is escaped twice
        if "&" in text and _ENTITY.search(text):
            text = html.unescape(text)
    if text.isascii():
        return text.lower().translate(_ASCII_WORDS).split()
    text = _INVISIBLE.sub("", text)
    if not unicodedata.is_normalized("NFKC", text):
        text = unicodedata.normalize("NFKC", text)
    return _WORDS.findall(text.casefold())


def _squeezed(text: str) -> str:
    """Removes punctuation inside words, because "Janet's" becomes "Janets" in one corpus and "Janet s" in another."""
    return re.sub(r"(?<=\w)(?:[^\w\s]|_)+(?=\w)", "", html.unescape(text))


# Puts items into the index, and looks documents up in it.
_SIZES = (6, 8, 10)  # of n-grams, for texts too short for `ngram`; looked up one after the other, so few
_HALF_QUESTION = 6  # from twice as many words on, a share of a text is a leak; a shorter text must be there as a whole
_HALF_ANSWER = 8
_NEVER = np.iinfo(np.int64).max
_CONTENT = 2  # different content words that an n-gram needs; 3 where a share of a short text is a leak
_STOP = """about after all also although and any are because been before being best between both but can could did does down
each few following for from get had has have her here him his how if in into is it its just like made make many may me more
most much must my no not number of off on one only or other our out over own part same shall she should so some such
than that the their them then there these they this those through to too two type under until up use used using very
was way we were what when where which while who whom whose why will with would you your return self int str def"""


def _sizes(settings: Settings) -> list[int]:
    return sorted({n for n in (settings.min_words, *_SIZES) if n < settings.ngram} | {settings.ngram})


def _word_hashes(count: int) -> np.ndarray:
    """Returns a 64-bit value for each word's number (splitmix64). Number 0 stands for every word that no item has."""
    return mix(np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))


def _covered(segments: np.ndarray, places: np.ndarray, sizes_S: np.ndarray) -> np.ndarray:
    """Returns, for each segment, how many of its words lie in the n-grams at (segment, place)."""
    gap = np.where(np.diff(segments, append=-1) == 0, np.diff(places, append=0), np.iinfo(np.int64).max)
    return np.bincount(segments, np.minimum(gap, sizes_S[segments]), minlength=len(sizes_S)).astype(np.int64)


def _segments(item: Item, settings: Settings) -> collections.abc.Iterator[tuple[list[str], int]]:
    """Yields (the words of a text that identifies an item, the least length at which the share `coverage` of it is a leak)."""
    for rewrite in (str, _squeezed):
        answers = [normalise(rewrite(answer)) for answer in item.answers]
        for question in (normalise(rewrite(question)) for question in item.questions):
            yield question, 2 * _HALF_QUESTION
            if len(question) >= 2 * settings.ngram:
                continue
            # Half of a short question is no leak, unless an answer follows; a one-word answer counts only for the shortest.
            least = 1 if len(question) < settings.min_words else 2
            yield from ((question + answer, 2 * _HALF_QUESTION) for answer in answers if len(answer) >= least)
        yield from ((answer, 2 * _HALF_ANSWER) for answer in answers if len(answer) >= _HALF_ANSWER)


def _telling(words: list[str], n: int, content: int) -> np.ndarray:
    """Returns the places whose n-gram has `content` different words, not counting numbers, letters and very common words."""
    stop = set(_STOP.split())
    tells = [word if len(word) > word.isascii() and not (word in stop or word.isdigit()) else "" for word in words]
    return np.array([i for i in range(len(words) - n + 1) if len({*tells[i : i + n], ""}) > content], np.int64)


def _texts(items: list[Item], settings: Settings) -> dict[tuple[str, ...], tuple[int, list[int]]]:
    """Returns a text's words -> (least length for a share to be a leak, the items that it tells)."""
    texts: dict[tuple[str, ...], tuple[int, list[int]]] = {}
    for number, item in enumerate(items):
        for words, half in _segments(item, settings):
            # Chinese: a character says half as much as a word.
            dense = 2 * sum(len(word) == 1 and not word.isascii() for word in words) > len(words)
            if len(words) >= settings.min_words * (1 + dense):
                texts.setdefault(tuple(words), (max(half, 2 * settings.ngram * dense), []))[1].append(number)
    return texts


def _write_index(items: list[Item], settings: Settings, folder: pathlib.Path) -> np.ndarray:
    """Writes the sorted n-grams, and how much of a segment is a leak. Returns for each item True if it can be found."""
    texts = _texts(items, settings)
    vocabulary = sorted({word for words in texts for word in words})
    ids = {word: number for number, word in enumerate(vocabulary, 1)}
    x_V, sizes = _word_hashes(len(vocabulary) + 1), _sizes(settings)
    size_S, item_S, halves_S, length_S = np.zeros((4, len(texts)), np.int64)
    keys, places = [np.zeros(0, np.uint64)], [np.zeros((0, 2), np.int64)]
    for segment, (words, (half, numbers)) in enumerate(texts.items()):
        halves = len(words) >= half
        n = max(size for size in sizes if size <= (max(half // 2, (len(words) - 1) // 2) if halves else len(words)))
        (hashes,) = ngram_hashes(x_V[[ids[word] for word in words]], [n])
        place = _telling(words, n, _CONTENT + (halves and n < 10))
        keys.append(hashes[place])
        places.append(np.stack([np.full_like(place, segment), place], axis=1))
        size_S[segment], item_S[segment], halves_S[segment], length_S[segment] = n, numbers[0], halves, len(words)
    key_G, place_G = np.concatenate(keys), np.concatenate(places)
    order = np.lexsort((place_G[:, 1], place_G[:, 0], key_G))
    key_G, place_G = key_G[order], place_G[order]

    # An n-gram that many items share, as of instructions or licences, tells no item. Segments are in the order of items.
    first_G = np.diff(key_G, prepend=~key_G[:1]) != 0
    group_G = np.cumsum(first_G) - 1
    first_of_item_G = first_G | (np.diff(item_S[place_G[:, 0]], prepend=-1) != 0)
    own_G = np.bincount(group_G, first_of_item_G, minlength=1)[group_G] <= settings.max_items
    for notice in NOTICES:
        x_W = x_V[[ids.get(word, 0) for word in normalise(notice)]]
        own_G &= ~np.isin(key_G, np.concatenate(ngram_hashes(x_W, sizes)))
    key_G, place_G = key_G[own_G], place_G[own_G]

    in_order = place_G[np.lexsort((place_G[:, 1], place_G[:, 0]))]
    covered_S = _covered(in_order[:, 0], in_order[:, 1], size_S)
    need_S = np.where(halves_S, np.ceil(settings.coverage * covered_S), covered_S).astype(np.int64)
    need_S[covered_S < np.minimum(settings.ngram, (length_S + 1) // 2)] = _NEVER  # too little of it is its own
    key_K, start_K = np.unique(key_G, return_index=True)
    bits = max(16, math.ceil(math.log2(16 * max(1, len(key_K)))))
    set_B = np.zeros(2**bits, bool)
    set_B[key_K >> np.uint64(64 - bits)] = True

    folder.mkdir(parents=True, exist_ok=True)
    for name, array in (
        ("keys", key_K),
        ("starts", np.append(start_K, len(key_G))),
        ("places", place_G.astype(np.uint32)),
        ("filter", np.packbits(set_B, bitorder="little")),
        ("segments", np.stack([size_S, item_S, need_S], axis=1)),
    ):
        np.save(folder / f"{name}.npy", array)
    (folder / "words.txt").write_text("\n".join(vocabulary), encoding="utf-8")
    (folder / "items.json").write_text(json.dumps([[item.benchmark, item.id] for item in items]), encoding="utf-8")
    findable = (numbers for (_, numbers), need in zip(texts.values(), need_S, strict=True) if need < _NEVER)
    return np.isin(np.arange(len(items)), [*itertools.chain.from_iterable(findable)])


class _Index:
    """The index that `_write_index` wrote, memory-mapped so that the workers of a machine share it."""

    def __init__(self, folder: pathlib.Path, sizes: list[int]):
        names = ("keys", "starts", "places", "filter", "segments")
        arrays = [np.asarray(np.load(folder / f"{name}.npy", mmap_mode="r")) for name in names]
        self.keys, self.starts, self.places, self.filter, self.segments = arrays
        vocabulary = (folder / "words.txt").read_text(encoding="utf-8").split("\n")
        self.ids = {word: number for number, word in enumerate(vocabulary, 1)}
        self.x_V = _word_hashes(len(vocabulary) + 1)
        self.items = json.loads((folder / "items.json").read_text(encoding="utf-8"))
        self.sizes = sizes
        self.shift = np.uint64(64 - int(math.log2(8 * len(self.filter))))

    def find(self, text: str) -> tuple[str, str, str] | None:
        """Returns (benchmark, item, shared words) of the item that leaked most into the text; None if none did."""
        words = normalise(text)
        ids_W = np.fromiter(map(self.ids.get, words, itertools.repeat(0)), np.int64, len(words))
        hits = self._hits(ngram_hashes(self.x_V[ids_W], self.sizes))
        if not len(hits):
            return None
        segment_H, place_H, at_H = hits.T
        size_S, item_S, need_S = self.segments.T
        pairs = np.unique(np.stack([segment_H, place_H], axis=1), axis=0)
        share_S = _covered(pairs[:, 0], pairs[:, 1], size_S) / need_S
        most = int(np.argmax(share_S))
        if share_S[most] < 1:
            return None
        shared = {at + k for at in at_H[segment_H == most] for k in range(size_S[most])}
        return *self.items[item_S[most]], " ".join(words[i] for i in sorted(shared)[:30])

    def _hits(self, hashes: list[np.ndarray]) -> np.ndarray:
        """Returns (segment, place in it, place in the text) of each n-gram that is in the index."""
        hash_W = np.concatenate(hashes)
        bit_W = hash_W >> self.shift
        maybe = np.flatnonzero(self.filter[bit_W >> np.uint64(3)] >> (bit_W & np.uint64(7)).astype(np.uint8) & 1)
        key = np.minimum(np.searchsorted(self.keys, hash_W[maybe]), len(self.keys) - 1)
        known = np.flatnonzero(self.keys[key] == hash_W[maybe]) if len(maybe) else maybe
        starts = np.cumsum([0, *map(len, hashes)])
        places = [
            (segment, place, at - starts[np.searchsorted(starts, at, "right") - 1])
            for at, k in zip(maybe[known], key[known], strict=True)
            for segment, place in self.places[self.starts[k] : self.starts[k + 1]]
        ]
        return np.array(places, np.int64).reshape(-1, 3)


# Licence notices that stand in many files. Words that a benchmark item shares with these are no leak of it.
NOTICES = (
    # MIT
    """Permission is hereby granted, free of charge, to any person obtaining a copy of this software and associated
    documentation files (the "Software"), to deal in the Software without restriction, including without limitation the
    rights to use, copy, modify, merge, publish, distribute, sublicense, and/or sell copies of the Software, and to permit
    persons to whom the Software is furnished to do so, subject to the following conditions: The above copyright notice and
    this permission notice shall be included in all copies or substantial portions of the Software. THE SOFTWARE IS PROVIDED
    "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT NOT LIMITED TO THE WARRANTIES OF
    MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR COPYRIGHT HOLDERS
    BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM,
    OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE.""",
    # BSD
    """Redistribution and use in source and binary forms, with or without modification, are permitted provided that the
    following conditions are met: 1. Redistributions of source code must retain the above copyright notice, this list of
    conditions and the following disclaimer. 2. Redistributions in binary form must reproduce the above copyright notice,
    this list of conditions and the following disclaimer in the documentation and/or other materials provided with the
    distribution. 3. Neither the name of the copyright holder nor the names of its contributors may be used to endorse or
    promote products derived from this software without specific prior written permission. THIS SOFTWARE IS PROVIDED BY THE
    COPYRIGHT HOLDERS AND CONTRIBUTORS "AS IS" AND ANY EXPRESS OR IMPLIED WARRANTIES, INCLUDING, BUT NOT LIMITED TO, THE
    IMPLIED WARRANTIES OF MERCHANTABILITY AND FITNESS FOR A PARTICULAR PURPOSE ARE DISCLAIMED. IN NO EVENT SHALL THE
    COPYRIGHT HOLDER OR CONTRIBUTORS BE LIABLE FOR ANY DIRECT, INDIRECT, INCIDENTAL, SPECIAL, EXEMPLARY, OR CONSEQUENTIAL
    DAMAGES (INCLUDING, BUT NOT LIMITED TO, PROCUREMENT OF SUBSTITUTE GOODS OR SERVICES; LOSS OF USE, DATA, OR PROFITS; OR
    BUSINESS INTERRUPTION) HOWEVER CAUSED AND ON ANY THEORY OF LIABILITY, WHETHER IN CONTRACT, STRICT LIABILITY, OR TORT
    (INCLUDING NEGLIGENCE OR OTHERWISE) ARISING IN ANY WAY OUT OF THE USE OF THIS SOFTWARE, EVEN IF ADVISED OF THE
    POSSIBILITY OF SUCH DAMAGE.""",
    # Apache 2.0
    """Licensed under the Apache License, Version 2.0 (the "License"); you may not use this file except in compliance with the
    License. You may obtain a copy of the License at http://www.apache.org/licenses/LICENSE-2.0 Unless required by applicable
    law or agreed to in writing, software distributed under the License is distributed on an "AS IS" BASIS, WITHOUT
    WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied. See the License for the specific language governing
    permissions and limitations under the License.""",
    # GPL
    """This program is free software; you can redistribute it and/or modify it under the terms of the GNU General Public
    License as published by the Free Software Foundation; either version 2 of the License, or (at your option) any later
    version. This program is distributed in the hope that it will be useful, but WITHOUT ANY WARRANTY; without even the
    implied warranty of MERCHANTABILITY or FITNESS FOR A PARTICULAR PURPOSE. See the GNU General Public License for more
    details. You should have received a copy of the GNU General Public License along with this program; if not, see
    https://www.gnu.org/licenses/""",
)
