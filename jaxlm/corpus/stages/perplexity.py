"""Removes text that surprises a language model too much (debris) or not at all (boilerplate), as CCNet does
(arXiv:1911.00359). Measured in bits per byte, so that models of different vocabularies can be compared.

The model is a byte n-gram trained here from a folder of good text, a KenLM file (github.com/kpu/kenlm), or any function by
name, such as one that loads a jaxlm checkpoint.
"""

import collections
import collections.abc
import importlib
import json
import math
import pathlib

import numpy as np

from jaxlm.config import ConfigError
from jaxlm.config.stages import PerplexitySettings
from jaxlm.corpus.sources.plain import iterate_documents
from jaxlm.corpus.stage import Document, Remove, Stage

Scorer = collections.abc.Callable[[str], float]  # text -> bits per byte

ORDER = 6  # bytes of an n-gram
_BITS = 21  # 2^21 slots of 4 bytes for n-grams and as many for contexts, per order: a file of 100 MB
_DISCOUNT = 0.9  # of each count; .75 and Witten-Bell smoothing were 1 and 2% worse on text left out
_MIN_BYTES = 10_000
_MAX_BYTES = 1 << 24  # of reference read; beyond it the slots fill up
_MIX = np.uint64(0x9E3779B97F4A7C15)
_WHERE = "prepare.stages.perplexity"
_MOVED = {"jaxlm.programs.restored:bits_per_byte": "jaxlm.eval.scorer:bits_per_byte"}  # documented scorers, by old name


class Perplexity(Stage):
    """Writes metadata["bits_per_byte"], and removes documents outside the limits."""

    inputs = ("reference", "model", "pieces")

    def __init__(self, settings: PerplexitySettings, folder: pathlib.Path):
        super().__init__(settings, folder)
        self._score = _make(settings, folder)

    @classmethod
    def build(cls, settings: PerplexitySettings, folder: pathlib.Path) -> None:
        s = settings
        if sum(map(bool, (s.reference, s.model, s.scorer))) != 1:
            raise ConfigError(
                f"{_WHERE}: set one of reference (a folder of good text), model (a KenLM file) and scorer"
            )
        if s.reference:
            train(s.reference, folder)
        else:
            _make(s, folder)

    def apply(self, document: Document, edits: collections.Counter[str]) -> Remove | None:
        s = self.settings
        bits = self._score(document.text[: s.chars])
        document.metadata["bits_per_byte"] = round(bits, 4)
        if s.max_bits_per_byte and bits > s.max_bits_per_byte:
            return Remove("high perplexity", f"bits per byte={bits:.3f}, max={s.max_bits_per_byte}")
        if bits < s.min_bits_per_byte:
            return Remove("low perplexity", f"bits per byte={bits:.3f}, min={s.min_bits_per_byte}")
        return None


def _make(s: PerplexitySettings, folder: pathlib.Path) -> Scorer:
    if s.model:
        return kenlm_scorer(s.model, s.pieces)
    if s.reference:
        return load(folder)
    path, _, argument = s.scorer.partition(" ")
    path = _MOVED.get(path, path)
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)(argument)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{_WHERE}.scorer={s.scorer!r}: {error}; write MODULE:FUNCTION ARGUMENT") from error


def kenlm_scorer(path: str, pieces: str) -> Scorer:
    """Returns a scorer of a KenLM .arpa or .binary file: text -> bits per byte.

    `pieces` is the SentencePiece model that the KenLM's training text was split with; "" = split at white space.
    """
    try:
        import kenlm
    except ImportError as error:
        raise ConfigError(f"{_WHERE}.model needs KenLM: pip install kenlm, or set reference= instead") from error
    try:
        model = kenlm.Model(str(pathlib.Path(path).expanduser()))
    except OSError as error:
        raise ConfigError(f"{_WHERE}.model={path}: {error}; give a KenLM .arpa or .binary file") from error
    split = str.split
    if pieces:
        import sentencepiece

        try:
            tokenizer = sentencepiece.SentencePieceProcessor(model_file=pieces)
        except (OSError, RuntimeError) as error:
            raise ConfigError(f"{_WHERE}.pieces={pieces} is no SentencePiece model: {error}") from error

        def split(line):
            return tokenizer.encode(line, out_type=str)

    def score(text: str) -> float:
        lines = [line for line in text.split("\n") if line.strip()]
        log10 = sum(model.score(" ".join(split(line))) for line in lines)
        return -log10 * math.log2(10) / max(sum(len(line.encode("utf-8", "replace")) + 1 for line in lines), 1)

    return score


def train(reference: str, folder: pathlib.Path) -> dict:
    """Counts the byte n-grams of nine tenths of the reference, measures the other tenth, and writes both to `folder`.

    Smoothing is interpolated Kneser-Ney (Chen and Goodman 1998): an n-gram shorter than ORDER counts once for each byte
    that it came after. Deterministic.

    Args:
      reference: the path of a source, as in `jaxlm.corpus.sources`.
      folder: the folder to write ngrams.npy and perplexity.json to.

    Returns:
      The content of perplexity.json: quantiles of bits per byte over the documents of the last tenth, from which to
        choose limits.
    """
    try:
        texts = [text for _, text in iterate_documents(reference, max_bytes=_MAX_BYTES)]
    except ConfigError as error:
        raise ConfigError(f"{_WHERE}.reference: {error}") from error
    held_out = texts[9::10] or texts[-1:]
    stream = "\n\n".join(text for i, text in enumerate(texts) if i % 10 != 9).encode()
    if len(stream) < _MIN_BYTES:
        raise ConfigError(f"{_WHERE}.reference={reference} holds {len(stream)} bytes; give {_MIN_BYTES} or more")
    keys = _keys(stream)
    table = np.zeros((ORDER, 2, 1 << _BITS), np.uint32)
    for k in range(ORDER):
        grams, times = np.unique(
            keys[k] if k == ORDER - 1 else _suffixes(np.unique(keys[k + 1]), k), return_counts=True
        )
        contexts, first, kinds = np.unique(grams >> np.uint64(8), return_index=True, return_counts=True)
        totals = np.add.reduceat(times, first)
        _store(table[k, 0], grams, (times - _DISCOUNT) / np.repeat(totals, kinds), times)
        _store(table[k, 1], contexts, _DISCOUNT * kinds / totals, totals)
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "ngrams.npy", table)
    score = load(folder)
    bits = np.quantile([score(text[:100_000]) for text in held_out], [0.01, 0.05, 0.5, 0.95, 0.99])
    report = {"bytes": len(stream), "documents": len(texts), "held_out": len(held_out), "order": ORDER}
    report["bits_per_byte"] = {f"p{p}": round(float(b), 4) for p, b in zip((1, 5, 50, 95, 99), bits, strict=True)}
    (folder / "perplexity.json").write_text(json.dumps(report, indent=1) + "\n")
    return report


def load(folder: pathlib.Path) -> Scorer:
    """Returns the scorer that `train` saved. Processes of one machine share its memory. Raises ConfigError."""
    try:
        table = np.load(folder / "ngrams.npy", mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"no n-gram model in {folder} ({error}); prepare builds it from {_WHERE}.reference"
        ) from error

    def score(text: str) -> float:
        data = text.encode("utf-8", "replace")
        if not data:
            return 0.0
        probabilities = np.full(len(data), 1 / 256, np.float32)
        for k, keys in enumerate(_keys(data)):
            counted = _look_up(table[k, 0], keys, 0.0)
            probabilities = counted + _look_up(table[k, 1], keys >> np.uint64(8), 1.0) * probabilities
        return float(-np.log2(probabilities).mean())

    return score


def _keys(data: bytes) -> list[np.ndarray]:
    """[bytes] for each order 1..ORDER: the byte in the lowest place, those before it above, and a bit to end them."""
    stream = np.frombuffer(b"\n" * (ORDER - 1) + data, np.uint8).astype(np.uint64)
    keys, packed = [], np.zeros(len(data), np.uint64)
    for k in range(ORDER):
        packed = packed | stream[ORDER - 1 - k : len(stream) - k] << np.uint64(8 * k)
        keys.append(packed | np.uint64(1 << 8 * (k + 1)))
    return keys


def _suffixes(keys: np.ndarray, k: int) -> np.ndarray:
    """Returns the last k + 1 bytes of keys of k + 2."""
    end = np.uint64(1 << 8 * (k + 1))
    return keys & (end - np.uint64(1)) | end


def _slots(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns each key's slot, and in the upper 16 bits a mark that tells it from others in that slot.

    Never 0 (= empty).
    """
    mixed = (keys ^ keys >> np.uint64(29)) * _MIX
    marks = (mixed >> np.uint64(12)).astype(np.uint32) | np.uint32(1)
    return (mixed >> np.uint64(64 - _BITS)).astype(np.intp), marks << np.uint32(16)


def _store(slots: np.ndarray, keys: np.ndarray, shares: np.ndarray, times: np.ndarray) -> None:
    """Writes shares as float16 beside their marks. Of the keys that meet in a slot, the most frequent one stays."""
    order = np.argsort(times, kind="stable")
    places, marks = _slots(keys[order])
    shares = np.maximum(shares[order], 1e-7)  # float16 has nothing smaller, and a probability of 0 costs infinite bits
    slots[places] = marks | shares.astype(np.float16).view(np.uint16)


def _look_up(slots: np.ndarray, keys: np.ndarray, missing: float) -> np.ndarray:
    places, marks = _slots(keys)
    found = slots[places]
    shares = found.astype(np.uint16).view(np.float16).astype(np.float32)
    return np.where(found & np.uint32(0xFFFF0000) == marks, shares, np.float32(missing))
