"""SentencePiece (Kudo and Richardson 2018), BPE or unigram, with byte fallback: decoding returns every text exactly.

Ids 0, 1, 2 are unk, bos, eos; the five ChatML tokens have the last ids. A text that spells such a token is not encoded
to its id: it stays text.
"""

import bisect
import functools
import hashlib
import itertools
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
import sentencepiece as spm

from jaxlm.config import ConfigError
from jaxlm.host import files

_SPACE = "\u2581"  # SentencePiece writes a space as this character
_SPACE_BYTES = tuple(_SPACE.encode())
_PIECE_CHARS = 1 << 17
_FEW = 64  # this many texts or words are encoded before threads have started
_WORDS = f"\n|{_SPACE}| *[^ \n{_SPACE}]+| +"  # each with the spaces before it
_JOINED = re.compile(f"[^\n{_SPACE}]{_SPACE}")
_PROBE = "  \ufb01 \u2460  e\u0301\t\n A "
GUARD = "\ufdd0"  # no character: inside the spelling of a control token, it marks this as ordinary text
_CACHE_CHARS = 1 << 24  # with 40 for the rest of each entry: about 100 MB


class Ids:
    """What all tokenizers say of ids by `_raw_bytes`, the raw bytes of each, and `find`."""

    def id_of(self, piece: str) -> int:
        if (i := self.find(piece)) is None:
            raise ConfigError(f"the tokenizer has no token {piece}: name another, or a tokenizer that has it")
        return i

    def token_bytes(self) -> np.ndarray:
        return np.asarray([len(raw) for raw in self._raw_bytes], np.int32)

    def piece_bytes(self) -> list[bytes]:
        return list(self._raw_bytes)


class Tokenizer(Ids):
    """A SentencePiece model, and the interface of all tokenizers. Equal `sha256`: equal ids for every text.

    `opening` are the ids in front of a text, `separator_id` begins each document in shards, `files` are what
    `coder.read` loads. `words` matches words that no piece reaches across, so that a text may be cut into them first;
    None if there are no such words.
    """

    def __init__(self, model_bytes: bytes):
        self.model_bytes = model_bytes
        self.files = {"tokenizer.model": model_bytes}
        self.sha256 = hashlib.sha256(model_bytes).hexdigest()
        self._sp = spm.SentencePieceProcessor(model_proto=model_bytes)
        self.vocab_size: int = self._sp.vocab_size()
        self.bos_id, self.eos_id = self._sp.bos_id(), self._sp.eos_id()
        self.opening: tuple[int, ...] = (self.eos_id,)
        self.separator_id: int = self.eos_id
        if self.eos_id < 0:
            raise ConfigError("this SentencePiece model has no end-of-sentence piece; train it with eos_id >= 0")
        self._space_ids = [self._sp.piece_to_id(f"<0x{byte:02X}>") for byte in _SPACE_BYTES]
        self._forget()

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Tokenizer":
        """Reads a `.model` file. Raises ConfigError if the file is missing or is not a SentencePiece model."""
        try:
            tokenizer = cls(content_of(path))
            tokenizer.token_bytes()  # reads all pieces: a damaged one is not UTF-8
        except ConfigError:
            raise
        except (RuntimeError, ValueError):
            raise ConfigError(f"{path} is not a SentencePiece model, or it is damaged: copy it again") from None
        return tokenizer

    def __reduce__(self):
        return Tokenizer, (self.model_bytes,)

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text, without BOS and EOS and never with a control id. Lone surrogates become '?'."""
        return self.encode_batch([text])[0].tolist()

    def encode_marked(self, text: str) -> list[int]:
        """Returns the ids of a text; the spelling of a control token becomes that token, unless a `GUARD` is inside."""
        return encode_marked(self, text)

    def encode_cut(self, texts: Sequence[str], cuts: Sequence[Sequence[int]]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns for each text (its `encode_marked`, int32[n]; the number of ids before each of its cuts, int64).

        A cut is a place in the text, in characters; its number is -1 if the text before it, encoded alone, has other ids.
        """
        parts_of = [*map(controls_of(self).split, texts)]
        heads_of = [_heads(parts, places) for parts, places in zip(parts_of, cuts, strict=True)]
        plain = dict.fromkeys(part for parts in parts_of for part in parts[0::2])
        plain |= dict.fromkeys(head for heads in heads_of for _, head in heads)
        coded = self.encode_batch([part.replace(GUARD, "") for part in plain])
        ids_of = dict(zip(plain, coded, strict=True))
        controls = {piece: np.asarray([i], np.int32) for piece, i in self.controls.items()}
        coded_texts = []
        for parts, heads in zip(parts_of, heads_of, strict=True):
            ids = [(controls if number % 2 else ids_of)[part] for number, part in enumerate(parts)]
            before, at = [0, *itertools.accumulate(map(len, ids))], []
            for number, head in heads:
                own = ids_of[head]
                at.append(before[number] + len(own) if np.array_equal(ids[number][: len(own)], own) else -1)
            coded_texts.append((np.concatenate(ids), np.asarray(at, np.int64)))
        return coded_texts

    @functools.cached_property
    def words(self) -> str | None:
        plain = self._sp.normalize(_PROBE) == _PROBE.replace(" ", _SPACE)
        pieces = (self._sp.id_to_piece(i) for i, raw in enumerate(self._raw_bytes) if raw and not self._sp.is_byte(i))
        return word_pattern(pieces) if plain else None

    @functools.cached_property
    def _cut(self) -> Callable[[str], list[str]]:
        return re.compile(self.words or _SPACE).findall

    @functools.cached_property
    def controls(self) -> dict[str, int]:
        return {self._sp.id_to_piece(i): i for i in range(self.vocab_size) if self._sp.is_control(i)}

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns the ids of each text, as `encode` does, int32[n] each.

        If no piece reaches across words, encodes each word once and remembers it. For a unigram model, which adds
        scores in float32, this also splits a word always the same way.
        """
        if self.words is None:
            return self._encode_whole(texts)
        texts = [text if text.isascii() else text.encode("utf-8", "replace").decode() for text in texts]
        split = [self._cut(text) for text in texts]
        words = self._learn(set().union(*split))
        return [np.frombuffer(bytearray().join(map(words.__getitem__, parts)), np.int32) for parts in split]

    def _learn(self, seen: set[str]) -> Mapping[str, bytes]:
        """Returns word -> int32 ids, for at least the words in `seen`."""
        words = self._words  # other threads may replace this dict by a new one, but never remove anything from it
        new = [word for word in seen if word not in words]
        for word, ids in zip(new, self._encode_all(new), strict=True):
            words[word] = np.asarray(ids, np.int32).tobytes()
        self._word_chars += sum(map(len, new)) + 40 * len(new)
        if self._word_chars > _CACHE_CHARS:
            self._forget()
        return words

    def _forget(self) -> None:
        # Ids as bytes: joined faster than lists of integers.
        self._words = {_SPACE: np.asarray(self._space_ids, np.int32).tobytes()}
        self._word_chars = 0

    def _encode_whole(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Encodes whole texts, for imported models; cuts the longest texts at newlines."""
        split = [[*self._split(text)] for text in texts]
        coded = iter(self._encode_all([part for parts in split for part in parts if part is not None]))
        ids = ([self._space_ids if part is None else next(coded) for part in parts] for parts in split)
        return [np.fromiter(itertools.chain.from_iterable(of_text), np.int32) for of_text in ids]

    def _encode_all(self, texts: list[str]) -> list[list[int]]:
        threads = files.threads() if len(texts) > _FEW else 1
        return self._sp.encode(texts, out_type=int, num_threads=threads)

    def _split(self, text: str) -> Iterator[str | None]:
        """Yields parts to be encoded one by one; None for a literal U+2581, which SentencePiece takes for a space."""
        if not text.isascii():
            text = text.encode("utf-8", "replace").decode()
        for i, section in enumerate(text.split(_SPACE) if _SPACE in text else (text,)):
            if i:
                yield None
            start = 0
            while len(section) - start > _PIECE_CHARS:
                newline = section.rfind("\n", start, start + _PIECE_CHARS) + 1 or section.find("\n", start) + 1
                stop = newline or len(section)
                yield section[start:stop]
                start = stop
            if start < len(section):
                yield section[start:]

    def decode(self, ids: Iterable[int], follows: bool = False) -> str:
        """Returns the text of ids. Control tokens become nothing; bytes that are not UTF-8 (a cut character) become U+FFFD.

        Some tokenizers (Llama 2) put a space in front of a text. It is removed unless the text `follows` another text.
        """
        return b"".join([self._raw_bytes[int(i)] for i in ids]).decode("utf-8", "replace")

    @functools.cached_property
    def _raw_bytes(self) -> list[bytes]:
        sp = self._sp
        table = []
        for i in range(self.vocab_size):
            piece = sp.id_to_piece(i)
            if sp.is_control(i) or sp.is_unknown(i):
                table.append(b"")
            elif sp.is_byte(i):
                table.append(bytes([int(piece[3:5], 16)]))
            else:
                table.append(piece.replace(_SPACE, " ").encode())
        return table

    def byte_ids(self) -> np.ndarray:
        return np.asarray([i for i in range(self.vocab_size) if self._sp.is_byte(i)], np.int32)

    def find(self, piece: str) -> int | None:
        """Returns the id of a piece; None if there is no such piece."""
        i = self._sp.piece_to_id(piece)
        return i if self._sp.id_to_piece(i) == piece else None


def content_of(path: str | os.PathLike) -> bytes:
    try:
        return pathlib.Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the tokenizer {path}: {error.strerror}") from None


def encode_marked(tokenizer, text: str) -> list[int]:
    """See `Tokenizer.encode_marked`. Encodes each text between control tokens separately."""
    ids: list[int] = []
    for number, part in enumerate(controls_of(tokenizer).split(text)):
        ids += [tokenizer.controls[part]] if number % 2 else tokenizer.encode(part.replace(GUARD, "")) if part else []
    return ids


def _heads(parts: Sequence[str], cuts: Sequence[int]) -> list[tuple[int, str]]:
    """Returns for each cut (its part's number, this part's text before the cut). Every second part is a control token."""
    ends, heads = [*itertools.accumulate(map(len, parts))], []
    for cut in cuts:
        number = bisect.bisect_left(ends, cut)
        if number % 2 and cut == ends[number]:  # after a control token
            number += 1
        heads.append((number, parts[number][: cut - ends[number] + len(parts[number])]))
    return heads


def controls_of(tokenizer) -> re.Pattern[str]:
    longest_first = sorted(tokenizer.controls, key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest_first))})")


def word_pattern(pieces: Iterable[str]) -> str | None:
    """Returns a regular expression for words that no piece reaches across; None if a piece has a space behind a letter.

    Some pieces join a newline with punctuation before it and with an indent behind it. Then all of this is one
    word, with the letters behind the indent: a piece may begin with the indent's last space.
    """
    pieces = set(pieces)
    if any(map(_JOINED.search, pieces)):
        return None
    if not any("\n" in piece for piece in pieces):
        return _WORDS
    parts = {frozenset(part) for piece in pieces for part in piece.split(_SPACE) if len(part) > 1}
    joined = {"\n"}  # with all that pieces join to a newline, directly or through other characters
    while new := [part for part in parts if part & joined and not part <= joined]:
        joined = joined.union(*new)
    escaped = "".join(map(re.escape, sorted(joined - {"\n"})))
    marks, letters = f"[{escaped}]*+" * bool(escaped), f"[^ \n{_SPACE}{escaped}]++"
    newlines = f" *+{marks}\n(?: *+{marks}\n)*+ *+(?:(?<= ){letters}|{marks})"
    return f" *+[^ \n{_SPACE}]++(?!\n)|{newlines}| *+(?:{marks}{letters})++| +|{_SPACE}"


def append_controls(model_bytes: bytes, names: Sequence[str]) -> bytes:
    """Returns a SentencePiece model with control pieces after its last id. All other text keeps its ids."""
    # Needs protobuf; a model is read without it.
    from sentencepiece import sentencepiece_model_pb2

    model = sentencepiece_model_pb2.ModelProto.FromString(model_bytes)
    for name in names:
        model.pieces.add(piece=name, score=0.0, type=model.SentencePiece.CONTROL)
    model.trainer_spec.vocab_size = len(model.pieces)
    return model.SerializeToString(deterministic=True)
