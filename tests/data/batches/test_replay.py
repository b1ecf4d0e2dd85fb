"""Pretraining text in pieces: rows of the stream as in pretraining, cut where a document begins; a part is held out."""

import json

import numpy as np
import pytest
import tiny_chats
import tiny_data

from jaxlm.config import ConfigError
from jaxlm.data.batches import replay, rows
from jaxlm.data.chats import chat


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return tiny_data.make(tmp_path_factory.mktemp("data") / "d", {"a": 3.0, "b": 1.0})


def test_pieces_are_rows_of_the_data(data):
    """Their texts are the segments of a pretraining row, and their targets its targets."""
    pieces = replay.Pieces(data, 48, seed=5)
    plan = rows.plan_rows(data.token_counts(), data.mixture, seed=5, seq_len=48, batch_size=1)
    for number in range(40):
        source, _, row = plan.locate(number, np.zeros(1, np.int64))
        read = data.stream(plan.names[source[0]]).read(row[0] * 48, row[0] * 48 + 49)
        want = rows.make_batch(read[None], data.separator_id)
        found, placed = rows.pack([pieces.segments(number)], 48, 1)
        assert placed == [0]
        for name in want:
            np.testing.assert_array_equal(found[name], want[name], err_msg=name)
    used = pieces.passes(40)
    assert used["a"] * data.token_counts()["a"] == pytest.approx(3 * used["b"] * data.token_counts()["b"])


def test_a_data_directory_is_opened_if_its_ids_are_the_models(data):
    options = {"text_key": "text", "val_fraction": 0.1}
    for tokenizer in (data.tokenizer(), chat.grown(data.tokenizer())):
        assert replay.open_text(str(data.path), tokenizer, **options).sha256 == data.sha256
    with pytest.raises(ConfigError, match="has another tokenizer: set replay"):
        replay.open_text(str(data.path), tiny_chats.tokenizer(), **options)


def test_text_files(tmp_path):
    """Each document once, opened by EOS, in the one split or the other; held out is what the loader reads."""
    texts = [f"one two {' three' * (i % 5)} {i}" for i in range(200)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"said": text}) + "\n" for text in texts))
    tokenizer = tiny_chats.tokenizer()
    text = replay.open_text(str(tmp_path), tokenizer, text_key="said", val_fraction=0.2)
    seen = {}
    for split in ("train", "val"):
        stream = text.stream(replay.NAME, split)
        ids = stream.read(0, stream.tokens)
        assert stream.tokens == text.token_counts(split)[replay.NAME]
        seen[split] = [tokenizer.decode(part) for part in np.split(ids, np.flatnonzero(ids == tokenizer.eos_id))[1:]]
    assert sorted(seen["train"] + seen["val"]) == sorted(texts)
    assert 20 < len(seen["val"]) < 60
    held_out = list(rows.validation_rows(text, replay.NAME, seq_len=32, batch_size=4))
    assert sum(batch.target_bytes for batch in held_out) == sum(len(one.encode()) for one in seen["val"])


def test_no_text(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n')
    options = {"text_key": "text"}
    tokenizer = tiny_chats.tokenizer()
    with pytest.raises(ConfigError, match="no such file or folder"):
        replay.open_text(str(tmp_path / "b"), tokenizer, val_fraction=0.1, **options)
    with pytest.raises(ConfigError, match="has no text to learn from"):
        replay.open_text(str(tmp_path), tokenizer, val_fraction=0.999999, **options)
    short = replay.open_text(str(tmp_path), tokenizer, val_fraction=1e-9, **options)
    with pytest.raises(ConfigError, match="fewer than one row"):
        replay.Pieces(short, 128, seed=0)


def test_a_batch_has_about_one_piece():
    lengths, counted = np.full(100, 50), np.full(100, 20)
    assert replay.piece_tokens(0.5, lengths, counted, seq_len=4096, batch_size=8) == 4096
    a_batch = 8 * 1024 * 0.4 * 0.05 / 0.95
    assert replay.piece_tokens(0.05, lengths, counted, seq_len=1024, batch_size=8) == int(a_batch)
    assert replay.piece_tokens(0.001, lengths, counted, seq_len=1024, batch_size=8) == 128
    assert replay.piece_tokens(0.001, lengths, counted, seq_len=64, batch_size=8) == 64
