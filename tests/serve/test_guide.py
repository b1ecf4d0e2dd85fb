"""What follows a guide is JSON of its schema, whatever the tokenizer and the size of the vocabulary."""

import json
import random

import jsonschema
import numpy as np
import pytest
import tiny_chats
import tiny_hf
import tiny_serve

from jaxlm.data.chats import chat
from jaxlm.data.tokenizer import coder
from jaxlm.serve.guide import Guides


@pytest.fixture(scope="module", params=["ours", "byte_level", "byte_fallback"])
def tokenizer(request, tmp_path_factory):
    if request.param == "ours":
        return tiny_chats.tokenizer()
    folder = tmp_path_factory.mktemp("tokenizer")
    getattr(tiny_hf, request.param)(folder)
    return coder.load(folder)


def walk(guide, tokenizer, vocab_size: int, seed: int) -> str:
    """A text of ids drawn by chance among those that a guide allows."""
    rng, ids, ends = random.Random(seed), [], chat.ends(tokenizer)
    while not ids or ids[-1] not in ends:
        mask = guide.mask()
        assert (mask.dtype, len(mask)) == (np.uint32, -(-vocab_size // 32))
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
        assert allowed
        assert max(allowed) < tokenizer.vocab_size
        ids.append(rng.choice(allowed))
        guide.accept(ids[-1])
    pieces = tokenizer.piece_bytes()
    return b"".join(pieces[i] for i in ids if i not in ends).decode()


@pytest.mark.parametrize("padded_to", [32, 33])  # the size of most models' vocabularies has no rest by 32
def test_a_walk_is_json_of_the_schema(tokenizer, padded_to):
    vocab_size = -(-tokenizer.vocab_size // 32) * 32 + padded_to - 32
    make = Guides(tokenizer, vocab_size, chat.ends(tokenizer)).of_schema(tiny_serve.SCHEMA)
    texts = [walk(make(), tokenizer, vocab_size, seed) for seed in range(20)]
    for text in texts:
        jsonschema.validate(json.loads(text), tiny_serve.SCHEMA)
    assert len({*texts}) > 10


def test_what_is_not_allowed_is_not_taken(tokenizer):
    guide = Guides(tokenizer, tokenizer.vocab_size, chat.ends(tokenizer)).of_schema(tiny_serve.SCHEMA)()
    with pytest.raises(ValueError, match="can't go on"):
        guide.accept(chat.ends(tokenizer)[0])
