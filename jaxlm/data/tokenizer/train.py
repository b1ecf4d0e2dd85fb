"""Trains SentencePiece models: BPE or unigram (Kudo and Richardson 2018), with byte fallback."""

import base64
import itertools
import re
import typing
from collections.abc import Iterable, Iterator

from jaxlm.config import CHAT_TOKENS, ConfigError, RunError
from jaxlm.data.tokenizer.ours import Tokenizer, append_controls
from jaxlm.host.child import Child, Died

_UNK_ID, _BOS_ID, _EOS_ID = 0, 1, 2
_SPACE = "\u2581"  # SentencePiece writes a space as this character
# Noncharacters in the training text: a space of an indent; a place that no piece reaches across.
_INDENT, _BREAK = "\ufdd4", "\ufdd5"
# What SentencePiece's trainer refuses, drops a whole text for (U+2585), or takes for a space. Byte pieces serve.
_REFUSED = re.compile(f"[\0\u2585{_SPACE}{_INDENT}{_BREAK}]")
# SentencePiece counts at most 65,535 characters in a word, which may be a whole table.
_PART = re.compile(r"(?s).{1,4000}(?=\n|\Z)|.{1,4000}")
_SPARE = 64  # more pieces than are asked for: some are equal once `_INDENT` is a space
_MAX_PIECE = 24  # characters: a colon, a newline and five levels of indentation
_LEAST = 300  # ids without the chat tokens: bytes, control tokens and the commonest letters
_PARTS = 1000  # in one message to the training process
_THREADS = 2  # fixed: the number is written into the model's bytes


def train_tokenizer(texts: Iterable[str], *, vocab_size: int, chat_tokens: bool, model_type: str = "bpe") -> Tokenizer:
    """Trains a tokenizer that depends only on the arguments. "unigram" (Kudo 2018) takes about 15 times as long as "bpe".

    Raises ConfigError if there is too little text for the vocabulary (the message names the largest possible size).
    """
    extra = len(CHAT_TOKENS) if chat_tokens else 0
    if vocab_size - extra < _LEAST:
        raise ConfigError(f"vocabulary of {vocab_size} is too small: 256 byte pieces, controls need {_LEAST + extra}")
    settings = {
        "model_type": model_type,
        "vocab_size": vocab_size - extra + _SPARE,
        "hard_vocab_limit": False,
        "pretokenization_delimiter": _BREAK,
        "max_sentence_length": 1 << 16,
        "max_sentencepiece_length": _MAX_PIECE,
        "byte_fallback": True,
        "split_digits": True,
        "normalization_rule_name": "identity",
        "add_dummy_prefix": False,
        "remove_extra_whitespaces": False,
        "allow_whitespace_only_pieces": True,
        "character_coverage": 0.9999,
        "unk_id": _UNK_ID,
        "bos_id": _BOS_ID,
        "eos_id": _EOS_ID,
        "pad_id": -1,
        "num_threads": _THREADS,
        "minloglevel": 2,
    }
    answer = _train_apart(_training_parts(texts), settings)
    if "error" in answer:
        raise _training_error(answer["error"], vocab_size)
    model_bytes, largest = _with_spaces(base64.b64decode(answer["model"]), vocab_size - extra)
    if largest < vocab_size - extra:
        raise VocabularyTooLarge(vocab_size, largest + extra if largest >= _LEAST else 0)
    return Tokenizer(append_controls(model_bytes, CHAT_TOKENS if chat_tokens else ()))


def _train_apart(parts: Iterator[str], settings: dict[str, object]) -> dict[str, str]:
    """Trains in a process of its own, which ends with this call, also on ctrl-C. Returns what `child.train` sends."""
    trainer = Child("jaxlm.data.tokenizer.child:train")
    try:
        trainer.send(settings)
        while batch := list(itertools.islice(parts, _PARTS)):
            trainer.send(batch)
        trainer.send(None)
        return trainer.receive()
    except Died as death:
        if death.code is not None and death.code < 0:
            killed = f"the training of a tokenizer was killed by signal {-death.code}, perhaps for memory"
            advice = "it holds a sample of the text; free some memory and run the same command again"
            raise RunError(f"{killed}: {advice}") from None
        return {"error": death.said}
    finally:
        trainer.end()


class VocabularyTooLarge(ConfigError):
    """There is too little text for the vocabulary that was asked for. `largest`: the largest possible size; 0 = none."""

    def __init__(self, vocab_size: int, largest: int):
        super().__init__(
            f"the text is too small for a vocabulary of {vocab_size}; the largest it supports is {largest}: set "
            "--config.model.vocab_size=0, which chooses by the amount of text, or a smaller number"
            if largest
            else "the text is too small to train a tokenizer on: give more text, or a tokenizer by --config.data.tokenizer"
        )
        self.largest = largest


def _training_error(message: str, vocab_size: int) -> ConfigError:
    if "sentences_.empty()" in message:
        return ConfigError("there is no text to train a tokenizer on; check the sources")
    last = (message.strip().splitlines() or ["it ended without a message"])[-1]
    return ConfigError(f"SentencePiece could not train a vocabulary of {vocab_size}: {last[:200]}")


def _training_parts(texts: Iterable[str]) -> Iterator[str]:
    """Yields texts to train on, cut at newlines. Indents become `_INDENT`, which SentencePiece joins to what precedes.

    No piece joins a newline to a line without an indent: an answer in ChatML, behind the newline of its header, has the
    ids that a model generates.
    """
    for text in texts:
        text = _REFUSED.sub("", text.encode("utf-8", "replace").decode())
        text = re.sub("(?<=\n) +", lambda spaces: _INDENT * len(spaces[0]), text)
        text = re.sub(f"\n(?=[^\n{_INDENT}])", f"\n{_BREAK}", text)
        yield from filter(str.strip, _PART.findall(text))


def _with_spaces(model_bytes: bytes, vocab_size: int) -> tuple[bytes, int]:
    """Returns (a trained model with spaces for `_INDENT` and at most `vocab_size` pieces, how many it could have)."""
    from sentencepiece import sentencepiece_model_pb2

    model = sentencepiece_model_pb2.ModelProto.FromString(model_bytes)
    pieces: dict[str, typing.Any] = {}
    for piece in model.pieces:
        piece.piece = piece.piece.replace(_INDENT, _SPACE)
        # In 256ths, sums are exact in float32 too: two cuts of equal score in a unigram model are equal for every reader.
        piece.score = round(piece.score * 256) / 256
        pieces.setdefault(piece.piece, piece)  # of two that are equal now, the first has the higher score
    largest, normal = len(pieces), [text for text, piece in pieces.items() if piece.type == piece.NORMAL]
    last = sorted(normal, key=lambda text: len(text) == 1, reverse=True)  # single characters stay
    for text in last[len(last) - max(largest - vocab_size, 0) :]:
        del pieces[text]
    model.ClearField("pieces")
    model.pieces.extend(pieces.values())
    return model.SerializeToString(deterministic=True), largest
