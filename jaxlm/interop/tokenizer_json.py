"""Writes a SentencePiece tokenizer as Hugging Face's tokenizer.json, which gives the same ids."""

import base64
import dataclasses
import re

from jaxlm.config import ConfigError
from jaxlm.data.chats import chat
from jaxlm.data.tokenizer.ours import Tokenizer

# Two things differ from how transformers converts a SentencePiece model. The vocabulary's pieces have plain spaces, so that no
# text is rewritten and a literal U+2581 becomes bytes, as in `data.tokenizer`. And text is first split into words, as
# `data.tokenizer` does, since no piece spans several words.
_SPACE = "\u2581"
_NORMAL, UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = range(1, 7)  # the types of pieces in SentencePiece and in GGUF
_UNIGRAM, _BPE = 1, 2


@dataclasses.dataclass(frozen=True)
class Pieces:
    """The content of a SentencePiece model.

    Attributes:
      texts, scores, types: of each id: the piece, with U+2581 for a space; its score; its type, from 1 to 6.
      charsmap: the normaliser's table; empty for no normalisation.
      dummy_prefix: True if each text gets a leading space.
      strips: True if spaces at the ends are removed, and several in a row become one.
      words: a regular expression for words that no piece spans; None if there are no such words.
    """

    texts: list[str]
    scores: list[float]
    types: list[int]
    is_bpe: bool
    charsmap: bytes
    dummy_prefix: bool
    strips: bool
    words: str | None


def pieces(tokenizer: Tokenizer) -> Pieces:
    """Returns the content of the tokenizer's SentencePiece model. Raises ConfigError if it is neither BPE nor unigram."""
    from sentencepiece import sentencepiece_model_pb2

    model = sentencepiece_model_pb2.ModelProto.FromString(tokenizer.model_bytes)
    if model.trainer_spec.model_type not in (_UNIGRAM, _BPE):
        raise ConfigError("this SentencePiece model is neither BPE nor unigram: it can't be exported")
    normalizer = model.normalizer_spec
    return Pieces(
        texts=[piece.piece for piece in model.pieces],
        scores=[piece.score for piece in model.pieces],
        types=[piece.type for piece in model.pieces],
        is_bpe=model.trainer_spec.model_type == _BPE,
        charsmap=normalizer.precompiled_charsmap,
        dummy_prefix=normalizer.add_dummy_prefix,
        strips=normalizer.remove_extra_whitespaces,
        words=tokenizer.words,
    )


def tokenizer_json(tokenizer: Tokenizer) -> dict:
    """Returns the content of tokenizer.json, whose post-processor puts `tokenizer.opening` before a text."""
    held = pieces(tokenizer)
    opening = [{"SpecialToken": {"id": held.texts[i], "type_id": 0}} for i in tokenizer.opening]
    single, second = {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}
    ids = {held.texts[i]: {"id": held.texts[i], "ids": [i], "tokens": [held.texts[i]]} for i in tokenizer.opening}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [added(held, i) for i, kind in enumerate(held.types) if kind in (UNKNOWN, _CONTROL, _USER)],
        "normalizer": _normalizer(held),
        "pre_tokenizer": _pre_tokenizer(held),
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [*opening, single],
            "pair": [*opening, single, second],
            "special_tokens": ids,
        },
        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": _bpe(held) if held.is_bpe else _unigram(held),
    }


def tokenizer_config(tokenizer: Tokenizer, max_length: int) -> dict:
    """Returns the content of tokenizer_config.json, with the chat template if the vocabulary has its tokens.

    `split_special_tokens` is True, so that control tokens spelled in a text are plain text; with a chat template, which spells
    control tokens itself, it is False.
    """
    held = pieces(tokenizer)
    speaks = chat.speaks(tokenizer)
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": not speaks,
        "bos_token": held.texts[tokenizer.opening[0]],
        "eos_token": held.texts[tokenizer.eos_id],
        "unk_token": pad_token(tokenizer),
        "pad_token": pad_token(tokenizer),
        "padding_side": "left",
        **({"chat_template": chat.TEMPLATE} if speaks else {}),
    }


def pad_token(tokenizer: Tokenizer) -> str:
    held = pieces(tokenizer)
    return next(text for text, kind in zip(held.texts, held.types, strict=True) if kind == UNKNOWN)


def added(held: Pieces, i: int) -> dict:
    """Returns an id's entry in `added_tokens`, the tokens that a decoder may skip or that are matched before others."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": i, "content": held.texts[i], **flags, "special": held.types[i] != _USER}


def _spaced(text: str) -> str:
    return text.replace(_SPACE, " ")


def _names(held: Pieces) -> list[str]:
    return [
        _spaced(text) if kind in (_NORMAL, _USER) else text for text, kind in zip(held.texts, held.types, strict=True)
    ]


def _bpe(held: Pieces) -> dict:
    names = _names(held)
    normal = {name: i for i, (name, kind) in enumerate(zip(names, held.types, strict=True)) if kind == _NORMAL}
    merges = []
    for name, i in normal.items():
        pairs = ((name[:cut], name[cut:]) for cut in range(1, len(name)))
        whole = [pair for pair in pairs if pair[0] in normal and pair[1] in normal]
        merges += [(-held.scores[i], normal[left], normal[right], left, right) for left, right in whole]
    unknown = held.texts[held.types.index(UNKNOWN)]
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unknown,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": _BYTE in held.types,
        "ignore_merges": False,
        "vocab": {name: i for i, name in enumerate(names)},
        "merges": [[left, right] for *_, left, right in sorted(merges)],
    }


def _unigram(held: Pieces) -> dict:
    # SentencePiece never matches a control or byte piece in a text; this model would. So each scores below its characters.
    normal = [score for score, kind in zip(held.scores, held.types, strict=True) if kind == _NORMAL]
    bad = 100 * min(*normal, -10.0)
    scores = [s if kind in (_NORMAL, _USER) else bad for s, kind in zip(held.scores, held.types, strict=True)]
    return {
        "type": "Unigram",
        "unk_id": held.types.index(UNKNOWN),
        "vocab": [[name, score] for name, score in zip(_names(held), scores, strict=True)],
        "byte_fallback": _BYTE in held.types,
    }


def _split(pattern: str) -> dict:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _pre_tokenizer(held: Pieces) -> dict | None:
    parts = [_split(held.words or _SPACE)]
    if not held.is_bpe:
        # A character that is in no piece is its own word: then no control piece that contains it can match.
        known = {c for text, kind in zip(held.texts, held.types, strict=True) if kind == _NORMAL for c in _spaced(text)}
        hidden = {text for text, kind in zip(held.texts, held.types, strict=True) if kind not in (_NORMAL, _USER)}
        if alone := sorted({c for text in hidden for c in text} - known):
            parts.append(_split(f"[{''.join(map(re.escape, alone))}]"))
    return {"type": "Sequence", "pretokenizers": parts}


def _normalizer(held: Pieces) -> dict | None:
    parts: list[dict] = []
    if held.charsmap:
        parts.append({"type": "Precompiled", "precompiled_charsmap": base64.b64encode(held.charsmap).decode()})
    if held.strips:
        parts.append({"type": "Strip", "strip_left": True, "strip_right": True})
        parts.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    if held.dummy_prefix:
        parts.append({"type": "Prepend", "prepend": " "})
    return {"type": "Sequence", "normalizers": parts} if parts else None
