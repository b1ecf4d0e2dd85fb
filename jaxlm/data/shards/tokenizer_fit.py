"""Measures how well a tokenizer fits its text, by source. Fertility (tokens a word) is that of Rust et al. 2021.

A sweep compares the tokens that a larger vocabulary saves with the parameters that it costs (Tao et al. 2024).
"""

import re
import time
import typing
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from jaxlm.config import ConfigError
from jaxlm.corpus.sources import embedded
from jaxlm.corpus.words import CJK
from jaxlm.data.shards import search
from jaxlm.data.shards.shards import DataDir
from jaxlm.data.tokenizer.coder import Coder
from jaxlm.data.tokenizer.ours import Tokenizer
from jaxlm.data.tokenizer.train import train_tokenizer

_WORD = re.compile(rf"[{CJK}]|[^\s{CJK}]+")
_USED_TOKENS = 16_000_000
_HELD_OUT = 10  # of a sweep's texts, every tenth is measured on and not trained on


def fit(
    tokenizer: Coder, texts_by_source: Mapping[str, Sequence[str]], reference: Coder | None = None
) -> list[dict[str, typing.Any]]:
    """Returns one row for each source, a dict of JSON values:

    - `bytes_per_token`, `tokens_per_word` (words by white space; each Chinese or Japanese character counts as one);
    - `byte_fallback`: share of tokens that are single bytes of characters without a piece (white space does not count);
    - `single_letters`: share of tokens that are one letter; many mean another language or broken text;
    - `white_space`: share of tokens that are only white space;
    - `unused_pieces`: share of the vocabulary (without bytes and controls) that these texts do not use;
    - `lossy_documents`: texts that decoding does not restore exactly;
    - with a reference: `reference_bytes_per_token`, and `tokens_saved`, the share of tokens saved against it.
    """
    kinds = _kinds(tokenizer)
    rows = []
    for source, texts in texts_by_source.items():
        coded = tokenizer.encode_batch(texts)
        counts = np.bincount(np.concatenate([*coded, np.empty(0, np.int32)]), minlength=tokenizer.vocab_size)
        n_tokens = max(int(counts.sum()), 1)
        n_bytes = sum(len(text.encode("utf-8", "replace")) for text in texts)
        row = {
            "source": source,
            "bytes_per_token": n_bytes / n_tokens,
            "tokens_per_word": n_tokens / max(sum(len(_WORD.findall(text)) for text in texts), 1),
            "byte_fallback": float(counts[kinds["fallback"]].sum() / n_tokens),
            "single_letters": float(counts[kinds["letter"]].sum() / n_tokens),
            "white_space": float(counts[kinds["space"]].sum() / n_tokens),
            "unused_pieces": float((counts[kinds["piece"]] == 0).mean()) if kinds["piece"].any() else 0.0,
            "lossy_documents": sum(tokenizer.decode(ids) != text for ids, text in zip(coded, texts, strict=True)),
        }
        if reference is not None:
            n_reference = max(sum(map(len, reference.encode_batch(texts))), 1)
            row["reference_bytes_per_token"] = n_bytes / n_reference
            row["tokens_saved"] = 1 - n_tokens / n_reference
        rows.append(row)
    return rows


def _kinds(tokenizer: Coder) -> dict[str, np.ndarray]:
    """Returns which ids are bytes of characters without a piece, single letters, white space, learned pieces: bool[V]."""
    raw, is_byte = tokenizer.piece_bytes(), np.zeros(tokenizer.vocab_size, bool)
    is_byte[tokenizer.byte_ids()] = True
    text = [piece.decode("utf-8", "replace") for piece in raw]
    space = np.asarray([bool(piece) and piece.isspace() for piece in text])
    return {
        "fallback": is_byte & ~space,
        "letter": ~is_byte & np.asarray([len(piece.strip()) == 1 and piece.strip().isalpha() for piece in text]),
        "space": space,
        "piece": ~is_byte & np.asarray([bool(piece) for piece in raw]),
    }


def traits(tokenizer: Coder) -> dict[str, typing.Any]:
    """Returns facts that no text changes: how many tokens "2024" has, and how many a line's indent and newlines add."""

    def extra(indent: str) -> int:
        return len(tokenizer.encode(f"\n{indent}return value")) - len(tokenizer.encode("\nreturn value"))

    return {
        "vocab_size": tokenizer.vocab_size,
        "byte_pieces": len(tokenizer.byte_ids()),
        "tokens_of_2024": len(tokenizer.encode("2024")),
        "indent_4": extra(" " * 4),
        "indent_8": extra(" " * 8),
        "tab": extra("\t"),
        "newline": len(tokenizer.encode("\n")),
        "blank_line": len(tokenizer.encode("\n\n")),
    }


def general_tokenizer(data: DataDir, model_type: str) -> Tokenizer:
    """Trains a tokenizer of the data's size on the embedded prose, in seconds. Raises ConfigError if the prose is too small."""
    texts = (text for _, text in embedded.iterate_embedded("prose"))
    chat_tokens = data.manifest["tokenizer"]["chat_tokens"]
    return train_tokenizer(texts, vocab_size=data.vocab_size, chat_tokens=chat_tokens, model_type=model_type)


def held_out(data: DataDir, source: str, max_bytes: int = 1_000_000, split: str = "val") -> tuple[list[str], int]:
    """Returns (about `max_bytes` of whole documents, decoded, at least one; how many differ in length from the original)."""
    coder, texts, lossy, left = data.tokenizer(), [], 0, max_bytes
    for document, ids_N in search.each_document(data, source, split):
        if left <= 0:
            break
        text = coder.decode(ids_N)
        lossy += len(text.encode()) != document.n_bytes
        texts.append(text)
        left -= document.n_bytes
    return texts, lossy


def report(data: DataDir, reference: Coder | None = None, max_bytes: int = 1_000_000) -> dict[str, typing.Any]:
    """Measures a data directory's tokenizer on its held-out text: `fit` of each source, and `traits`.

    `unused_pieces` are counted in the first 16 million training tokens of each source, and in those of all sources.
    """
    samples = {source: held_out(data, source, max_bytes) for source in data.sources}
    coder = data.tokenizer()
    rows = fit(coder, {source: texts for source, (texts, _) in samples.items()}, reference)
    piece = _kinds(coder)["piece"]
    used = np.zeros(coder.vocab_size, bool)
    for row in rows:
        # Decoded texts do not show what the tokenizer lost when it encoded the originals.
        row["lossy_documents"] = max(row["lossy_documents"], samples[row["source"]][1])
        stream = data.stream(row["source"])
        here = np.bincount(stream.read(0, min(stream.tokens, _USED_TOKENS)), minlength=coder.vocab_size) > 0
        row["unused_pieces"] = float((~here[piece]).mean()) if piece.any() else 0.0
        used |= here
    unused = int((piece & ~used).sum())
    return {"traits": traits(coder), "pieces": int(piece.sum()), "unused_pieces": unused, "sources": rows}


def sweep(
    texts: Iterable[str],
    sizes: Sequence[int],
    *,
    d_model: int,
    tied: bool,
    model_type: str = "bpe",
    chat_tokens: bool = False,
    corpus_bytes: int | None = None,
) -> list[dict[str, typing.Any]]:
    """Trains a tokenizer of each size on nine tenths of the texts and measures it on the rest. Returns a row for each.

    `parameters` are those of the embedding, and of the head unless `tied`. Raises ConfigError if there is too little
    text.
    """
    texts = list(texts)
    if len(texts) < 2:
        raise ConfigError("a sweep of vocabulary sizes needs two documents: one to train on, one to measure on")
    measured = texts[_HELD_OUT - 1 :: _HELD_OUT] or texts[-1:]
    trained = [text for i, text in enumerate(texts) if i % _HELD_OUT != _HELD_OUT - 1][: len(texts) - len(measured)]
    n_bytes = sum(len(text.encode("utf-8", "replace")) for text in measured)
    rows = []
    for size in sizes:
        began = time.perf_counter()
        coder = train_tokenizer(trained, vocab_size=size, chat_tokens=chat_tokens, model_type=model_type)
        seconds = time.perf_counter() - began
        per_token = n_bytes / max(sum(map(len, coder.encode_batch(measured))), 1)
        key, amount = ("tokens_per_gb", 10**9) if corpus_bytes is None else ("tokens", corpus_bytes)
        rows.append(
            {
                "vocab_size": size,
                "bytes_per_token": per_token,
                "parameters": -(-size // 128) * 128 * d_model * (1 if tied else 2),
                key: round(amount / per_token),
                "train_s": round(seconds, 1),
            }
        )
    return rows
