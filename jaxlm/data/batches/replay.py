"""Pretraining text between examples, so that the model forgets less: pieces of a fixed length, of which every target counts."""

import hashlib
import itertools
import pathlib

import numpy as np

from jaxlm.config import ConfigError
from jaxlm.corpus.sources.base import SourceStats
from jaxlm.corpus.sources.units import iterate_documents
from jaxlm.data.batches import document_rows, pack_examples
from jaxlm.data.shards import mixture, shards
from jaxlm.data.shards.manifest import MANIFEST
from jaxlm.data.shards.verify import Verifier
from jaxlm.data.tokenizer import ids
from jaxlm.data.tokenizer.coder import Coder

_LEAST = 128  # tokens of a piece, if a row has that many: fewer are too little context
_MOST_BYTES = 64 << 20  # of text files, which are held in memory
_CHUNK = 512  # documents encoded at a time
NAME = "replay"


class FileText:
    """Text files, encoded in memory: one source, `NAME`. Has the same interface as a data directory."""

    def __init__(self, tokenizer: Coder, train: np.ndarray, val: np.ndarray):
        self.mixture, self.separator_id = {NAME: 1.0}, tokenizer.separator_id
        self.sha256 = hashlib.sha256(train.tobytes() + b"/" + val.tobytes()).hexdigest()
        self.verifier = Verifier(pathlib.Path())  # of no files: they are read already
        self._tokenizer, self._splits = tokenizer, {"train": train, "val": val}

    def token_counts(self, split: str = "train") -> dict[str, int]:
        return {NAME: len(self._splits[split])}

    def stream(self, source: str, split: str = "train") -> "_Held":
        assert source == NAME
        return _Held(self._splits[split])

    def token_bytes(self) -> np.ndarray:
        return self._tokenizer.token_bytes()


class _Held:
    """A stream in memory."""

    def __init__(self, ids_N: np.ndarray):
        self._ids_N, self.tokens = ids_N, len(ids_N)

    def read(self, start: int, stop: int) -> np.ndarray:
        return self._ids_N[start:stop]


Text = shards.DataDir | FileText


def open_text(path: str, tokenizer: Coder, *, text_key: str, val_fraction: float) -> Text:
    """Opens a data directory, or text files (64 MB at most, `val_fraction` of the documents held out).

    Raises ConfigError if there is no text, or the data directory has another tokenizer.
    """
    if (pathlib.Path(path) / MANIFEST).is_file():
        data = shards.open_data(path)
        own = data.tokenizer()
        if tokenizer.piece_bytes()[: own.vocab_size] != own.piece_bytes() or tokenizer.separator_id != own.separator_id:
            raise ConfigError(f"data in {path} has another tokenizer: set replay.path to its text, or replay.share=0")
        return data
    return _of_files(path, tokenizer, text_key, val_fraction)


def _of_files(path: str, tokenizer: Coder, text_key: str, val_fraction: float) -> FileText:
    documents = iterate_documents(path, text_key=text_key, tfds_dir=None, max_bytes=_MOST_BYTES, stats=SourceStats())
    splits: tuple[list, list] = ([], [])
    limit = int(val_fraction * 2**64)
    while texts := [text for _, text in itertools.islice(documents, _CHUNK)]:
        for text, document in zip(texts, ids.training_documents(tokenizer, texts), strict=True):
            key = int.from_bytes(hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest(), "little")
            splits[key < limit].append(document)
    if not splits[False]:
        raise ConfigError(f"replay.path: {path} has no text to learn from")
    train, val = (np.concatenate(split) if split else np.empty(0, np.int32) for split in splits)
    return FileText(tokenizer, train, val)


class Pieces:
    """Pieces of a text in an order by the seed; each source has its share. Raises ConfigError if one has too few."""

    def __init__(self, text: Text, tokens: int, seed: int):
        self.text, self.tokens = text, tokens
        self._order = document_rows.Rows(text, text.mixture, seed, seq_len=tokens, batch_size=1)
        self._plan = self._order.plan

    def segments(self, number: int) -> list[pack_examples.Segment]:
        """Returns the texts of the `number`-th piece, cut where documents begin; they take `tokens` tokens in all."""
        source, _, row = self._plan.locate(number, np.zeros(1, np.int64))
        first = int(row[0]) * self.tokens
        tokens_T1 = np.asarray(self._order.streams[int(source[0])].read(first, first + self.tokens + 1), np.int32)
        starts = np.flatnonzero(tokens_T1[:-1] == self.text.separator_id)
        bounds = [0, *starts[starts > 0].tolist(), self.tokens]
        parts = (tokens_T1[start : stop + 1] for start, stop in itertools.pairwise(bounds))
        return [pack_examples.Segment(part, np.ones(len(part) - 1, np.float32)) for part in parts]

    def passes(self, pieces: int) -> dict[str, float]:
        draws, counts = mixture.count_draws(self._plan.shares, pieces), self.text.token_counts()
        return {name: float(n) * self.tokens / counts[name] for name, n in zip(self._plan.names, draws, strict=True)}


def piece_tokens(share: float, lengths: np.ndarray, counted: np.ndarray, seq_len: int, batch_size: int) -> int:
    """Returns a piece's length in tokens, such that a batch needs about one piece for its share; at most `seq_len`."""
    density = counted.sum() / max(1, lengths.sum())
    a_batch = batch_size * seq_len * density * share / (1 - share)
    return int(min(seq_len, max(_LEAST, a_batch)))
